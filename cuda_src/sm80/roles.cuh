// One tile of rows in the fused backward kernel, where half of the warps sum up dV and half dK.
//
// A warp of the second half computes P, one of the first dP, of twice as many scores as it could
// hold both of: each fragment that it loads serves more products. The two are the same code over
// other tiles; only between the products they differ. P passes through shared memory in the order
// of registers, unrounded; in float64 as rows, from where the first half has its operands too.
#pragma once

#include "step.cuh"

namespace cf {

// dV or dK of a strip, in the columns of one warp.
template <typename Config>
struct RoleGradient {
  typename Fragments<Config>::C x[Share<Config>::keys][Share<Config>::d];

  CF_DEVICE const auto& dk() const { return x; }
  CF_DEVICE const auto& dv() const { return x; }
};

template <typename Config>
struct RoleStep : Step<Config> {
  using Base = Step<Config>;
  using typename Base::A;
  using typename Base::F;
  using typename Base::S;
  using typename Base::T;
  using typename Base::Tiles;
  using typename Base::Traits;
  using C = typename F::C;
  static constexpr int M = S::keys, N = S::rows, K = N * 16 / F::depth;
  static_assert(Tiles::q_pitch == Tiles::v_pitch, "the roles differ in nothing but addresses");
  static_assert(!changes_scores<Config>(), "options take the registers of the many scores");

  using Base::Base;

  static CF_DEVICE bool has_P() { return S::role() == 0; }
  // Where a lane has its part of P of a part's rows: fragments (i, j), two halves of four sums.
  CF_DEVICE FourSums<A>* shared_P(int part) const {
    FourSums<A>* const P = reinterpret_cast<FourSums<A>*>(this->t.P_sums);
    return P + (S::strip() / 16 * (Config::Br / 16) + part * N) * 64 + here();
  }
  static CF_DEVICE constexpr int fragment(int i, int j) { return (i * (Config::Br / 16) + j) * 64; }
  CF_DEVICE void share_P(const C (&P)[M][N]) const {
    FourSums<A>* const own = shared_P(S::rows_part());
#pragma unroll
    for (int i = 0; i < M; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const auto& x = P[i][j].x;
        own[fragment(i, j)] = {x[0], x[1], x[2], x[3]};
        own[fragment(i, j) + 32] = {x[4], x[5], x[6], x[7]};
      }
    }
  }
  static CF_DEVICE C load_P(const FourSums<A>* own, int i, int j) {
    const FourSums<A> low = own[fragment(i, j)], high = own[fragment(i, j) + 32];
    return {low.x[0], low.x[1], low.x[2], low.x[3], high.x[0], high.x[1], high.x[2], high.x[3]};
  }

  // The same of float64, where P lies as rows of a tile.
  static CF_DEVICE C load_P_rows(const T* own, int i, int j) {
    C P;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      P.x[e] = own[(16 * i + row_step(e)) * Tiles::s_pitch + 16 * j + column_step(e)];
    }
    return P;
  }

  // dP -> dS = P * (dP - delta).
  CF_DEVICE void differentiate_shared(C (&dP)[M][N], int row) const {
    const A* const delta = this->state + Config::Br + row + column_here();
    const FourSums<A>* const own = shared_P(S::rows_part());
    const T* const rows = this->t.P + (S::strip() + row_here()) * Tiles::s_pitch + row
                          + column_here();
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const FourRows<A> shift(delta, j);
#pragma unroll
      for (int i = 0; i < M; ++i) {
        C P;
        if constexpr (Traits::own) {
          P = load_P(own, i, j);
        } else {
          P = load_P_rows(rows, i, j);
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) dP[i][j].x[e] = P.x[e] * (dP[i][j].x[e] - shift[e]);
      }
    }
  }

  // P or dS of the warp's strip and part.
  template <typename Meanwhile>
  CF_DEVICE void differentiate_part(C (&x)[M][N], A scale, const Meanwhile& meanwhile) const {
    const bool values = !has_P();
    const int row = S::rows_part() * Traits::part;
    const ReaderA<Config, Layout::row, Tiles::q_pitch> keys(values ? this->t.V : this->t.K,
                                                            here());
    const ReaderB<Config, Layout::col, Tiles::q_pitch, Order::paired, Traits::rests> rows(
        values ? this->dO : this->Q, here());
    if (!has_P()) meanwhile();                          // P takes longer than dP
    if (S::has_scores()) multiply_scores<Config, Config::d>(x, keys, rows, S::strip(), row);
    if (has_P() && S::has_scores()) {
      subtract_lse<M, N>(x, scale, this->state + row + column_here());
      if (this->hides) hide_keys(x, range_view<Config>(this->ranges + row), -inf<A>());
      exponentiate<Config, M, N>(x);
      if constexpr (Traits::own) {
        share_P(x);
      } else {
        this->share(this->t.P, x, row);
      }
    }
    ptx::sync_block("P_shared");
    if (!has_P() && S::has_scores()) {
      differentiate_shared(x, row);
      if (this->hides) hide_keys(x, range_view<Config>(this->ranges + row), A(0));
      this->share(this->t.dS, x, row);
    }
  }

  CF_DEVICE static bool has_gradient() { return has_P() ? wants<Config>(DV) : wants<Config>(DK); }

  // dV += P^T dO or dK += dS^T Q over the rows of a part.
  CF_DEVICE void add_part(RoleGradient<Config>& g, const typename F::A (&a)[M][K], int part) const {
    if (!has_gradient()) return;
    const T* const rows = has_P() ? this->dO : this->Q;
    const ReaderB<Config, Layout::row, Tiles::q_pitch, Base::order, Traits::rests> B(rows, here());
    accumulate<Config>(g.x, a, B, part * Traits::part, S::part() * Traits::d_part);
  }

  template <typename Meanwhile>
  CF_DEVICE void add_own(RoleGradient<Config>& g, A scale,
                         const Meanwhile& meanwhile) const {
    C x[M][N];
    typename F::A a[M][K];
    differentiate_part(x, scale, meanwhile);
    if constexpr (Traits::own) {
      if (!S::has_scores()) return;
      make_operands<Config>(a, x);
      add_part(g, a, S::rows_part());
    } else if (has_P()) {
      add_rows(g, this->t.P);                           // dO and P may go then
    }
  }

  // float64: dV += P^T dO or dK += dS^T Q over all rows, with P or dS from a tile.
  CF_DEVICE void add_rows(RoleGradient<Config>& g, const T* tile) const {
    const ReaderA<Config, Layout::row, Tiles::s_pitch> read(tile, here());
#pragma unroll 1
    for (int part = 0; part < Config::Br / Traits::part; ++part) {
      typename F::A a[M][K];
      load_operands<Config>(a, read, S::strip(), part * Traits::part);
      add_part(g, a, part);
    }
  }

  // The parts that other warps of the strip differentiated.
  CF_DEVICE void add_shared(RoleGradient<Config>& g) const {
    if constexpr (!Traits::own) {
      if (!has_P()) add_rows(g, this->t.dS);
      return;
    }
    if (one_scores<Config>() && S::has_scores()) return;
#pragma unroll 1
    for (int n = 1; n < (one_scores<Config>() ? 2 : Config::parts); ++n) {
      const int part = one_scores<Config>() ? 0 : (S::part() + n) % Config::parts;
      typename F::A a[M][K];
      if (has_P()) {
        const FourSums<A>* const other = shared_P(part);
        C P[M][N];
#pragma unroll
        for (int i = 0; i < M; ++i) {
#pragma unroll
          for (int j = 0; j < N; ++j) P[i][j] = load_P(other, i, j);
        }
        make_operands<Config>(a, P);
      } else {
        const ReaderA<Config, Layout::row, Tiles::s_pitch> dS(this->t.dS, here());
        load_operands<Config>(a, dS, S::strip(), part * Traits::part);
      }
      add_part(g, a, part);
    }
  }
};

}  // namespace cf

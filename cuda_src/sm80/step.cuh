// One tile of rows in the fused backward kernel, where every warp has a part of dK and of dV.
#pragma once

#include "../ptx/reduce.cuh"
#include "dbias.cuh"
#include "unseen.cuh"

namespace cf {

template <typename T>
CF_DEVICE void swap(T& x, T& y) {
  const T kept = x;
  x = y;
  y = kept;
}

// dK and dV of a strip, in the columns of one warp.
template <typename Config>
struct Gradients {
  using C = typename Fragments<Config>::C;
  C k[Share<Config>::keys][Share<Config>::d], v[Share<Config>::keys][Share<Config>::d_v];

  CF_DEVICE const auto& dk() const { return k; }
  CF_DEVICE const auto& dv() const { return v; }
};

// One tile of rows, the body of the walk.
template <typename Config>
struct Step {
  using Traits = BackwardSm80Traits<Config>;
  using Tiles = FusedTiles<Config>;
  using S = Share<Config>;
  using F = Fragments<Config>;
  using T = typename Config::element;
  using A = accumulator<T>;
  static constexpr int M = S::keys, N = S::rows;
  // The two products of scores differ in nothing but addresses if d is d_v, and so do those of dV
  // and dK: in 3xTF32, where they are long, they are compiled once.
  static constexpr bool alike = Config::precision == 2 && Config::parts == 1
                                && Config::d == Config::d_v && wants<Config>(DK)
                                && wants<Config>(DV);
  static constexpr Order order = depth_order<Config>();
  const BackwardParams& p;
  const Tiles& t;
  const SeenSpan& seen;
  unsigned char* seen_keys;  // with options
  bool hides;                // whether some row does not see some key, or is none
  int stage;
  T *Q, *dO;                 // of this stage
  const A* state;
  const KeyRange* ranges;

  CF_DEVICE Step(const BackwardParams& p_, const Tiles& tiles, int tile, int stage_, bool some)
      : p(p_),
        t(tiles),
        seen(t.seen[tile % 4]),
        seen_keys(t.seen_keys + tile % 4 * Config::parts * Config::Bc),
        hides(some),
        stage(stage_),
        Q(t.Q + stage * Tiles::q_step),
        dO(t.dO + stage * Tiles::v_step),
        state(t.state + stage * 2 * Config::Br),
        ranges(t.ranges + stage * Config::Br) {}

  // x = A B^T of the warp's strip and the rows row ... row + piece: products of keys and queries,
  // or dP of values and gradients.
  template <int depth, int pitch>
  CF_DEVICE void multiply(typename F::C (&x)[M][N], const T* A, const T* B, int row) const {
    const ReaderA<Config, Layout::row, pitch> strip(A, here());
    const ReaderB<Config, Layout::col, pitch, Order::paired, Traits::rests> rows(B, here());
    multiply_scores<Config, depth>(x, strip, rows, S::strip(), row);
  }
  // qk -> exponents of P; -inf where a key is not seen.
  CF_DEVICE void find_exponents(typename F::C (&P)[M][N], int row, A scale) const {
    subtract_lse<M, N>(P, scale, state + row + column_here());
    if (hides) hide_keys(P, range_view<Config>(ranges + row), -inf<A>());
  }
  // The same with options, and of dP what is left of dS = P slope (dP - delta) but for P.
  CF_DEVICE void find_scores(typename F::C (&P)[M][N], typename F::C (&dP)[M][N], int row,
                             A scale) const {
    Scaling<A> scaling = scaling_of<Config>(p);
    scaling.scale = scale;
    const A* const lse = state + row + column_here();
    rebuild_scores<Config, M, N>(
        P, dP, score_view<Config>(t, stage, row), p, scaling, lse, lse + Config::Br, hides,
        [&](const typename F::C (&scores)[M][N]) {
          if constexpr (hides_any<Config>()) {
            unsigned char* const keys = seen_keys + S::rows_part() * Config::Bc + S::strip();
            mark_seen(scores, keys, row == S::rows_part() * Traits::part);
          }
        });
  }
  CF_DEVICE void differentiate(typename F::C (&dP)[M][N], const typename F::C (&P)[M][N],
                               int row) const {
    if constexpr (changes_scores<Config>()) {
#pragma unroll
      for (int x = 0; x < M * N * 8; ++x) {
        dP[x / 8 / N][x / 8 % N].x[x % 8] *= P[x / 8 / N][x / 8 % N].x[x % 8];
      }
      if constexpr (has_dbias<Config>()) {
        take_dbias(p, t, score_view<Config>(t, stage, row), dP,
                   t.dbias + stage * Config::Br + row + column_here());
      }
    } else {
      cf::differentiate<M, N>(dP, P, state + Config::Br + row + column_here());
    }
  }

  // Exponents of P, and dP.
  CF_DEVICE void find_both(typename F::C (&P)[M][N], typename F::C (&dP)[M][N], int row,
                           A scale) const {
    if constexpr (alike) {
      const T *A_tile = t.K, *B_tile = Q;
#pragma unroll 1
      for (int n = 0; n < 2; ++n) {
        if (n > 0) copy_sums(P, dP);
        multiply<Config::d, Tiles::q_pitch>(dP, A_tile, B_tile, row);
        A_tile = t.V;
        B_tile = dO;
      }
      if constexpr (!changes_scores<Config>()) find_exponents(P, row, scale);
    } else {
      multiply<Config::d, Tiles::q_pitch>(P, t.K, Q, row);
      if constexpr (!changes_scores<Config>()) find_exponents(P, row, scale);
      multiply<Config::d_v, Tiles::v_pitch>(dP, t.V, dO, row);
    }
    if constexpr (changes_scores<Config>()) find_scores(P, dP, row, scale);
  }

  static CF_DEVICE void copy_sums(typename F::C (&to)[M][N], const typename F::C (&from)[M][N]) {
#pragma unroll
    for (int i = 0; i < M * N; ++i) to[i / N][i % N] = from[i / N][i % N];
  }

  CF_DEVICE void share(T* tile, const typename F::C (&x)[M][N], int row) const {
    T* const own = tile + (S::strip() + row_here()) * Tiles::s_pitch + row
                   + column_here();
#pragma unroll
    for (int i = 0; i < M; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        store_scores<Config, Tiles::s_pitch>(own + 16 * i * Tiles::s_pitch + 16 * j, x[i][j]);
      }
    }
  }

  // dV += P^T dO and dK += dS^T Q over the rows row ... row + piece.
  template <typename Operand>
  CF_DEVICE void add_values(Gradients<Config>& g, const Operand& P, int row) const {
    if constexpr (wants<Config>(DV)) {
      const ReaderB<Config, Layout::row, Tiles::v_pitch, order, Traits::rests> B(dO, here());
      accumulate<Config>(g.v, P, B, row, S::part() * Traits::v_part);
    }
  }
  template <typename Operand>
  CF_DEVICE void add_keys(Gradients<Config>& g, const Operand& dS, int row) const {
    if constexpr (wants<Config>(DK)) {
      const ReaderB<Config, Layout::row, Tiles::q_pitch, order, Traits::rests> B(Q, here());
      accumulate<Config>(g.k, dS, B, row, S::part() * Traits::d_part);
    }
  }

  // The warp's own rows. P^T and dS^T are left in shared memory for whom they concern. meanwhile():
  // what there is to do beside.
  template <typename Meanwhile>
  CF_DEVICE void add_own(Gradients<Config>& g, A scale,
                         const Meanwhile& meanwhile) const {
    if constexpr (Traits::own) {
      meanwhile();
      add_pieces(g, scale);
    } else {
      add_in_turn(g, scale, meanwhile);
    }
  }

  // dV += P^T dO, then dK += dS^T Q, of which neither P nor dS remains.
  CF_DEVICE void add_both(Gradients<Config>& g, typename F::C (&P)[M][N], typename F::C (&dS)[M][N],
                          int row) const {
    const T* tile = dO;
#pragma unroll 1
    for (int n = 0; n < 2; ++n) {
      typename F::A a[M][N * 16 / F::depth];
      make_operands<Config>(a, P);
      const ReaderB<Config, Layout::row, Tiles::v_pitch, order, Traits::rests> B(tile, here());
      accumulate<Config>(g.v, a, B, row, 0);
      tile = Q;
      copy_sums(P, dS);
#pragma unroll
      for (int x = 0; x < S::keys * S::d; ++x) {
        swap(g.v[x / S::d][x % S::d], g.k[x / S::d][x % S::d]);
      }
    }
  }

  CF_DEVICE void add_pieces(Gradients<Config>& g, A scale) const {
    constexpr int K = N * 16 / F::depth;
#pragma unroll 1
    for (int i = 0; i < Traits::part; i += Traits::piece) {
      const int row = S::part() * Traits::part + i;
      typename F::C P[M][N], dS[M][N];
      // Products and the arithmetic that does not need them stand side by side, without a branch
      // between them: the powers beside dP, dS beside dV.
      find_both(P, dS, row, scale);
      exponentiate<Config, M, N>(P);
      if (!changes_scores<Config>() && hides) hide_keys(dS, range_view<Config>(ranges + row), A(0));
      if constexpr (Traits::exchange) share(t.P, P, row);
      if constexpr (alike) {
        differentiate(dS, P, row);
        share(t.dS, dS, row);
        add_both(g, P, dS, row);
      } else {
        typename F::A a[M][K];
        make_operands<Config>(a, P);
        add_values(g, a, row);
        differentiate(dS, P, row);
        share(t.dS, dS, row);
        make_operands<Config>(a, dS);
        add_keys(g, a, row);
      }
    }
  }

  // float64: P and dS of all rows pass through the same shared memory, one after the other.
  template <typename Meanwhile>
  CF_DEVICE void add_in_turn(Gradients<Config>& g, A scale,
                             const Meanwhile& meanwhile) const {
    static_assert(Traits::own || Traits::part == Traits::piece, "all of dS waits in registers");
    const int row = (one_scores<Config>() ? 0 : S::part()) * Traits::part;
    typename F::C P[M][N], dS[M][N];
    if (S::has_scores()) {
      find_both(P, dS, row, scale);
      exponentiate<Config, M, N>(P);
      if (!changes_scores<Config>() && hides) hide_keys(dS, range_view<Config>(ranges + row), A(0));
      share(t.P, P, row);
      differentiate(dS, P, row);
    }
    ptx::sync_block("P_written");
    if constexpr (wants<Config>(DV)) {
      add_all(t.P, [&](const auto& a, int k) { add_values(g, a, k); });
    }
    ptx::sync_block("P_read");                          // and dO
    meanwhile();
    if (S::has_scores()) share(t.dS, dS, row);
  }

  // add(operand, row) of P or dS over the rows of other warps; in float64 over all rows, and at
  // once where the operands fit in registers, which makes fewer sums.
  template <typename Add>
  CF_DEVICE void add_all(const T* tile, const Add& add) const {
    constexpr int rows = Traits::own || Traits::d_part > 32 ? N : Config::Br / 16;
    const ReaderA<Config, Layout::row, Tiles::s_pitch> read(tile, here());
#pragma unroll 1
    for (int i = Traits::own ? Traits::part : 0; i < Config::Br; i += 16 * rows) {
      const int row = Traits::own ? (S::part() * Traits::part + i) % Config::Br : i;
      typename F::A a[M][rows * 16 / F::depth];
      load_operands<Config>(a, read, S::strip(), row);
      add(a, row);
    }
  }

  // The rows that other warps of the strip differentiated; dS of all where P came first.
  CF_DEVICE void add_shared(Gradients<Config>& g) const {
    if constexpr (Traits::exchange) {
      if constexpr (wants<Config>(DV)) {
        add_all(t.P, [&](const auto& a, int row) { add_values(g, a, row); });
      }
    }
    if constexpr ((Traits::exchange || !Traits::own) && wants<Config>(DK)) {
      add_all(t.dS, [&](const auto& a, int row) { add_keys(g, a, row); });
    }
  }

  // sums += dS K, those of dq, in one pass over the warp's columns or in two.
  CF_DEVICE void add_queries(uint64 sums, int pass) const {
    const int column = S::dq_column() + pass * S::dq_columns;
    if (Config::precision == 2 || hides || hides_any<Config>()) {     // long code is compiled once
      add_columns<true>(sums, column);
    } else {
      add_columns<false>(sums, column);
    }
  }

  // hidden: some keys of the tile may be seen by no row of it.
  template <bool hidden>
  CF_DEVICE void add_columns(uint64 sums, int column) const {
    const ReaderA<Config, Layout::col, Tiles::s_pitch, order> A(t.dS, here());
    const ReaderB<Config, Layout::row, Tiles::q_pitch, order> B(t.K, here());
    typename F::C dq[S::dq_rows][S::dq_columns] = {};
    const bool some = hidden && hides;
    const int first = some ? seen.first : 0, end = some ? seen.end : Config::Bc;
    constexpr int chain = Config::precision == 2 ? chain_depth<Config>() : Config::Bc;
    constexpr int unrolled = hidden && Config::precision != 2 ? 1 : 8;
    Sums<Config> piece[S::dq_rows][S::dq_columns];
#pragma unroll 1
    for (int k0 = 0; k0 < Config::Bc; k0 += chain) {
      if (hidden && (k0 + chain <= first || k0 >= end)) continue;
#pragma unroll unrolled
      for (int x = 0; x < chain; x += F::depth) {
        const int k = k0 + x;
        if (hidden && chain == Config::Bc && (k + F::depth <= first || k >= end)) continue;
        decltype(operand<Config>(typename F::A{})) a[S::dq_rows];
#pragma unroll
        for (int i = 0; i < S::dq_rows; ++i) {
          a[i] = operand<Config>(A.load(16 * (S::dq_row() + i), k));
        }
#pragma unroll
        for (int j = 0; j < S::dq_columns; ++j) {
          typename F::B keys = B.load(k, 16 * (column + j));
          if constexpr (hides_any<Config>()) {
            forget_unseen<Config, order>(keys, seen_keys + k);
          } else if (some) {
            forget_keys<Config, order>(keys, first - k, end - k);
          }
          const auto b = operand<Config>(keys);
#pragma unroll
          for (int i = 0; i < S::dq_rows; ++i) add_product<Config>(piece[i][j], a[i], b);
        }
      }
      add_large<Config>(dq, piece, chain == Config::Bc);
    }
    add_small<Config>(dq, piece);
    sums += dq_offset<Config>(S::dq_row(), column, 0, here());
#pragma unroll
    for (int i = 0; i < S::dq_rows; ++i) {
#pragma unroll
      for (int j = 0; j < S::dq_columns; ++j) {
#pragma unroll
        for (int e = 0; e < 8; e += 4) {
          const auto& x = dq[i][j].x;
          ptx::add_to_global(sums + dq_offset<Config>(i, j, e / 4, 0), x[e], x[e + 1], x[e + 2],
                             x[e + 3]);
        }
      }
    }
  }
};

}  // namespace cf

// One tile of rows in the fused backward kernel, where every warp has a part of dK and of dV.
#pragma once

#include "../ptx/reduce.cuh"
#include "scores.cuh"

namespace cf {

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
  using Traits = BackwardFusedTraits<Config>;
  using Tiles = FusedTiles<Config>;
  using S = Share<Config>;
  using F = Fragments<Config>;
  using T = typename Config::element;
  using A = accumulator<T>;
  static constexpr int M = S::keys, N = S::rows;
  static constexpr Order order = depth_order<Config>();
  const Tiles& t;
  const SeenSpan& seen;
  bool hides;                // whether some row does not see some key, or is none
  T *Q, *dO;                 // of this stage
  const A* state;
  const KeyRange* ranges;

  CF_DEVICE Step(const Tiles& tiles, int tile, int stage, bool some)
      : t(tiles),
        seen(t.seen[tile % 4]),
        hides(some),
        Q(t.Q + stage * Tiles::q_step),
        dO(t.dO + stage * Tiles::v_step),
        state(t.state + stage * 2 * Config::Br),
        ranges(t.ranges + stage * Config::Br) {}

  // P of the warp's strip and the rows row ... row + piece.
  CF_DEVICE void find_P(typename F::C (&P)[M][N], int row,
                        const Exponential<Config>& exponential) const {
    using ReadK = ReaderA<Config, Layout::row, Tiles::q_pitch>;
    using ReadQ = ReaderB<Config, Layout::col, Tiles::q_pitch>;
    const ReadK keys(t.K, here());
    multiply_scores<Config, Config::d>(P, keys, ReadQ(Q, here()), S::strip(), row);
    find_exponents<Config>(P, state + row, exponential);
    if (hides) hide<Config>(P, ranges + row, S::strip(), -inf<A>());
  }
  CF_DEVICE void find_dP(typename F::C (&dP)[M][N], int row) const {
    using ReadV = ReaderA<Config, Layout::row, Tiles::v_pitch>;
    using ReadO = ReaderB<Config, Layout::col, Tiles::v_pitch>;
    const ReadV values(t.V, here());
    multiply_scores<Config, Config::d_v>(dP, values, ReadO(dO, here()), S::strip(), row);
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
    const ReaderB<Config, Layout::row, Tiles::v_pitch, order> B(dO, here());
    accumulate<Config>(g.v, P, B, row, S::part() * Traits::v_part);
  }
  template <typename Operand>
  CF_DEVICE void add_keys(Gradients<Config>& g, const Operand& dS, int row) const {
    const ReaderB<Config, Layout::row, Tiles::q_pitch, order> B(Q, here());
    accumulate<Config>(g.k, dS, B, row, S::part() * Traits::d_part);
  }

  // The warp's own rows. P^T and dS^T are left in shared memory for whom they concern. meanwhile():
  // what there is to do beside.
  template <typename Meanwhile>
  CF_DEVICE void add_own(Gradients<Config>& g, const Exponential<Config>& exponential,
                         const Meanwhile& meanwhile) const {
    if constexpr (Traits::own) {
      meanwhile();
      add_pieces(g, exponential);
    } else {
      add_in_turn(g, exponential, meanwhile);
    }
  }

  CF_DEVICE void add_pieces(Gradients<Config>& g, const Exponential<Config>& exponential) const {
    constexpr int K = N * 16 / F::depth;
#pragma unroll 1
    for (int i = 0; i < Traits::part; i += Traits::piece) {
      const int row = S::part() * Traits::part + i;
      typename F::C P[M][N], dS[M][N];
      // Products and the arithmetic that does not need them stand side by side, without a branch
      // between them: the powers beside dP, dS beside dV.
      find_P(P, row, exponential);
      find_dP(dS, row);
      exponentiate<Config>(P);
      if (hides) hide<Config>(dS, ranges + row, S::strip(), A(0));
      if constexpr (Traits::exchange) share(t.P, P, row);
      typename F::A a[M][K];
      make_operands<Config>(a, P);
      add_values(g, a, row);
      differentiate<Config>(dS, P, state + Config::Br + row);
      share(t.dS, dS, row);
      make_operands<Config>(a, dS);
      add_keys(g, a, row);
    }
  }

  // float64: P and dS of all rows pass through the same shared memory, one after the other.
  template <typename Meanwhile>
  CF_DEVICE void add_in_turn(Gradients<Config>& g, const Exponential<Config>& exponential,
                             const Meanwhile& meanwhile) const {
    static_assert(Traits::own || Traits::part == Traits::piece, "all of dS waits in registers");
    const int row = S::part() * Traits::part;
    typename F::C P[M][N], dS[M][N];
    find_P(P, row, exponential);
    find_dP(dS, row);
    exponentiate<Config>(P);
    if (hides) hide<Config>(dS, ranges + row, S::strip(), A(0));
    share(t.P, P, row);
    differentiate<Config>(dS, P, state + Config::Br + row);
    __syncthreads();                                    // P is there
    add_all(t.P, [&](const auto& a, int k) { add_values(g, a, k); });
    __syncthreads();                                    // P and dO are read
    meanwhile();
    share(t.dS, dS, row);
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
      add_all(t.P, [&](const auto& a, int row) { add_values(g, a, row); });
    }
    if constexpr (Traits::exchange || !Traits::own) {
      add_all(t.dS, [&](const auto& a, int row) { add_keys(g, a, row); });
    }
  }

  // sums += dS K, those of dq, in one pass over the warp's columns or in two.
  template <int pass>
  CF_DEVICE void add_queries(uint64 sums) const {
    if (hides) {
      add_columns<true>(sums, S::dq_column() + pass * S::dq_columns);
    } else {
      add_columns<false>(sums, S::dq_column() + pass * S::dq_columns);
    }
  }

  // hidden: some keys of the tile are seen by no row of it.
  template <bool hidden>
  CF_DEVICE void add_columns(uint64 sums, int column) const {
    const ReaderA<Config, Layout::col, Tiles::s_pitch, order> A(t.dS, here());
    const ReaderB<Config, Layout::row, Tiles::q_pitch, order> B(t.K, here());
    typename F::C dq[S::dq_rows][S::dq_columns];
    const int first = hidden ? seen.first : 0, end = hidden ? seen.end : 0;
    constexpr int chain = Config::precision == 2 ? chain_depth<Config>() : Config::Bc;
#pragma unroll(chain < Config::Bc ? 1 : Config::Bc)
    for (int k0 = 0; k0 < Config::Bc; k0 += chain) {
      Sums<Config> piece[S::dq_rows][S::dq_columns];
#pragma unroll(hidden ? 1 : 8)
      for (int k = k0; k < k0 + chain; k += F::depth) {
        if (hidden && (k + F::depth <= first || k >= end)) continue;
        decltype(operand<Config>(typename F::A{})) a[S::dq_rows];
#pragma unroll
        for (int i = 0; i < S::dq_rows; ++i) {
          a[i] = operand<Config>(A.load(16 * (S::dq_row() + i), k));
        }
#pragma unroll
        for (int j = 0; j < S::dq_columns; ++j) {
          typename F::B keys = B.load(k, 16 * (column + j));
          if constexpr (hidden) forget_keys<Config, order>(keys, first - k, end - k);
          const auto b = operand<Config>(keys);
#pragma unroll
          for (int i = 0; i < S::dq_rows; ++i) add_product<Config>(piece[i][j], a[i], b);
        }
      }
      add_totals<Config>(dq, piece, k0 == 0);
    }
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

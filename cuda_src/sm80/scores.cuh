// The products of the fused backward kernel, and their operands in registers and shared memory.
#pragma once

#include "walk.cuh"

namespace cf {

// What one warp works on.
template <typename Config>
struct Share {
  using Traits = BackwardSm80Traits<Config>;
  static constexpr int side = Traits::strips * Config::parts;        // warps of a role
  static CF_DEVICE int role() { return Config::roles == 1 ? 0 : 1 - warp_id() / side; }
  static CF_DEVICE int strip() { return warp_id() % Traits::strips * Traits::strip; }   // first key
  static CF_DEVICE int part() { return warp_id() % side / Traits::strips; }
  // Whether the warp computes scores. Where one warp of a strip does so for all parts, the two
  // roles take theirs from different parts, which keeps all tensor cores at work.
  static CF_DEVICE bool has_scores() {
    return !one_scores<Config>() || part() == (role() == 0 ? 0 : Config::parts - 1);
  }
  // The part of the rows whose scores it computes.
  static CF_DEVICE int rows_part() { return one_scores<Config>() ? 0 : part(); }
  static constexpr int keys = Traits::strip / 16, rows = Traits::piece / 16;            // fragments
  static constexpr int d = Traits::d_part / 16, d_v = Traits::v_part / 16;
  static constexpr int dq_rows = Config::Br / Traits::warps_m / 16;
  static constexpr int dq_columns = Config::d / Traits::warps_n / 16 / Traits::dq_passes;
  static CF_DEVICE int dq_row() { return warp_id() % Traits::warps_m * dq_rows; }
  static CF_DEVICE int dq_column() {
    return warp_id() / Traits::warps_m * dq_columns * Traits::dq_passes;
  }
};

// Views of the scores of a warp's strip of keys and of the rows row ... row + piece of a stage: of
// the ranges that rows see, or of all that there is to know of them.
template <typename Config>
using RangeView = KeysAsRows<accumulator<typename Config::element>, KeyRange, Share<Config>::keys,
                             Share<Config>::rows>;
template <typename Config>
using ScoreView = KeysAsRows<accumulator<typename Config::element>,
                             ScoreRow<accumulator<typename Config::element>>, Share<Config>::keys,
                             Share<Config>::rows>;
template <typename Config>
CF_DEVICE RangeView<Config> range_view(const KeyRange* ranges) {
  return {ranges + column_here(), Share<Config>::strip() + row_here()};
}
template <typename Config>
CF_DEVICE ScoreView<Config> score_view(const FusedTiles<Config>& t, int stage, int row) {
  return {t.rows + stage * Config::Br + row + column_here(),
          int(t.own->key0) + Share<Config>::strip() + row_here()};
}

// In which order tiles [k, ...] are read, so that lanes hit different banks.
template <typename Config>
CF_HOST_DEVICE constexpr Order depth_order() {
  return sizeof(typename Config::element) == 8 ? Order::natural : Order::paired;
}

// S^T [M, N] of fragments = A B over `depth`: K Q^T, or V dO^T.
template <typename Config, int depth, int M, int N, typename ReadA, typename ReadB>
CF_DEVICE void multiply_scores(typename Fragments<Config>::C (&S)[M][N], const ReadA& A,
                               const ReadB& B, int row, int column) {
  using F = Fragments<Config>;
  constexpr int piece = chain_depth<Config>() > 0 ? min(chain_depth<Config>(), depth) : depth;
  // In float64 longer code spills.
  constexpr int unrolled = sizeof(typename F::T) == 8 && piece > 64 ? 4 : piece;
  Sums<Config> sums[M][N];
#pragma unroll 2
  for (int k0 = 0; k0 < depth; k0 += piece) {
#pragma unroll unrolled
    for (int k = 0; k < piece; k += F::depth) {
      if (depth % piece != 0 && k0 + k >= depth) break;
      decltype(operand<Config>(typename F::A{})) a[M];
#pragma unroll
      for (int i = 0; i < M; ++i) a[i] = operand<Config>(A.load(row + 16 * i, k0 + k));
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const auto b = operand<Config>(B.load(k0 + k, column + 16 * j));
#pragma unroll
        for (int i = 0; i < M; ++i) add_product<Config, true>(sums[i][j], a[i], b);
      }
    }
    add_large<Config>(S, sums, k0 == 0);
  }
  add_small<Config>(S, sums);
}

// acc [M, N] of fragments += A B, with A [M, K] in registers.
template <typename Config, int M, int N, int K, typename OperandA, typename ReadB>
CF_DEVICE void accumulate(typename Fragments<Config>::C (&acc)[M][N], const OperandA (&a)[M][K],
                          const ReadB& B, int row, int column) {
  using F = Fragments<Config>;
  if constexpr (fresh_sums<Config>()) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      Sums<Config> sums[M];
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const auto b = operand<Config>(B.load(row + k * F::depth, column + 16 * j));
#pragma unroll
        for (int i = 0; i < M; ++i) add_product<Config>(sums[i], operand<Config>(a[i][k]), b);
      }
#pragma unroll
      for (int i = 0; i < M; ++i) {
#pragma unroll
        for (int e = 0; e < 8; ++e) acc[i][j].x[e] += sums[i].total(e);
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const auto b = B.load(row + k * F::depth, column + 16 * j);
#pragma unroll
        for (int i = 0; i < M; ++i) mma<Config>(acc[i][j], a[i][k], b);
      }
    }
  }
}

// Writes a fragment [16, 16] of P^T or dS^T, rounded to an operand, to shared memory. own: where
// the lane's first element belongs.
template <typename Config, int pitch>
CF_DEVICE void store_scores(typename Config::element* own,
                            const typename Fragments<Config>::C& c) {
  using T = typename Config::element;
#pragma unroll
  for (int e = 0; e < 8; e += 2) {
    T* const to = own + row_step(e) * pitch + column_step(e);
    if constexpr (sizeof(T) == 2) {
      *reinterpret_cast<uint32*>(to) = ptx::pack<T>(c.x[e], c.x[e + 1]);
    } else {
      to[0] = to_operand<Config>(c.x[e]);
      to[1] = to_operand<Config>(c.x[e + 1]);
    }
  }
}

// P and dS of a strip and a part as operands: in the registers that hold them.
template <typename Config, int M, int N, int K>
CF_DEVICE void make_operands(typename Fragments<Config>::A (&a)[M][K],
                             const typename Fragments<Config>::C (&c)[M][N]) {
#pragma unroll
  for (int i = 0; i < M; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const AccumulatorAsA<Config> operands(c[i][j]);
#pragma unroll
      for (int n = 0; n < operands.count; ++n) a[i][j * operands.count + n] = operands.a[n];
    }
  }
}

// The same from shared memory, in the order of `depth_order`: rows from `row` on.
template <typename Config, int M, int K, typename ReadA>
CF_DEVICE void load_operands(typename Fragments<Config>::A (&a)[M][K], const ReadA& A, int key,
                             int row) {
  using F = Fragments<Config>;
#pragma unroll
  for (int i = 0; i < M; ++i) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if constexpr (sizeof(typename F::T) == 4) {
        a[i][k] = A.load_pairs(key + 16 * i, row + k * F::depth);
      } else {
        a[i][k] = A.load(key + 16 * i, row + k * F::depth);
      }
    }
  }
}

}  // namespace cf

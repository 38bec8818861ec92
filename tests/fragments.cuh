// Every way from a tile in shared memory to a product of fragments, as a kernel for tests.
//
// One warp and a 16 x 16 product of a depth of 16, out[i] = A B each time:
// 0: A and B along k; 1: A and B from tiles [k, ...]; 2: (I A) B with I A from an accumulator.
#pragma once

#include "sm80/copy.cuh"

namespace cf {

struct FragmentsParams {
  Tensor a, b;               // A [16, 16], B^T [16, 16]
  Tensor a_t, b_t;           // A^T, B
  uint64 out;                // [3, 16, 16] of the accumulators' type
  int64 vector_bytes;
};

// Starts to copy a 16 x 16 array into a tile.
template <typename Config, int pitch>
CF_DEVICE void copy_square(typename Config::element* tile, const Tensor& t, int64 vector_bytes) {
  if (copies_whole<Config>(t, vector_bytes)) {
    copy_rows<Config, 16, 16, pitch, true>(copy_place<Config, 16, 16, pitch>(tile), t,
                                           copy_start<Config, 16, 16>(t, t.address, 0), 0, 16, 16);
  } else {
    copy_any_rows<Config, 16, pitch>(
        tile, 16, {t, t.address, PackedRows(0, 1), 0, 16, 16, vector_bytes});
  }
}

template <typename Config>
CF_DEVICE void fragments(const FragmentsParams& p) {
  using F = Fragments<Config>;
  using T = typename F::T;
  CF_DYNAMIC_SHARED(memory);
  constexpr int along = rows_pitch<T>(16), across = depth_pitch<T>(16);
  T* const a = reinterpret_cast<T*>(memory);
  T* const b = a + 16 * along;
  T* const a_t = b + 16 * along;
  T* const b_t = a_t + 16 * across;
  copy_square<Config, along>(a, p.a, p.vector_bytes);
  copy_square<Config, along>(b, p.b, p.vector_bytes);
  ptx::close_copies();
  copy_square<Config, across>(a_t, p.a_t, p.vector_bytes);
  copy_square<Config, across>(b_t, p.b_t, p.vector_bytes);
  ptx::close_copies();
  ptx::wait_for_copies<1>("first_copied");
  round_tile<Config, 16, 16, along>(a);
  round_tile<Config, 16, 16, along>(b);
  ptx::wait_for_copies<0>("second_copied");
  round_tile<Config, 16, 16, across>(a_t);
  round_tile<Config, 16, 16, across>(b_t);
  ptx::sync_block("tiles_ready");
  const ReaderA<Config, Layout::row, along> A(a);
  const ReaderB<Config, Layout::col, along> B(b);
  const ReaderA<Config, Layout::col, across> A_t(a_t);
  const ReaderB<Config, Layout::row, across> B_t(b_t);
  Sums<Config> sums[3];
#pragma unroll
  for (int k = 0; k < 16; k += F::depth) {
    add_product(sums[0], operand<Config>(A.load(0, k)), operand<Config>(B.load(k, 0)));
    add_product(sums[1], operand<Config>(A_t.load(0, k)), operand<Config>(B_t.load(k, 0)));
  }
  typename F::C c;                                       // A, by way of the tile A^T
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int row = lane_row() + row_step(e), column = lane_column() + column_step(e);
    c.x[e] = widen(a_t[column * across + row]);
  }
  const AccumulatorAsA<Config> P(c);
#pragma unroll
  for (int i = 0; i < P.count; ++i) {
    add_product(sums[2], operand<Config>(P.a[i]), operand<Config>(B_t.load(i * F::depth, 0)));
  }
  typename F::Sum* const out = reinterpret_cast<typename F::Sum*>(p.out);
#pragma unroll
  for (int i = 0; i < 3; ++i) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int row = lane_row() + row_step(e), column = lane_column() + column_step(e);
      out[(i * 16 + row) * 16 + column] = sums[i].total(e);
    }
  }
}

}  // namespace cf

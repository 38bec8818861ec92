// Accumulators of wgmma to memory.
#pragma once

#include "softmax.cuh"

namespace cf {

// Row r of a work in out or lse; head: where its first query head begins there.
CF_DEVICE uint64 row_address(const HopperForwardParams& p, const Tensor& t, uint64 head,
                             const Work& w, int r) {
  const uint32 row = w.row0 + r, pack = p.pack;
  if (pack == 1) return head + row * t.n;
  return head + row % pack * t.h + row / pack * t.n;
}

// The same of a thread's two rows, r and r + 8.
CF_DEVICE void row_addresses(const HopperForwardParams& p, const Tensor& t, uint64 head,
                             const Work& w, int r, uint64 (&rows)[2]) {
  if (p.pack == 1) {
    rows[0] = head + uint32(w.row0 + r) * t.n;
    rows[1] = rows[0] + 8 * t.n;
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) rows[i] = row_address(p, t, head, w, r + 8 * i);
  }
}

// Ends the sums of the rows r and r + 8: stores lse, and factor becomes 1 / l. They are -inf and 0
// for rows that see no key, and for rows behind q_lens. score_of_S: the factor from S to scores in
// natural units.
CF_DEVICE void close_rows(const HopperForwardParams& p, const Work& w, int r, const RowState& state,
                          float score_of_S, float (&factor)[2]) {
  float lse[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float l = row_sum(state.l[i]);
    const bool any = r + 8 * i < w.rows && l != 0.f;
    // The score is rounded as in the backward pass, or large ones and their lse would not cancel.
    const float m = ptx::multiply(score_of_S, state.m[i]), sum = m + log(l);
    lse[i] = any ? sum : -inf<float>();
    factor[i] = any ? ptx::reciprocal(l) : 0.f;
  }
  if (threadIdx.x % 4 != 0 || p.lse.address == 0) return;
  uint64 rows[2];
  row_addresses(p, p.lse, w.lse, w, r, rows);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (r + 8 * i < w.count) at<float>(rows[i]) = lse[i];
  }
}

// out = acc / l as float32: partial results, to be merged.
template <int n>
CF_DEVICE void store_wide_rows(const HopperForwardParams& p, const Work& w, int r,
                               const float (&acc)[n], const float (&factor)[2]) {
  const int column0 = 2 * (int(threadIdx.x) % 4);
  uint64 rows[2];
  row_addresses(p, p.out, w.out, w, r, rows);
#pragma unroll
  for (int i = 0; i < n; i += 2) {
    const int own = row_of(i), column = column0 + i / 4 * 8;
    const float f = factor[own];
    HalfChunk two = {};
    if (f != 0.f) two = {ptx::float_to_bits(acc[i] * f), ptx::float_to_bits(acc[i + 1] * f)};
    if (r + 8 * own < w.count && column < int(p.d_v)) at<HalfChunk>(rows[own] + 4 * column) = two;
  }
}

// out = acc / l. The four lanes of a row hold two neighbouring columns of each eight. Of two times
// eight columns, the even lanes take the first ones from their neighbours and give the second ones:
// then each has four that lie side by side, and all together 32 bytes.
template <typename T, int n>
CF_DEVICE void store_rows(const HopperForwardParams& p, const Work& w, int r,
                          const float (&acc)[n], const float (&factor)[2]) {
  const int t = int(threadIdx.x) % 4;
  const bool odd = t % 2 != 0;
  const int column0 = odd ? 6 + 2 * t : 2 * t;
  uint64 rows[2];
  row_addresses(p, p.out, w.out, w, r, rows);
  int columns[2];
#pragma unroll
  for (int own = 0; own < 2; ++own) {
    columns[own] = r + 8 * own < w.count ? int(p.d_v) - column0 : 0;
    rows[own] += 2 * column0;
  }
#pragma unroll
  for (int block = 0; block < n / 8; ++block) {
#pragma unroll
    for (int own = 0; own < 2; ++own) {
      uint32 word[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int i = 8 * block + 4 * j + 2 * own;
        const uint32 two = ptx::pack<T>(acc[i] * factor[own], acc[i + 1] * factor[own]);
        // A select: the accumulators of a row without keys may hold NaN.
        word[j] = factor[own] != 0.f ? two : 0;
      }
      const uint32 taken = __shfl_xor_sync(0xFFFFFFFF, odd ? word[0] : word[1], 1);
      const HalfChunk four = {odd ? taken : word[0], odd ? word[1] : taken};
      if (16 * block < columns[own]) at<HalfChunk>(rows[own] + 32 * block) = four;
    }
  }
}

// The element type of out.
template <typename T, int wide>
struct ResultOf {
  using type = float;
};
template <typename T>
struct ResultOf<T, 0> {
  using type = T;
};

// out = acc / l one element at a time, where rows are no whole 8 bytes or begin anywhere.
template <typename O, int n>
CF_DEVICE void store_narrow_rows(const HopperForwardParams& p, const Work& w, int r,
                                 const float (&acc)[n], const float (&factor)[2]) {
  const int column0 = 2 * (int(threadIdx.x) % 4);
  uint64 rows[2];
  row_addresses(p, p.out, w.out, w, r, rows);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const int own = row_of(i), column = column0 + i / 4 * 8 + i % 2;
    const float x = factor[own] != 0.f ? acc[i] * factor[own] : 0.f;
    if (r + 8 * own < w.count && column < int(p.d_v)) {
      at<O>(rows[own] + int(sizeof(O)) * column) = narrow<O>(x);
    }
  }
}

// One warp: the rows of a tile of which no row sees a key, by zeros of the type Z: as wide as
// stores to out may be.
template <typename Z>
CF_DEVICE void store_nothing(const HopperForwardParams& p, const Work& w) {
  const int zeros = int(p.d_v) * (p.out.kind == FLOAT32 ? 4 : 2) / int(sizeof(Z));
  for (int i = int(threadIdx.x) % 32; i < w.count * zeros; i += 32) {
    const int r = i / zeros;
    at<Z>(row_address(p, p.out, w.out, w, r) + int(sizeof(Z)) * (i % zeros)) = Z{};
    if (i % zeros == 0 && p.lse.address != 0) {
      at<float>(row_address(p, p.lse, w.lse, w, r)) = -inf<float>();
    }
  }
}

}  // namespace cf

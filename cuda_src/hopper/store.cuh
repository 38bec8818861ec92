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

// Ends the sum of row r, which is row `own` of the thread's two: stores lse and returns 1 / l. Both
// are for rows that see no key, and rows behind q_lens, -inf and 0. score_of_S: the factor from S
// to scores in natural units.
CF_DEVICE float close_row(const HopperForwardParams& p, const Work& w, int r, int own,
                          const RowState& state, float score_of_S) {
  const float l = row_sum(state.l[own]);
  const bool any = r < w.rows && l != 0.f;
  if (threadIdx.x % 4 == 0 && r < w.count && p.lse.address != 0) {
    // The score is rounded as in the backward pass, or large ones and their lse would not cancel.
    const float m = ptx::multiply(score_of_S, state.m[own]);
    const float lse = any ? m + log(l) : -inf<float>();
    at<float>(row_address(p, p.lse, w.lse, w, r)) = lse;
  }
  return any ? ptx::reciprocal(l) : 0.f;
}

// The same as float32: partial results, to be merged.
template <int n>
CF_DEVICE void store_wide_row(const HopperForwardParams& p, const Work& w, int r, int own,
                              const float (&acc)[n], float factor) {
  const int column0 = 2 * (int(threadIdx.x) % 4);
  const uint64 row = row_address(p, p.out, w.out, w, r) + 4 * column0;
  const int columns = r < w.count ? int(p.d_v) - column0 : 0;
#pragma unroll
  for (int block = 0; block < n / 4; ++block) {
    const int i = 4 * block + 2 * own;
    HalfChunk two = {};
    if (factor != 0.f) {
      two = {ptx::float_to_bits(acc[i] * factor), ptx::float_to_bits(acc[i + 1] * factor)};
    }
    if (8 * block < columns) at<HalfChunk>(row + 32 * block) = two;
  }
}

// out = acc / l. The four lanes of a row hold two neighbouring columns of each eight. Of two times
// eight columns, the even lanes take the first ones from their neighbours and give the second ones:
// then each has four that lie side by side, and all together 32 bytes.
template <typename T, int n>
CF_DEVICE void store_row(const HopperForwardParams& p, const Work& w, int r, int own,
                         const float (&acc)[n], float factor) {
  const int t = int(threadIdx.x) % 4;
  const bool odd = t % 2 != 0;
  const int column0 = odd ? 6 + 2 * t : 2 * t;
  const uint64 row = row_address(p, p.out, w.out, w, r) + 2 * column0;
  const int columns = r < w.count ? int(p.d_v) - column0 : 0;
#pragma unroll
  for (int block = 0; block < n / 8; ++block) {
    uint32 word[2] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int i = 8 * block + 4 * j + 2 * own;
      // A select: the accumulators of a row without keys may hold NaN.
      word[j] = factor != 0.f ? ptx::pack<T>(acc[i] * factor, acc[i + 1] * factor) : 0;
    }
    const uint32 taken = __shfl_xor_sync(0xFFFFFFFF, odd ? word[0] : word[1], 1);
    const HalfChunk four = {odd ? taken : word[0], odd ? word[1] : taken};
    if (16 * block < columns) at<HalfChunk>(row + 32 * block) = four;
  }
}

// One warp: the rows of a tile of which no row sees a key.
CF_DEVICE void store_nothing(const HopperForwardParams& p, const Work& w) {
  const int chunks = int(p.d_v) / (p.out.kind == FLOAT32 ? 4 : 8);
  for (int i = int(threadIdx.x) % 32; i < w.count * chunks; i += 32) {
    const int r = i / chunks;
    at<Chunk>(row_address(p, p.out, w.out, w, r) + 16 * (i % chunks)) = Chunk{};
    if (i % chunks == 0 && p.lse.address != 0) {
      at<float>(row_address(p, p.lse, w.lse, w, r)) = -inf<float>();
    }
  }
}

}  // namespace cf

// The keys that bias and mask hide from all rows of the forward kernel.
#pragma once

#include "softmax.cuh"

namespace cf {

// Which of the thread's columns any row of the warp sees, a bit each, as in `columns_before`.
template <int n>
CF_DEVICE uint32 seen_columns(const float (&S)[n], const Work& w, int r) {
  static_assert(n <= 64, "a word holds 32 columns");
  uint32 seen = 0;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (S[i] != -inf<float>() && r + 8 * row_of(i) < w.rows) seen |= 1u << (i / 4 * 2 + i % 2);
  }
  for (int step = 4; step < 32; step *= 2) seen |= __shfl_xor_sync(0xFFFFFFFF, seen, step);
  return seen;
}

// The columns that any warp sees. words: [warps, 4], one of each thread of a quad.
template <int warps>
struct SeenColumns {
  uint32 word[4] = {};

  CF_DEVICE explicit SeenColumns(const uint32* words) {
    for (int warp = 0; warp < warps; ++warp) {
      const Chunk one = *reinterpret_cast<const Chunk*>(words + 4 * warp);
#pragma unroll
      for (int t = 0; t < 4; ++t) word[t] |= one.word[t];
    }
  }
  CF_DEVICE bool has(int key) const {
    const int t = key % 8 / 2;                          // a select: registers have no index
    const uint32 own = t < 2 ? (t == 0 ? word[0] : word[1]) : (t == 2 ? word[2] : word[3]);
    return (own >> (key / 8 * 2 + key % 2) & 1) != 0;
  }
};

}  // namespace cf

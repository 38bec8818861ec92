// The keys that mask and bias hide from all rows of a tile: their values must not reach a product.
#pragma once

#include "../view/accumulators.cuh"

namespace cf {

// Which of a lane's keys any row of the warp sees, a bit each, of scores [M, N] of fragments with
// queries as rows: bit i is key 8 (i / 2) + i % 2, counted from the lane's first.
template <int M, int N, typename Scores>
CF_DEVICE uint32 seen_columns(const Scores& S) {
  static_assert(N <= 8, "a word holds 32 keys of a lane");
  using View = QueriesAsRows<M, N>;
  uint32 seen = 0;
#pragma unroll
  for (int x = 0; x < View::count; ++x) {
    const auto score = View().at(S, x);
    if (score != -inf<decltype(score + score)>()) seen |= 1u << x % View::keys;
  }
  for (int step = 4; step < 32; step *= 2) seen |= __shfl_xor_sync(0xFFFFFFFF, seen, step);
  return seen;
}

// The keys that any of some warps sees. words: of each of them four, one of each lane of a quad; a
// warp's words lie `step` words behind those of the warp before.
struct SeenColumns {
  uint32 word[4] = {};

  CF_DEVICE SeenColumns(const uint32* words, int warps, int step) {
    for (int warp = 0; warp < warps; ++warp) {
      const Chunk one = *reinterpret_cast<const Chunk*>(words + step * warp);
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

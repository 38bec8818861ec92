// In which order blocks take the tiles of a problem.
#pragma once

#include "../params.cuh"

namespace cf {

// a / b, quickly where both have 32 bits.
CF_DEVICE int64 divide(int64 a, int64 b) {
  return (uint64(a) | uint64(b)) >> 32 == 0 ? int64(uint32(a) / uint32(b)) : a / b;
}

// A tile of a sequence, which is a key head of a batch entry. Tiles are numbered from the longest.
struct Turn {
  int64 sequence, tile;
};

// Whose turn is the i-th. If tiles differ in length, the first ones of `together` sequences come
// first, then the second ones: with all of one sequence in a row the last long tile would be left
// to one block, and a tenth of the time to few. More sequences at a time would leave fewer blocks
// to share what is loaded of one.
CF_DEVICE Turn turn_of(const Params& p, int64 i, int64 tiles) {
  const bool differ = p.right < p.Nk && p.left >= p.Nk;
  const int64 together = differ ? 32 : 1;
  const int64 group = divide(i, tiles * together), first = group * together;
  const int64 sequences = min(together, p.batch * p.heads_k - first), rest = i - first * tiles;
  const int64 tile = divide(rest, sequences);
  return {first + rest - tile * sequences, tile};
}

}  // namespace cf

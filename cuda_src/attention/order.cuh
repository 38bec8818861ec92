// In which order blocks take the tiles of a problem.
#pragma once

#include "../params.cuh"

namespace cf {

// A tile of a sequence, which is a key head of a batch entry. Tiles are numbered from the longest.
struct Turn {
  int64 sequence, tile;
};

// Whose turn is the i-th. If tiles differ in length, the first ones of 32 sequences come first,
// then the second ones: with all of one sequence in a row the last long tile would be left to one
// block, and a tenth of the time to few. More sequences at a time would leave fewer blocks to share
// what is loaded of one.
CF_DEVICE Turn turn_of(const Params& p, int64 i, int64 tiles) {
  constexpr int64 together = 32;
  const bool differ = p.right < p.Nk && p.left >= p.Nk;
  if (!differ) {
    const int64 sequence = i / tiles;
    return {sequence, i - sequence * tiles};
  }
  const int64 first = i / (together * tiles) * together, rest = i - first * tiles;
  const int64 sequences = min(together, p.batch * p.heads_k - first), tile = rest / sequences;
  return {first + rest - tile * sequences, tile};
}

}  // namespace cf

// What a block of the backward kernel does: the keys that it owns, and the tiles of rows that see
// any of them.
#pragma once

#include "../attention/gradient.cuh"
#include "../attention/schedule.cuh"
#include "../ptx/wgmma_columns.cuh"
#include "params.cuh"

namespace cf {

// The keys of a block, in shared memory. The planner keeps rows and keys of a sequence below 2^30.
struct KeyWork {
  int b, head_k;
  int key0, keys;                 // the first key, and how many are in the array
  int first, end;                 // packed rows that see any of the keys
  int whole_first, whole_end;     // tiles of rows all of which see all of the keys
  int seen_first, seen_end;       // keys, counted from the first, that any row sees
  int left, right, kv_len;        // of the Diagonals
  uint64 state, dq_sums;          // of the key head's first tile of rows
};

template <typename Config>
CF_DEVICE KeyWork open_key_work(const BackwardSm90Params& p, int64 task) {
  constexpr int64 Bc = Config::Bc;
  const TileCoord at = tile_coord(p, task, ceil_div(p.Nk, Bc));
  KeyWork w = {};
  w.state = state_address<float>(p, at.sequence, 0, Config::Br);
  w.dq_sums = dq_address<Config>(p, at.sequence, 0);
  w.b = int(at.sequence / p.heads_k);
  w.head_k = int(at.sequence % p.heads_k);
  w.key0 = int(at.tile * Bc);
  w.keys = int(min(p.Nk - w.key0, Bc));
  const Sequence s = open_sequence(p, w.b);
  KeyBand band(p, s, w.key0, w.keys);
  band.find_whole_tiles<Config::Br, Config::Bc>(p, s, w.key0, w.keys);
  const Diagonals diagonals(p, s.offset);
  w.left = diagonals.left;
  w.right = diagonals.right;
  w.kv_len = int(s.kv_len);
  w.first = int(band.first);
  w.end = int(band.end);
  w.seen_first = band.seen_first;
  w.seen_end = band.seen_end;
  w.whole_first = band.whole_first;
  w.whole_end = band.whole_end;
  return w;
}

}  // namespace cf

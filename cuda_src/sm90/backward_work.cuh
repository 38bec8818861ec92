// What a block of the backward kernel does: the keys that it owns, and the tiles of rows that see
// any of them.
#pragma once

#include "../sm80/gradient.cuh"
#include "../ptx/wgmma_columns.cuh"
#include "../attention/order.cuh"
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

// A key counted from the block's first, and no further than its last.
CF_DEVICE int from_first(const KeyWork& w, int64 key) {
  return int(min(max(key - w.key0, int64(0)), int64(w.keys)));
}

template <typename Config>
CF_DEVICE KeyWork open_key_work(const BackwardSm90Params& p, int64 task) {
  constexpr int64 Br = Config::Br, Bc = Config::Bc;
  const Turn turn = turn_of(p, task, ceil_div(p.Nk, Bc));   // the first causal keys are seen most
  KeyWork w = {};
  w.state = p.state + turn.sequence * row_tiles<Config>(p) * (2 * Br * 4);
  w.dq_sums = dq_address<Config>(p, turn.sequence, 0);
  w.b = int(turn.sequence / p.heads_k);
  w.head_k = int(turn.sequence % p.heads_k);
  w.key0 = int(turn.tile * Bc);
  w.keys = int(min(p.Nk - w.key0, Bc));
  const int64 q_len = length(p.q_lens, w.b, p.Nq), kv_len = length(p.kv_lens, w.b, p.Nk);
  const int64 offset = offset_of(p, q_len, kv_len);
  const Range queries = visible_queries(p, w.key0, w.key0 + w.keys, q_len, kv_len, offset);
  const Diagonals diagonals(p, offset);
  w.left = diagonals.left;
  w.right = diagonals.right;
  w.kv_len = int(kv_len);
  w.first = int(queries.first * p.group);
  w.end = int(queries.end * p.group);
  w.seen_first = from_first(w, queries.first + offset - p.left);
  w.seen_end = from_first(w, min(queries.end + offset + p.right, kv_len));
  if (w.keys < Bc || w.key0 + Bc > kv_len) return w;
  // A row sees the last of the keys from one position on, and the first up to another.
  const int64 low = (w.key0 + Bc - 1 - p.right - offset) * p.group;
  const int64 high = (w.key0 + p.left - offset + 1) * p.group;
  w.whole_first = int(ceil_div(max(low, int64(w.first)), Br));
  w.whole_end = int(max(min(high, int64(w.end)), int64(0)) / Br);
  return w;
}

}  // namespace cf

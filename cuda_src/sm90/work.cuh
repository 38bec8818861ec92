// What a block does: tiles of query rows, one after the other, and the key tiles of each.
#pragma once

#include "../attention/band.cuh"
#include "../attention/schedule.cuh"
#include "params.cuh"

namespace cf {

// A tile of packed rows and the keys that they see. The producer works it out and the consumers
// read it in shared memory, as often as that saves registers.
struct alignas(16) Work {
  int b, head, head_k;     // batch entry, first query head, key head; b < 0: there is no more work
  int row0, rows, count;   // first packed row; how many are real; how many are in the array
  int last_tile;           // where the last key tile begins, and the first one
  int first_tile;
  int full_end, full;      // key tiles from `full` on that begin before `full_end` hide no key
  int first, end;          // the keys that any row sees; none: end <= first
  int left, right, kv_len; // of the Diagonals
  int64 offset;
  uint64 out, lse;         // where the first query head begins in them

  CF_DEVICE bool empty() const { return end <= first; }
  CF_DEVICE bool hides(int key0) const { return key0 >= full_end || key0 < full; }
  CF_DEVICE int query(int r, int pack) const {
    return pack == 1 ? row0 + r : int(uint32(row0 + r) / uint32(pack));
  }
  CF_DEVICE int head_of(int r, int pack) const {
    return pack == 1 ? head : head + int(uint32(row0 + r) % uint32(pack));
  }
  CF_DEVICE int first_key(int query) const { return max(query + left, 0); }
  CF_DEVICE int end_key(int query) const { return min(query + right, kv_len); }
};

// The key tiles of a work. They begin at multiples of Bc: the sums are then the same whether a mask
// or a range hides keys.
template <typename Config>
CF_DEVICE void find_key_tiles(Work& w, const ForwardSm90Params& p, int64 offset) {
  constexpr int Bc = Config::Bc;
  const Diagonals diagonals(p, offset);
  w.offset = offset;
  w.left = diagonals.left;
  w.right = diagonals.right;
  w.first = w.end = w.full_end = w.full = w.last_tile = w.first_tile = 0;
  if (w.rows == 0) return;
  const int first = w.query(0, p.pack), last = w.query(w.rows - 1, p.pack);
  const Range range = visible_keys(p, first + offset, last + offset, w.kv_len);
  w.first = int(range.first);
  w.end = int(range.end);
  w.first_tile = w.first / Bc * Bc;
  w.last_tile = (w.end - 1) / Bc * Bc;
  // The first row is the first to have keys hidden on its right, the last row on its left.
  w.full_end = max(w.end_key(first), 0) / Bc * Bc;
  w.full = ceil_div(min(w.first_key(last), w.kv_len), Bc) * Bc;
}

// The tasks of a block.
template <typename Config>
struct Turns : Sections<Config, ForwardSm90Params> {
  using Base = Sections<Config, ForwardSm90Params>;
  using Base::head, Base::p, Base::tile;

  CF_DEVICE explicit Turns(const ForwardSm90Params& p_) : Base{p_} {}

  CF_DEVICE void open(Work& w) const {
    const int per_batch = int(p.heads_q) / p.pack;
    w.b = head / per_batch;
    w.head = head % per_batch * p.pack;
    w.head_k = w.head / int(p.group);
    w.out = head_address(p.out, w.b, w.head);
    w.lse = head_address(p.lse, w.b, w.head);
    w.row0 = tile * Config::Br;
    w.count = min(p.pack * int(p.Nq) - w.row0, Config::Br);
    const Sequence s = open_sequence(p, w.b);
    w.kv_len = int(s.kv_len);
    w.rows = max(min(p.pack * int(s.q_len) - w.row0, w.count), 0);
    find_key_tiles<Config>(w, p, s.offset);
  }
};

}  // namespace cf

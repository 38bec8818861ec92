// What a block does: tiles of query rows, one after the other, and the key tiles of each.
#pragma once

#include "../attention/mask.cuh"
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

// The tasks of a block, which are tiles of rows of a head. The heads are worked on section by
// section, so that the keys of a section stay in the L2 cache. Within a section the tiles with the
// last rows come first, of all its heads: in causal attention they have the most keys. The blocks
// take tasks in turns, back and forth, and each section begins with a new turn, so that no block
// gets the longest tasks each time. section = 0: all tiles of a head, then the next head.
// The planner keeps tasks, and packed rows and keys of a sequence, below 2^30.
template <typename Config>
struct Turns {
  const ForwardSm90Params& p;
  const int most = section_heads();        // heads of a section
  int turn = 0;
  int section = 0;         // the turn's section, and which of the section's turns it is
  int head = 0, tile = 0;  // of the task

  CF_DEVICE int tiles() const { return ceil_div(p.pack * int(p.Nq), Config::Br); }
  CF_DEVICE int heads() const { return int(p.batch) * (int(p.heads_q) / p.pack); }

  // A few more than the planner asks for, where their tiles then fill turns, there and back.
  CF_DEVICE int section_heads() const {
    const int there_and_back = 2 * int(gridDim.x);
    const int turns = ceil_div(p.section * tiles(), there_and_back) * there_and_back;
    const int filling = turns / tiles();
    return filling >= p.section && filling - p.section <= p.section / 16 ? filling : p.section;
  }

  // The next task; false if there is none.
  CF_DEVICE bool next() {
    const int blocks = int(gridDim.x), block = int(blockIdx.x);
    while (true) {
      const int first = section * most;
      const int here = p.section == 0 ? heads() : min(most, heads() - first);
      if (here <= 0) return false;
      const bool back = (turn + section) % 2 != 0;
      const int place = turn * blocks + (back ? blocks - 1 - block : block);
      const bool over = turn * blocks >= here * tiles();
      if (over && p.section == 0) return false;
      ++turn;
      if (over) {
        ++section;
        turn = 0;
      } else if (place < here * tiles()) {
        const int step = p.section == 0 ? tiles() : here;
        const int major = place / step, minor = place % step;
        head = p.section == 0 ? major : first + minor;
        tile = tiles() - 1 - (p.section == 0 ? minor : major);
        return true;
      }
    }
  }

  CF_DEVICE void open(Work& w) const {
    const int per_batch = int(p.heads_q) / p.pack;
    w.b = head / per_batch;
    w.head = head % per_batch * p.pack;
    w.head_k = w.head / int(p.group);
    w.out = p.out.address + w.b * p.out.b + w.head * p.out.h;
    w.lse = p.lse.address + w.b * p.lse.b + w.head * p.lse.h;
    w.row0 = tile * Config::Br;
    w.count = min(p.pack * int(p.Nq) - w.row0, Config::Br);
    const int64 q_len = length(p.q_lens, w.b, p.Nq);
    w.kv_len = int(length(p.kv_lens, w.b, p.Nk));
    w.rows = max(min(p.pack * int(q_len) - w.row0, w.count), 0);
    find_key_tiles<Config>(w, p, offset_of(p, q_len, w.kv_len));
  }
};

}  // namespace cf

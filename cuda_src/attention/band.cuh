// Which keys a query sees, and which queries see a key.
//
// Query i of a sequence stands at position i + offset among the keys and sees the keys
// position - left ... position + right that exist. Causal is right = 0; `offset` defaults to
// kv_len - q_len, so that the newest query sees every key.
#pragma once

#include "sequence.cuh"

namespace cf {

// A half-open range.
struct Range {
  int64 first, end;
};

// Lengths within one sequence fit in 32 bits.
struct KeyRange {
  int first, end;
};

// The keys that queries at the positions first ... last see together; {0, 0} if none.
CF_DEVICE Range visible_keys(const Params& p, int64 first, int64 last, int64 kv_len) {
  first = max(first, -p.right);               // queries before this one see no key,
  last = min(last, kv_len - 1 + p.left);      // nor do those behind this one
  if (first > last || kv_len == 0) return {0, 0};
  return {max(first - p.left, int64(0)), min(last + p.right + 1, kv_len)};
}

// A query i sees the keys i + left ... i + right - 1 that exist: the same bounds for all queries of
// a sequence of less than 2^30, in 32 bits.
struct Diagonals {
  int left, right;

  CF_DEVICE Diagonals(const Params& p, int64 offset)
      : left(narrowed(offset - p.left)), right(narrowed(offset + p.right + 1)) {}
  static CF_DEVICE int narrowed(int64 x) {
    constexpr int64 far = 1 << 30;
    return int(min(max(x, -far), far - 1));
  }
};

// The queries that see any of the keys first ... end - 1; {0, 0} if none.
CF_DEVICE Range visible_queries(const Params& p, const Sequence& s, int64 first, int64 end) {
  end = min(end, s.kv_len);
  if (first >= end) return {0, 0};
  const int64 begin = max(first - p.right - s.offset, int64(0));
  const int64 stop = min(end + p.left - s.offset, s.q_len);
  return begin < stop ? Range{begin, stop} : Range{0, 0};
}

// The keys key0 ... key0 + keys of a block, and who sees them.
struct KeyBand {
  int64 first, end;            // packed rows that see any of the keys
  int seen_first, seen_end;    // the keys, counted from key0, that any query sees
  int whole_first, whole_end;  // tiles of rows all of which see all of the keys

  KeyBand() = default;
  CF_DEVICE KeyBand(const Params& p, const Sequence& s, int64 key0, int64 keys)
      : whole_first(0), whole_end(0) {
    const Range queries = visible_queries(p, s, key0, key0 + keys);
    first = queries.first * p.group;
    end = queries.end * p.group;
    const auto from_first = [=](int64 key) { return int(min(max(key - key0, int64(0)), keys)); };
    seen_first = from_first(queries.first + s.offset - p.left);
    seen_end = from_first(min(queries.end + s.offset + p.right, s.kv_len));
  }
  // A row sees the last of the keys from one position on, and the first up to another.
  template <int Br, int Bc>
  CF_DEVICE void find_whole_tiles(const Params& p, const Sequence& s, int64 key0, int64 keys) {
    if (keys < Bc || key0 + Bc > s.kv_len) return;
    const int64 low = (key0 + Bc - 1 - p.right - s.offset) * p.group;
    const int64 high = (key0 + p.left - s.offset + 1) * p.group;
    whole_first = int(ceil_div(max(low, first), int64(Br)));
    whole_end = int(max(min(high, end), int64(0)) / Br);
  }
};

// The keys that any of the rows sees.
CF_DEVICE Range key_range(const Params& p, const Rows& rows) {
  if (rows.rows == 0) return {0, 0};
  return visible_keys(p, rows.position(0), rows.position(rows.rows - 1), rows.kv_len);
}

// The same row by row of one tile, in 32 bits, among the keys low ... high: both borders rise from
// row to row, and a row sees nothing where they meet.
struct TileKeys {
  int low, high;
  int first, end;          // of the tile's first query, before they are cut off at low and high

  CF_DEVICE TileKeys(const Params& p, const Rows& rows, int64 low_, int64 high_) {
    const int64 far = 1 << 20;                          // more than the queries of any tile
    const int64 position = rows.position(0);
    high = rows.rows == 0 ? 0 : int(min(high_, rows.kv_len));
    low = int(min(low_, int64(high)));
    first = int(min(max(position - p.left, -far), int64(high)));
    end = int(min(max(position + p.right + 1, -far), int64(high)));
  }
  CF_DEVICE int cut(int key) const { return min(max(key, low), high); }
  CF_DEVICE KeyRange of_query(int query) const { return {cut(first + query), cut(end + query)}; }
  CF_DEVICE KeyRange of_row(const Rows& rows, int r) const {
    return of_query(rows.packed.queries(r));
  }
};

// The keys that some rows of a tile see: any of them, and all of them.
struct SeenKeys {
  int first, end, inner_first, inner_end;

  // Of the rows r ... r + count. Those that do not exist do not count: nothing of them is kept.
  CF_DEVICE SeenKeys(const TileKeys& keys, const Rows& rows, int r, int count)
      : first(0), end(0), inner_first(0), inner_end(0) {
    const int last = min(r + count, rows.rows) - 1;
    if (last < r) return;
    const KeyRange top = keys.of_row(rows, r), bottom = keys.of_row(rows, last);
    first = top.first;
    end = bottom.end;
    inner_first = bottom.first;
    inner_end = top.end;
  }
  CF_DEVICE bool any(int key0, int Bc) const { return key0 < end && key0 + Bc > first; }
  CF_DEVICE bool all(int key0, int Bc) const {
    return key0 >= inner_first && key0 + Bc <= inner_end;
  }
};

}  // namespace cf

// Which keys a query sees: the one definition for forward, backward and dbias.
//
// Query i of a sequence stands at position i + offset among the keys and sees the keys
// position - left ... position + right that exist. Causal is right = 0; `offset` defaults to
// kv_len - q_len, so that the newest query sees every key.
#pragma once

#include "tiles.cuh"

namespace cf {

// A half-open range.
struct Range {
  int64 first, end;
};

// Lengths within one sequence fit in 32 bits.
struct KeyRange {
  int first, end;
};

// One tile of packed rows of one sequence: everything that its tiles of scores share.
struct Rows {
  int64 b, head0, row0;  // batch entry, first query head, first packed row
  int rows;              // how many are real
  int64 offset, kv_len;
  PackedRows packed;

  CF_DEVICE int64 position(int r) const { return packed.query(r) + offset; }
  // Where the first head of a tensor starts, and row r.
  CF_DEVICE uint64 base(const Tensor& t) const { return t.address + b * t.b + head0 * t.h; }
  CF_DEVICE uint64 address(const Tensor& t, int r) const { return base(t) + packed.offset(t, r); }
};

// True number of queries or keys of a batch entry.
CF_DEVICE int64 length(uint64 lens, int64 b, int64 N) {
  if (lens == 0) return N;
  return min(max(int64(at<const int32>(lens + 4 * b)), int64(0)), N);
}

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

// The queries of `q_len` that see any of the keys first ... end - 1; {0, 0} if none.
CF_DEVICE Range visible_queries(const Params& p, int64 first, int64 end, int64 q_len, int64 kv_len,
                                int64 offset) {
  end = min(end, kv_len);
  if (first >= end) return {0, 0};
  const int64 begin = max(first - p.right - offset, int64(0));
  const int64 stop = min(end + p.left - offset, q_len);
  return begin < stop ? Range{begin, stop} : Range{0, 0};
}

CF_DEVICE int64 offset_of(const Params& p, int64 q_len, int64 kv_len) {
  return p.aligned ? kv_len - q_len : p.q_offset;
}

// The rows row0 ... row0 + height of the heads head0 ... head0 + group.
CF_DEVICE Rows open_rows(const Params& p, int64 b, int64 head0, int64 group, int64 row0,
                         int height) {
  const int64 q_len = length(p.q_lens, b, p.Nq), kv_len = length(p.kv_lens, b, p.Nk);
  const int64 rows = max(min(group * q_len - row0, int64(height)), int64(0));
  return {b, head0, row0, int(rows), offset_of(p, q_len, kv_len), kv_len, PackedRows(row0, group)};
}

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

// ranges[r] = the keys that row r sees; none if it is not a real one.
template <typename Config>
CF_DEVICE void find_ranges(KeyRange* ranges, const Params& p, const Rows& rows) {
#pragma unroll 1
  for (int r = int(threadIdx.x); r < Config::Br; r += 32 * Config::warps) {
    Range range = {0, 0};
    if (r < rows.rows) range = visible_keys(p, rows.position(r), rows.position(r), rows.kv_len);
    ranges[r] = {int(range.first), int(range.end)};
  }
}

// seen[j] = whether any row of the score tile S [Br, keys] sees key j. Needs S complete.
template <typename Config, typename T>
CF_DEVICE void find_seen_keys(int* seen, const T* S, int rows, int keys) {
  for (int j = int(threadIdx.x); j < keys; j += 32 * Config::warps) {
    bool any = false;
    for (int r = 0; r < rows; ++r) any = any || S[r * pitch<T>(Config::Bc) + j] != -inf<T>();
    seen[j] = any;
  }
}

// Zeroes the rows of a tile of K or V that no query of the tile sees: whatever they hold must not
// matter. 0 * NaN is NaN, so a probability of 0 is not enough to keep it out of a product.
template <typename Config, int width, typename T>
CF_DEVICE void forget_unseen_keys(T* tile, const int* seen, int keys) {
  for (int i = int(threadIdx.x); i < keys * width; i += 32 * Config::warps) {
    const int j = i / width;
    if (!seen[j]) tile[j * pitch<T>(width) + i % width] = T{};
  }
}

}  // namespace cf

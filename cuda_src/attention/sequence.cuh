// A sequence: its true lengths, where its queries stand among its keys, and where its rows lie.
//
// Rows are packed where the query heads of one key head stand side by side: packed row r is query
// r / group of head r % group. A tile of packed rows serves grouped heads with one load of K and V.
#pragma once

#include "../convert.cuh"

namespace cf {

// True number of queries or keys of a batch entry.
CF_DEVICE int64 length(uint64 lens, int64 b, int64 N) {
  if (lens == 0) return N;
  return min(max(int64(at<const int32>(lens + 4 * b)), int64(0)), N);
}

// A batch entry. Query i stands at position i + offset among the keys.
struct Sequence {
  int64 b, q_len, kv_len, offset;
};

CF_DEVICE Sequence open_sequence(const Params& p, int64 b) {
  const int64 q_len = length(p.q_lens, b, p.Nq), kv_len = length(p.kv_lens, b, p.Nk);
  return {b, q_len, kv_len, p.aligned ? kv_len - q_len : p.q_offset};
}

// Where the first row of a head begins.
CF_DEVICE uint64 head_address(const Tensor& t, int64 b, int64 head) {
  return t.address + b * t.b + head * t.h;
}

// The packed rows row0, row0 + 1, ... of a key head: which query and which of the heads they are.
struct PackedRows {
  int64 query0;
  uint32 lane0, group;

  // Heads are seldom grouped, and divisions take their time.
  CF_DEVICE PackedRows(int64 row0, int64 group_)
      : query0(group_ == 1 ? row0 : row0 / group_),
        lane0(group_ == 1 ? 0 : uint32(row0 % group_)),
        group(uint32(group_)) {}
  CF_DEVICE int64 query(int r) const { return query0 + queries(r); }
  // Queries from the first row's to that of row r.
  CF_DEVICE int queries(int r) const { return group == 1 ? r : int((lane0 + uint32(r)) / group); }
  CF_DEVICE int64 head(int r) const { return group == 1 ? 0 : (lane0 + uint32(r)) % group; }
  // Bytes from the tensor's first row of the first head to row r.
  CF_DEVICE int64 offset(const Tensor& t, int r) const { return query(r) * t.n + head(r) * t.h; }
};

// One tile of packed rows of one sequence: everything that its tiles of scores share.
struct Rows {
  int64 b, head0, row0;  // batch entry, first query head, first packed row
  int rows;              // how many are real
  int64 offset, kv_len;
  PackedRows packed;

  CF_DEVICE int64 position(int r) const { return packed.query(r) + offset; }
  // Where the first head of a tensor starts, and row r.
  CF_DEVICE uint64 base(const Tensor& t) const { return head_address(t, b, head0); }
  CF_DEVICE uint64 address(const Tensor& t, int r) const { return base(t) + packed.offset(t, r); }
};

// The rows row0 ... row0 + height of the heads head0 ... head0 + group.
CF_DEVICE Rows open_rows(const Params& p, int64 b, int64 head0, int64 group, int64 row0,
                         int height) {
  const Sequence s = open_sequence(p, b);
  const int64 rows = max(min(group * s.q_len - row0, int64(height)), int64(0));
  return {b, head0, row0, int(rows), s.offset, s.kv_len, PackedRows(row0, group)};
}

// Rows of an array as a tile has them: row r of the tile is packed row r of the heads that start at
// `base`. Rows before `begin` and from `count` on, and columns from `columns` on, do not exist: in
// a tile they are zeros, whatever memory holds, for 0 * NaN would be NaN. Loads of vector_bytes
// are aligned in all rows.
struct RowBlock {
  const Tensor& t;
  uint64 base;
  PackedRows packed;
  int begin, count, columns;
  int64 vector_bytes;

  CF_DEVICE uint64 row(int r) const { return base + packed.offset(t, r); }
  CF_DEVICE bool has(int r, int c) const { return r >= begin && r < count && c < columns; }
};

// The rows of queries of an array [batch, heads_q, Nq, columns]; the keys begin ... count - 1 from
// key0 on of one [batch, heads_k, Nk, columns].
CF_DEVICE RowBlock query_block(const Params& p, const Tensor& t, const Rows& rows, int64 columns) {
  return {t, rows.base(t), rows.packed, 0, rows.rows, int(columns), p.vector_bytes};
}
CF_DEVICE RowBlock key_block(const Params& p, const Tensor& t, uint64 base, int64 key0, int begin,
                             int count, int64 columns) {
  return {t, base, PackedRows(key0, 1), begin, count, int(columns), p.vector_bytes};
}

}  // namespace cf

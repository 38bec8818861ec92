// Sums of dbias: what becomes of dS where backward_sm80 makes it, and where the sums lie.
// cupy_flash/plan/cuda_dbias.py says which call gets which.
#pragma once

#include "workspace.cuh"

namespace cf {

// Config::dbias, of backward_sm80 and of the kernels around it; without it, 0: nothing.
//
// STORED: each score has an element of its own, which is its dS.
// ADDED: dS is added to its element in memory, by all blocks that have scores of it.
// OVER_ROWS: a thread sums over the rows of a walk, and stores one sum for each of its keys.
// OVER_KEYS: a warp sums over its keys, and adds one sum for each row in memory.
enum DbiasSum : int { STORED = 1, ADDED = 2, OVER_ROWS = 3, OVER_KEYS = 4 };

template <typename Config, typename = void>
struct DbiasOf {
  static CF_HOST_DEVICE constexpr int sum() { return 0; }
};
template <typename Config>
struct DbiasOf<Config, decltype(void(Config::dbias))> {
  static CF_HOST_DEVICE constexpr int sum() { return Config::dbias; }
};
template <typename Config>
CF_HOST_DEVICE constexpr bool dbias_is(int sum) {
  return DbiasOf<Config>::sum() == sum;
}
template <typename Config>
CF_HOST_DEVICE constexpr bool has_dbias() {
  return DbiasOf<Config>::sum() != 0;
}
// Whether terms of it are summed, and whether blocks add to the same sums in memory.
template <typename Config>
CF_HOST_DEVICE constexpr bool sums_dbias() {
  return DbiasOf<Config>::sum() > STORED;
}
template <typename Config>
CF_HOST_DEVICE constexpr bool adds_dbias() {
  return dbias_is<Config>(ADDED) || dbias_is<Config>(OVER_KEYS);
}

// The type of the sums. Those of ADDED are as many as there are elements, and may be dbias itself;
// the others are few, of many terms.
template <typename Config, bool added = dbias_is<Config>(ADDED)>
struct DbiasSumType {
  using type = double;
};
template <typename Config>
struct DbiasSumType<Config, true> {
  using type = accumulator<typename Config::element>;
};
template <typename Config>
using dbias_sum_t = typename DbiasSumType<Config>::type;

// ADDED: [batch_bias, heads_bias, Nbias_q, pitch]. In dbias itself if that is of the sums' type;
// otherwise in workspace, where eight keys fill whole sectors.
struct AddedLines {
  uint64 address;
  int64 pitch;

  CF_DEVICE explicit AddedLines(const BackwardParams& p)
      : address(p.dbias_sums != 0 ? p.dbias_sums : p.dbias.address),
        pitch(p.dbias_sums != 0 ? (p.Nk + 7) & ~int64(7) : p.Nk) {}
  CF_DEVICE int64 line(const BackwardParams& p, int64 b, int64 head, int64 query) const {
    const int64 of_head = (p.batch_bias == 1 ? 0 : b) * p.heads_bias
                          + (p.heads_bias == 1 ? 0 : head);
    return of_head * p.Nbias_q + (p.Nbias_q == 1 ? 0 : query);
  }
};

// OVER_ROWS: [row_splits, batch, heads_k, parts, Nk], of which a warp writes to one part.
template <typename Config>
CF_DEVICE uint64 key_sums_address(const BackwardParams& p, int64 split, int64 head, int part) {
  return sums_of<double>(p, p.dbias_sums, Config::parts, split, head) + part * p.Nk * 8;
}

// OVER_KEYS: [key_sums, batch, heads_q, Nq]. Tiles of keys take turns in adding to those of a row.
CF_DEVICE uint64 row_sums_address(const BackwardParams& p, int64 turn, int64 b, int64 head,
                                  int64 query) {
  const int64 first = turn * p.batch * p.heads_q * p.Nq;
  return p.dbias_sums + (first + row_index(p, b, head, query)) * int64(sizeof(double));
}

// Where the dS of row r, or its sum, is added; tile: of the block's keys.
template <typename Config>
CF_DEVICE uint64 dbias_sums_of_row(const BackwardParams& p, const Rows& rows, int r, int64 tile) {
  const int64 head = rows.head0 + rows.packed.head(r), query = rows.packed.query(r);
  if constexpr (dbias_is<Config>(OVER_KEYS)) {
    return row_sums_address(p, tile % Config::key_sums, rows.b, head, query);
  } else {
    const AddedLines sums(p);
    return sums.address
           + sums.line(p, rows.b, head, query) * sums.pitch * int64(sizeof(dbias_sum_t<Config>));
  }
}

// sums = 0 before blocks add to them; each task has a part.
template <typename Config>
CF_DEVICE void clear_dbias_sums(const BackwardParams& p, int64 task, int threads) {
  using Sum = dbias_sum_t<Config>;
  uint64 sums = p.dbias_sums;
  int64 count = 0;
  if constexpr (dbias_is<Config>(ADDED)) {
    const AddedLines lines(p);
    sums = lines.address;
    count = p.batch_bias * p.heads_bias * p.Nbias_q * lines.pitch;
  } else {
    count = Config::key_sums * p.batch * p.heads_q * p.Nq;
  }
  for (int64 i = task * threads + int(threadIdx.x); i < count; i += p.tasks * threads) {
    at<Sum>(sums + i * int64(sizeof(Sum))) = Sum(0);
  }
}

}  // namespace cf

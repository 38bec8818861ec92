// Which row and column a lane's sums belong to, in the accumulators of mma.sync and of wgmma.
//
// Both hold a matrix in fragments of 16 x 16, of which lane 4 g + t has eight elements:
//
//     element e: row g + 8 (e / 2 % 2), column 2 t + e % 2 + 8 (e / 4)
//
// mma.sync in an array [M][N] of fragments; wgmma, M = 1, in an array of 8 N numbers.
#pragma once

#include "../memory.cuh"

namespace cf {

CF_DEVICE int lane_id() { return int(threadIdx.x % 32); }
CF_DEVICE int warp_id() { return int(threadIdx.x / 32); }

// Row and column of element e in its fragment: each is what the lane has by itself plus a constant.
CF_DEVICE int lane_row() { return lane_id() / 4; }
CF_DEVICE int lane_column() { return lane_id() % 4 * 2; }
CF_HOST_DEVICE constexpr int row_step(int e) { return 8 * (e / 2 % 2); }
CF_HOST_DEVICE constexpr int column_step(int e) { return e % 2 + 8 * (e / 4); }

// Element e of fragment (i, j).
template <typename C, int M, int N>
CF_DEVICE auto& element(C (&sums)[M][N], int i, int j, int e) {
  return sums[i][j].x[e];
}
template <int n>
CF_DEVICE float& element(float (&sums)[n], int, int j, int e) {
  return sums[8 * j + e];
}
template <int n>
CF_DEVICE const float& element(const float (&sums)[n], int, int j, int e) {
  return sums[8 * j + e];
}

// What a lane knows of its four rows of fragments in column j, where columns are rows of queries:
// two pairs of neighbours.
template <typename T>
struct FourRows {
  Pair<T> pair[2];

  // own: of the lane's first row in the fragments of column 0.
  CF_DEVICE FourRows(const T* own, int j) {
    pair[0] = *reinterpret_cast<const Pair<T>*>(own + 16 * j);
    pair[1] = *reinterpret_cast<const Pair<T>*>(own + 16 * j + 8);
  }
  CF_DEVICE T operator[](int e) const { return pair[e / 4].x[e % 2]; }      // element of a fragment
};

// A view (see attention/score.cuh) of scores [M, N] of fragments whose rows are keys: of each
// fragment column four queries, of which `rows` has what there is to know, and 2 M keys of each.
template <typename T_, typename Row, int M, int N>
struct KeysAsRows {
  using T = T_;
  static constexpr int keys = 2 * M, loads = 4 * keys, count = N * loads;
  const Row* rows;           // the lane's first, in the fragments of column 0
  int key0;                  // the lane's first

  static CF_DEVICE constexpr int fragment(int x) { return x / loads; }
  static CF_DEVICE constexpr int query(int x) { return x % loads / keys; }
  static CF_DEVICE constexpr int nth_key(int x) { return x % keys; }
  // From the lane's first row to that of element x.
  static CF_DEVICE constexpr int row_offset(int x) {
    return 16 * fragment(x) + query(x) / 2 * 8 + query(x) % 2;
  }
  CF_DEVICE const Row& row(int x) const { return rows[row_offset(x)]; }
  static CF_DEVICE constexpr int key(int x) { return 8 * nth_key(x); }
  template <typename Scores>
  CF_DEVICE auto& at(Scores& S, int x) const {
    const int n = nth_key(x), r = query(x);
    return element(S, n / 2, fragment(x), r / 2 * 4 + n % 2 * 2 + r % 2);
  }
  struct Seen {
    int first, end;          // counted from the lane's first key

    CF_DEVICE bool has(int i) const { return 8 * i >= first && 8 * i < end; }
  };
  static constexpr int span = keys;
  CF_DEVICE Seen seen(int x) const { return {row(x).first - key0, row(x).end - key0}; }
};

// A view of scores [M, N] of fragments whose rows are queries: the lane's 2 M rows, eight apart.
// from_first: whether a row may begin behind a key.
template <typename T_, typename Row, int M, int N, int loads_, bool from_first = true>
struct QueriesAsRows {
  using T = T_;
  static constexpr int keys = 4 * N, count = 2 * M * keys, loads = loads_;
  const Row (&rows)[2 * M];
  int key0;                  // the lane's first

  CF_DEVICE const Row& row(int x) const { return rows[x / keys]; }
  static CF_DEVICE constexpr int key(int x) { return x % keys / 2 * 8 + x % 2; }
  template <typename Scores>
  CF_DEVICE auto& at(Scores& S, int x) const {
    const int r = x / keys, n = x % keys;
    return element(S, r / 2, n / 4, n / 2 % 2 * 4 + r % 2 * 2 + n % 2);
  }
  // A bit for each key: ptxas moves eight of them at a time to predicates.
  struct Seen {
    uint32 bits;

    CF_DEVICE bool has(int i) const { return (bits & (1u << i)) != 0; }
  };
  static constexpr int span = keys <= 32 ? keys : keys % 32 == 0 ? 32 : keys / 2;
  CF_DEVICE Seen seen(int x) const {
    const int before = key0 + 4 * (x % keys);
    const uint32 hidden = from_first ? keys_before(row(x).first - before) : 0;
    return {keys_before(row(x).end - before) & ~hidden};
  }
  // The lane's keys before the one at `end`, a bit each, counted from its first one: it has the
  // first two of every eight.
  static CF_DEVICE uint32 keys_before(int end) {
    const int n = end <= 0 ? 0 : 2 * (end / 8) + min(end % 8, 2);
    return n >= 32 ? 0xFFFFFFFF : (1u << n) - 1;
  }
};

// A view of one score.
template <typename T_, typename Row>
struct OneScore {
  using T = T_;
  static constexpr int count = 1, loads = 1;
  const Row& own;
  int key0;

  CF_DEVICE const Row& row(int) const { return own; }
  static CF_DEVICE constexpr int key(int) { return 0; }
  CF_DEVICE T& at(T& S, int) const { return S; }
  struct Seen {
    bool yes;

    CF_DEVICE bool has(int) const { return yes; }
  };
  static constexpr int span = 1;
  CF_DEVICE Seen seen(int) const { return {key0 >= own.first && key0 < own.end}; }
};

}  // namespace cf

// Scores of a thread that owns a query or a key: n of them, in an array.
#pragma once

#include "../base.cuh"

namespace cf {

// A view (see attention/score.cuh) of the scores of one query and n neighbouring keys.
template <typename T_, typename Row, int n>
struct KeysOfQuery {
  using T = T_;
  static constexpr int count = n, loads = n, span = n;
  const Row& own;
  int key0;

  CF_DEVICE const Row& row(int) const { return own; }
  static CF_DEVICE constexpr int key(int x) { return x; }
  static CF_DEVICE T& at(T (&S)[n], int x) { return S[x]; }
  struct Seen {
    int first, end;          // counted from the first of the keys

    CF_DEVICE bool has(int i) const { return i >= first && i < end; }
  };
  CF_DEVICE Seen seen(int) const { return {own.first - key0, own.end - key0}; }
};

// A view of the scores of n rows of a tile and one key.
template <typename T_, typename Row, int n>
struct QueriesOfKey {
  using T = T_;
  static constexpr int count = n, loads = n, span = n;
  const Row* rows;
  int key0;

  CF_DEVICE const Row& row(int x) const { return rows[x]; }
  static CF_DEVICE constexpr int key(int) { return 0; }
  static CF_DEVICE T& at(T (&S)[n], int x) { return S[x]; }
  struct Seen {
    const Row* rows;
    int key;

    CF_DEVICE bool has(int i) const { return key >= rows[i].first && key < rows[i].end; }
  };
  CF_DEVICE Seen seen(int) const { return {rows, key0}; }
};

}  // namespace cf

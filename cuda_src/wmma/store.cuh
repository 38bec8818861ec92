// From accumulators to arrays.
#pragma once

#include "product.cuh"

namespace cf {

// The same factor for all rows.
template <typename T>
struct Uniform {
  T value;
  CF_DEVICE T operator[](int) const { return value; }
};

// Called: chosen anew for every element of a tile, the types would be most of the kernel's code.
template <typename T>
CF_DEVICE_CALLED void store_element(uint64 address, int64 kind, T x) {
  store(address, kind, x);
}

// Row r of the block = factor[r] * acc[r], 0 where the factor is 0: an accumulator that the row did
// not fill may hold a NaN of its neighbours.
template <typename Config, int M, int N, typename Factor>
CF_DEVICE void store_rows(const RowBlock& block, const Accumulators<Config, M, N>& acc,
                          const Where<Config>& where, const Factor& factor) {
  using T = accumulator<typename Config::element>;
  using Acc = Accumulators<Config, M, N>;
#pragma unroll
  for (int i = 0; i < Acc::rows; ++i) {
#pragma unroll
    for (int e = 0; e < Acc::sums; ++e) {
      const int r = acc.row(i) + where.row(e);
      if (r >= block.count) continue;
      const uint64 row = block.row(r);
#pragma unroll
      for (int j = 0; j < Acc::columns; ++j) {
        const int c = acc.column(j) + where.column(e);
        const T x = factor[r] != T(0) ? acc.x[i][j].x[e] * factor[r] : T(0);
        if (c < block.columns) store_element(row + c * block.t.c, block.t.kind, x);
      }
    }
  }
}

// Rows key0 ... key0 + keys of sums [Nk, columns] in memory: factor * acc, or that much more.
template <typename Config, int M, int N, typename T>
CF_DEVICE void add_rows_to(uint64 sums, int64 key0, int keys, int columns,
                           const Accumulators<Config, M, N>& acc, const Where<Config>& where,
                           T factor, bool first) {
  using Acc = Accumulators<Config, M, N>;
#pragma unroll
  for (int i = 0; i < Acc::rows; ++i) {
#pragma unroll
    for (int e = 0; e < Acc::sums; ++e) {
      const int r = acc.row(i) + where.row(e);
      if (r >= keys) continue;
#pragma unroll
      for (int j = 0; j < Acc::columns; ++j) {
        const int c = acc.column(j) + where.column(e);
        if (c >= columns) continue;
        T& sum = at<T>(sums + ((key0 + r) * columns + c) * int64(sizeof(T)));
        const T x = acc.x[i][j].x[e] * factor;
        sum = first ? x : sum + x;
      }
    }
  }
}

}  // namespace cf

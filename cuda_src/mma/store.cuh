// From a warp's accumulators to memory.
#pragma once

#include "../tile/tiles.cuh"
#include "fragment.cuh"

namespace cf {

// Two elements that are stored as one.
template <typename U>
struct alignas(2 * sizeof(U)) Pair {
  U x[2];
};

// Whether all rows of an array are whole pieces of so many bytes.
CF_DEVICE bool in_pieces(const Tensor& t, int64 size, int columns, int bytes) {
  return t.c == size && ((t.address | t.b | t.h | t.n | columns * size) & (bytes - 1)) == 0;
}

// factor * x; 0 where the factor is 0, since x may then be a NaN of neighbours.
template <typename T>
CF_DEVICE T scaled(T x, T factor) {
  return factor != T(0) ? x * factor : T(0);
}

// The 8 i-th row of accumulators, times `factor`, to the memory of elements U that starts at `row`.
template <typename U, typename Config, int columns>
CF_DEVICE void store_row(const typename Fragments<Config>::C (&acc)[columns], int half,
                         typename Fragments<Config>::Sum factor, const Tensor& t, uint64 row,
                         int width) {
  const bool pairs = in_pieces(t, sizeof(U), width, 2 * sizeof(U));
#pragma unroll
  for (int n = 0; n < columns; ++n) {
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      if (row_step(e) != 8 * half) continue;
      const int c = n * 16 + lane_column() + column_step(e);
      const Pair<U> x = {narrow<U>(scaled(acc[n].x[e], factor)),
                         narrow<U>(scaled(acc[n].x[e + 1], factor))};
      if (pairs && c < width) {
        at<Pair<U>>(row + c * sizeof(U)) = x;
      } else {
        if (c < width) at<U>(row + c * t.c) = x.x[0];
        if (c + 1 < width) at<U>(row + (c + 1) * t.c) = x.x[1];
      }
    }
  }
}

// One row of accumulators of a 16-bit kind, times `factor`, rounded, into a row of a tile.
template <typename Config, int columns>
CF_DEVICE void stage_row(typename Config::element* tile_row,
                         const typename Fragments<Config>::C (&acc)[columns], int half,
                         float factor) {
#pragma unroll
  for (int n = 0; n < columns; ++n) {
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      if (row_step(e) != 8 * half) continue;
      const uint32 word = ptx::pack<typename Config::element>(scaled(acc[n].x[e], factor),
                                                              scaled(acc[n].x[e + 1], factor));
      *reinterpret_cast<uint32*>(tile_row + n * 16 + lane_column() + column_step(e)) = word;
    }
  }
}

// The rows 0 ... count of a warp's tile to memory; address(r) is where row r starts.
template <int columns, int pitch, typename T, typename Address>
CF_DEVICE void store_staged(const T* tile, const Tensor& t, const Address& address, int count,
                            int width) {
  constexpr int elements = 16 / int(sizeof(T)), chunks = columns / elements;
  const bool whole = in_pieces(t, sizeof(T), width, 16);
  for (int i = lane_id(); i < count * chunks; i += 32) {
    const int r = i / chunks, c = i % chunks * elements;
    const T* const from = tile + r * pitch + c;
    const uint64 to = address(r) + c * t.c;
    if (whole && c < width) {
      at<Chunk>(to) = *reinterpret_cast<const Chunk*>(from);
    } else {
#pragma unroll 1
      for (int x = 0; x < min(elements, width - c); ++x) at<T>(to + x * t.c) = from[x];
    }
  }
}

}  // namespace cf

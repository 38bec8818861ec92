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

// 1 / x for x that are no denormals; for results of 16 bits to one unit in the last place of float.
template <typename Element>
CF_DEVICE accumulator<Element> reciprocal(accumulator<Element> x) {
  if constexpr (sizeof(Element) == 2) {
    return ptx::reciprocal_approx(x);
  } else {
    return 1 / x;
  }
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

// The rows 0 ... count of a warp's part [height, width] of a tile to memory. The first of them is
// packed row `row0` of the heads that start at `base`; `columns` of them exist.
template <int height, int width, int pitch, typename T>
CF_DEVICE void store_staged(const T* tile, const Tensor& t, uint64 base, const PackedRows& packed,
                            int row0, int count, int columns) {
  constexpr int elements = 16 / int(sizeof(T)), chunks = width / elements;
  constexpr int across = min(chunks & -chunks, 32), step = 32 / across;
  const int r0 = lane_id() / across, c0 = lane_id() % across * elements;
  const bool whole = in_pieces(t, sizeof(T), columns, 16);
  if (!whole || packed.group != 1) {
#pragma unroll 1
    for (int r = r0; r < count; r += step) {
      const uint64 row = base + packed.offset(t, row0 + r);
#pragma unroll 1
      for (int c = c0; c < min(width, columns); c += across * elements) {
        const T* const from = tile + r * pitch + c;
        if (whole) {
          at<Chunk>(row + c * int(sizeof(T))) = *reinterpret_cast<const Chunk*>(from);
          continue;
        }
#pragma unroll 1
        for (int x = 0; x < min(elements, columns - c); ++x) {
          at<T>(row + (c + x) * t.c) = from[x];
        }
      }
    }
    return;
  }
  uint64 to = base + packed.offset(t, row0 + r0) + c0 * int(sizeof(T));
#pragma unroll
  for (int i = 0; i < height; i += step) {
#pragma unroll
    for (int j = 0; j < width; j += across * elements) {
      if (r0 + i < count && c0 + j < columns) {
        at<Chunk>(to + j * int(sizeof(T))) =
            *reinterpret_cast<const Chunk*>(tile + (r0 + i) * pitch + c0 + j);
      }
    }
    to += step * t.n;
  }
}

}  // namespace cf

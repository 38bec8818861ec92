// From a warp's accumulators to memory.
#pragma once

#include "../attention/sequence.cuh"
#include "fragment.cuh"

namespace cf {

// Makes rows 0 whose factor is 0: they may hold NaNs of neighbours. Few warps have any.
template <typename Config, int fragments, int columns>
CF_DEVICE void forget_unseen_rows(typename Fragments<Config>::C (&acc)[fragments][columns],
                                  const typename Fragments<Config>::Sum (&factor)[2 * fragments]) {
  bool some = false;
#pragma unroll
  for (int i = 0; i < 2 * fragments; ++i) some = some || factor[i] == 0;
  if (!__any_sync(0xFFFFFFFF, some)) return;
#pragma unroll
  for (int i = 0; i < fragments; ++i) {
#pragma unroll
    for (int x = 0; x < 8 * columns; ++x) {
      if (factor[2 * i + row_step(x % 8) / 8] == 0) acc[i][x / 8].x[x % 8] = 0;
    }
  }
}

// One row of a lane's accumulators, times `factor`, as elements V into a row of a tile.
template <typename V, typename Config, int columns>
CF_DEVICE void stage_row(V* row, const typename Fragments<Config>::C (&acc)[columns], int half,
                         typename Fragments<Config>::Sum factor) {
#pragma unroll
  for (int n = 0; n < columns; ++n) {
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      if (row_step(e) != 8 * half) continue;
      V* const place = row + n * 16 + column_step(e);
      if constexpr (sizeof(V) == 2) {
        *reinterpret_cast<uint32*>(place) = ptx::pack<V>(acc[n].x[e] * factor,
                                                         acc[n].x[e + 1] * factor);
      } else {
        *reinterpret_cast<Pair<V>*>(place) = {acc[n].x[e] * factor, acc[n].x[e + 1] * factor};
      }
    }
  }
}

// A warp's part [height, width] of a tile to memory. Its row r is packed row row0 + r of the heads
// that start at `base`; apart: eight rows lie together, the next eight are 16 rows on. Rows from
// `count` on and columns from `columns` on do not exist.
template <int height, int width, int pitch, bool apart = false, typename V>
CF_DEVICE void store_staged(const V* tile, const Tensor& t, uint64 base, const PackedRows& packed,
                            int row0, int count, int columns) {
  constexpr int elements = 16 / int(sizeof(V)), chunks = width / elements;
  constexpr int across = min(chunks & -chunks, 32), step = 32 / across;
  const int r0 = lane_id() / across, c0 = lane_id() % across * elements;
  const bool whole = in_pieces(t, sizeof(V), columns, 16);
  if (apart || !whole || packed.group != 1) {
#pragma unroll 1
    for (int i = r0; i < height; i += step) {
      const int r = apart ? i + i / 8 * 8 : i;
      if (r >= count) break;
      const uint64 row = base + packed.offset(t, row0 + r);
#pragma unroll 1
      for (int c = c0; c < min(width, columns); c += across * elements) {
        const V* const from = tile + i * pitch + c;
        if (whole) {
          at<Chunk>(row + c * int(sizeof(V))) = *reinterpret_cast<const Chunk*>(from);
          continue;
        }
#pragma unroll 1
        for (int x = 0; x < min(elements, columns - c); ++x) {
          at<V>(row + (c + x) * t.c) = from[x];
        }
      }
    }
    return;
  }
  uint64 to = base + packed.offset(t, row0 + r0) + c0 * int(sizeof(V));
#pragma unroll
  for (int i = 0; i < height; i += step) {
#pragma unroll
    for (int j = 0; j < width; j += across * elements) {
      if (r0 + i < count && c0 + j < columns) {
        at<Chunk>(to + j * int(sizeof(V))) =
            *reinterpret_cast<const Chunk*>(tile + (r0 + i) * pitch + c0 + j);
      }
    }
    to += step * t.n;
  }
}

}  // namespace cf

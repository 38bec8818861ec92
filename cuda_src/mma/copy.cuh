// Copies of tiles that go on while the block computes.
//
// A thread starts its copies with `copy_tile`, closes them as a group, later waits for the group,
// rounds what it copied itself if the kind asks for it, and meets the others at a barrier: only
// then is the tile complete for all.
#pragma once

#include "../tile/tiles.cuh"
#include "fragment.cuh"

namespace cf {

// How the threads of a block share out the 16-byte chunks of a tile: `across` of them along a row,
// each of which takes every across-th chunk of every step-th row.
template <typename Config, int height, int width>
struct ChunkGrid {
  using T = typename Config::element;
  static constexpr int threads = 32 * Config::warps;
  static constexpr int elements = 16 / int(sizeof(T)), chunks = width / elements;
  static constexpr int across = min(chunks & -chunks, 32), step = threads / across;
  static constexpr int rows = ceil_div(height, step), columns = chunks / across;
  static CF_DEVICE int row() { return int(threadIdx.x) / across; }
  static CF_DEVICE int column() { return int(threadIdx.x) % across * elements; }
  // Whether the i-th row of a thread is one of the tile.
  static CF_DEVICE bool owns(int i) { return height % step == 0 || row() + i * step < height; }
};

// A chunk in the ordinary way, for rows that 16-byte loads do not fit.
template <typename Config>
CF_DEVICE void copy_chunk(typename Config::element* to, const Tensor& t, uint64 from, int bytes,
                          int vector_bytes) {
  using T = typename Config::element;
  Chunk chunk = {};
  if (bytes > 0) {
    if constexpr (sizeof(T) == 2) {
      chunk = t.kind == FLOAT32 ? load_narrowed<T>(from, bytes / 2)
                                : load_chunk(from, bytes, vector_bytes);
    } else {
      chunk = load_chunk(from, bytes, vector_bytes);
    }
  }
  *reinterpret_cast<Chunk*>(to) = chunk;
}

// Starts tile[r, c] = packed row `row0 + r`, column c, of the heads that start at `base`. Rows
// before `begin` and from `count` on, and columns from `columns` on, become zero. group: query
// heads of a key head for packed rows, 1 for others. Elements arrive as they are: see `round_tile`.
template <typename Config, int height, int width, int pitch>
CF_DEVICE void copy_tile(typename Config::element* tile, const Tensor& t, uint64 base, int64 row0,
                         int begin, int count, int columns, int64 group, int64 vector_bytes) {
  using T = typename Config::element;
  using Grid = ChunkGrid<Config, height, width>;
  // The bytes of an element in memory: 4 where float32 gradients come with 16-bit operands.
  const int size = sizeof(T) == 2 && t.kind == FLOAT32 ? 4 : int(sizeof(T));
  const bool whole = vector_bytes == 16 && size == int(sizeof(T));
  const PackedRows packed(row0, group);
  T* const to = tile + Grid::row() * pitch + Grid::column();
  uint64 from = base + (row0 + Grid::row()) * t.n;
  const ptx::Shared place(to);
#pragma unroll
  for (int i = 0; i < Grid::rows; ++i) {
    if (!Grid::owns(i)) break;
    const int r = Grid::row() + i * Grid::step;
    const uint64 row = group == 1 ? from : base + packed.offset(t, r);
    const bool real = r >= begin && r < count;
#pragma unroll
    for (int j = 0; j < Grid::columns; ++j) {
      const int c = Grid::column() + j * Grid::across * Grid::elements;
      const int offset = i * Grid::step * pitch + j * Grid::across * Grid::elements;
      if (whole) {
        ptx::copy_16_bytes(place + offset * int(sizeof(T)), row + c * size, real && c < columns);
      } else {
        copy_chunk<Config>(to + offset, t, row + c * size,
                           real ? (columns - c) * int(sizeof(T)) : 0, int(vector_bytes));
      }
    }
    from += Grid::step * t.n;
  }
}

// Rounds to TF32 what the thread itself has copied, once it has arrived. The other kinds take the
// elements as they are.
template <typename Config, int height, int width, int pitch>
CF_DEVICE void round_tile(typename Config::element* tile) {
  using Grid = ChunkGrid<Config, height, width>;
  if constexpr (Config::precision == 1) {
    float* const own = tile + Grid::row() * pitch + Grid::column();
#pragma unroll
    for (int i = 0; i < Grid::rows; ++i) {
      if (!Grid::owns(i)) break;
#pragma unroll
      for (int j = 0; j < Grid::columns; ++j) {
        Chunk* const chunk = reinterpret_cast<Chunk*>(own + i * Grid::step * pitch
                                                      + j * Grid::across * Grid::elements);
        Chunk x = *chunk;
#pragma unroll
        for (int w = 0; w < 4; ++w) x.word[w] = round_to_tf32(x.word[w]);
        *chunk = x;
      }
    }
  }
}

}  // namespace cf

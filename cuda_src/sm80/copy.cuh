// Copies of tiles that go on while the block computes.
//
// A thread starts its copies with `copy_rows`, closes them as a group, later waits for the group,
// rounds what it copied itself if the kind asks for it, and meets the others at a barrier: only
// then is the tile complete for all.
#pragma once

#include "../attention/sequence.cuh"
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
  static CF_DEVICE int row() { return int(threadIdx.x / across); }
  static CF_DEVICE int column() { return int(threadIdx.x % across) * elements; }
  // Whether the i-th row of a thread is one of the tile.
  static CF_DEVICE bool owns(int i) { return height % step == 0 || row() + i * step < height; }
};

// Whether rows can be copied 16 bytes at a time, as they are.
template <typename Config>
CF_DEVICE bool copies_whole(const Tensor& t, int64 vector_bytes) {
  return vector_bytes == 16 && (sizeof(typename Config::element) > 2 || t.kind != FLOAT32);
}

// The part of a tile that a thread copies, of any rows: packed ones, and such as 16-byte copies do
// not fit; those are there at once. Rolled up, because it stands beside the fast way everywhere.
template <typename Config, int width, int pitch>
CF_DEVICE void copy_any_rows(typename Config::element* tile, int height, const RowBlock& block) {
  using T = typename Config::element;
  using Grid = ChunkGrid<Config, 1, width>;
  const bool whole = copies_whole<Config>(block.t, block.vector_bytes);
#pragma unroll 1
  for (int r = Grid::row(); r < height; r += Grid::step) {
    const uint64 row = block.row(r);
#pragma unroll 1
    for (int c = Grid::column(); c < width; c += Grid::across * Grid::elements) {
      T* const to = tile + r * pitch + c;
      const bool there = block.has(r, c);
      if (whole) {
        ptx::copy_16_bytes(ptx::Shared(to), row + c * int(sizeof(T)), there);
        continue;
      }
      Chunk chunk = {};
      if (there) {
        const int columns = block.columns - c;
        if (sizeof(T) == 2 && block.t.kind == FLOAT32) {
          if constexpr (sizeof(T) == 2) chunk = load_narrowed<T>(row + 4 * c, columns);
        } else {
          chunk = load_chunk(row + c * int(sizeof(T)), columns * int(sizeof(T)),
                             int(block.vector_bytes));
        }
      }
      *reinterpret_cast<Chunk*>(to) = chunk;
    }
  }
}

// Where a thread's copies of a tile start in shared memory.
template <typename Config, int height, int width, int pitch>
CF_DEVICE ptx::Shared copy_place(const typename Config::element* tile) {
  using Grid = ChunkGrid<Config, height, width>;
  return ptx::Shared(tile)
         + (Grid::row() * pitch + Grid::column()) * int(sizeof(typename Config::element));
}

// Where they start in memory: row `row0` of an array that starts at `base` is the tile's first.
template <typename Config, int height, int width>
CF_DEVICE uint64 copy_start(const Tensor& t, uint64 base, int64 row0) {
  using Grid = ChunkGrid<Config, height, width>;
  return base + (row0 + Grid::row()) * t.n
         + Grid::column() * int(sizeof(typename Config::element));
}

// Starts to copy the thread's part of a tile [height, width], from its `copy_start` to its
// `copy_place`, of an array that can be copied whole. Rows before `begin` and from `count` on, and
// columns from `columns` on, become zero; `all`: there are no such rows. Elements arrive as they
// are: see `round_tile`.
template <typename Config, int height, int width, int pitch, bool all = false>
CF_DEVICE void copy_rows(ptx::Shared to, const Tensor& t, uint64 from, int begin, int count,
                         int columns) {
  using T = typename Config::element;
  using Grid = ChunkGrid<Config, height, width>;
  constexpr int size = int(sizeof(T));
  // Row i of the thread is real iff i * step lies in begin ... count, as one comparison.
  begin = max(begin, 0);
  const uint32 first = uint32(Grid::row() - begin), real = uint32(max(count - begin, 0));
#pragma unroll
  for (int i = 0; i < Grid::rows; ++i) {
    if (!Grid::owns(i)) break;
#pragma unroll
    for (int j = 0; j < Grid::columns; ++j) {
      const int c = j * Grid::across * Grid::elements;
      ptx::copy_16_bytes(to + (i * Grid::step * pitch + c) * size, from + c * size,
                         (all || first + i * Grid::step < real) && Grid::column() + c < columns);
    }
    from += Grid::step * t.n;
  }
}

// Calls `change` with each of the thread's own chunks of a tile, which have arrived.
template <typename Config, int height, int width, int pitch, typename Change>
CF_DEVICE void change_tile(typename Config::element* tile, const Change& change) {
  using Grid = ChunkGrid<Config, height, width>;
  auto* const own = tile + Grid::row() * pitch + Grid::column();
#pragma unroll
  for (int i = 0; i < Grid::rows; ++i) {
    if (!Grid::owns(i)) break;
#pragma unroll
    for (int j = 0; j < Grid::columns; ++j) {
      change(own + i * Grid::step * pitch + j * Grid::across * Grid::elements);
    }
  }
}

// Rounds to TF32 what the thread itself has copied, once it has arrived. The other kinds take the
// elements as they are.
template <typename Config, int height, int width, int pitch>
CF_DEVICE void round_tile(typename Config::element* tile) {
  if constexpr (Config::precision == 1) {
    change_tile<Config, height, width, pitch>(tile, [](float* own) {
      Chunk* const chunk = reinterpret_cast<Chunk*>(own);
      Chunk x = *chunk;
#pragma unroll
      for (int w = 0; w < 4; ++w) x.word[w] = ptx::tf32_word(x.word[w]);
      *chunk = x;
    });
  }
}

// The same, but 3xTF32 gets its operands in two parts: the second ones in a tile behind the first.
template <typename Config, int height, int width, int pitch>
CF_DEVICE void ready_tile(typename Config::element* tile) {
  if constexpr (Config::precision == 2) {
    change_tile<Config, height, width, pitch>(tile, [](float* own) {
      Chunk* const chunk = reinterpret_cast<Chunk*>(own);
      const Chunk x = *chunk;
      Parts<Chunk> parts;
#pragma unroll
      for (int w = 0; w < 4; ++w) split(x.word[w], parts.high.word[w], parts.low.word[w]);
      *chunk = parts.high;
      *reinterpret_cast<Chunk*>(own + height * pitch) = parts.low;
    });
  } else {
    round_tile<Config, height, width, pitch>(tile);
  }
}

}  // namespace cf

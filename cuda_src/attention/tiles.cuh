// Tiles: pieces of shared memory, and how arrays get into them.
//
// A row of a problem is "packed" when the query heads of one key head stand side by side: packed
// row r is query r / group of head r % group. A tile of packed rows serves grouped heads with one
// load of K and V.
#pragma once

#include "../convert.cuh"

namespace cf {

// Elements from one row of a tile to the next. 16 bytes to spare (32 for float64) spread the rows
// over the banks for a fragment's loads, and keep every row on a 16-byte border.
template <typename T>
CF_HOST_DEVICE constexpr int pitch(int columns) {
  return columns + (sizeof(T) == 2 ? 8 : 4);
}

template <typename T>
CF_HOST_DEVICE constexpr int tile_bytes(int rows, int columns) {
  return rows * pitch<T>(columns) * int(sizeof(T));
}

// Cuts arrays out of the block's shared memory, one after the other.
struct Carver {
  unsigned char* next;

  template <typename T>
  CF_DEVICE T* take(int bytes) {
    T* piece = reinterpret_cast<T*>(next);
    next += bytes;
    return piece;
  }
};

// Which scores a thread works on between the products: four threads share a row, and take every
// fourth key each, so that a warp's 32 accesses hit 32 banks.
template <typename Config>
struct Own {
  static constexpr int threads = 32 * Config::warps;
  static constexpr int lanes = 4;                      // threads of a row
  static constexpr int row_step = threads / lanes;
  static constexpr int rows = ceil_div(Config::Br, row_step);
  static CF_DEVICE int row() { return int(threadIdx.x) / lanes; }
  static CF_DEVICE int column() { return int(threadIdx.x) % lanes; }
};

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

// Two elements that are loaded or stored as one.
template <typename T>
struct alignas(2 * sizeof(T)) Pair {
  T x[2];
};

// 16 bytes of a tile's row.
struct alignas(16) Chunk {
  uint32 word[4];
};
struct alignas(8) HalfChunk {
  uint32 word[2];
};

// The i-th 16-bit element of a chunk that holds 0 there.
CF_DEVICE void set_element(Chunk& chunk, int i, uint16 bits) {
  chunk.word[i / 2] |= uint32(bits) << 16 * (i % 2);
}

// The first `bytes` of a chunk, loaded in pieces of `vector_bytes`; zeros beyond.
CF_DEVICE Chunk load_chunk(uint64 address, int bytes, int vector_bytes) {
  Chunk chunk = {};
  if (vector_bytes == 16) {
    chunk = at<const Chunk>(address);
  } else if (vector_bytes == 8) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (8 * i < bytes) {
        const HalfChunk half = at<const HalfChunk>(address + 8 * i);
        chunk.word[2 * i] = half.word[0];
        chunk.word[2 * i + 1] = half.word[1];
      }
    }
  } else if (vector_bytes == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (4 * i < bytes) chunk.word[i] = at<const uint32>(address + 4 * i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (2 * i < bytes) set_element(chunk, i, at<const uint16>(address + 2 * i));
    }
  }
  return chunk;
}

// The same of float32 memory, rounded to 16-bit elements.
template <typename T>
CF_DEVICE Chunk load_narrowed(uint64 address, int elements) {
  Chunk chunk = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < elements) {
      set_element(chunk, i, narrow<T>(at<const float>(address + 4 * i)).bits);
    }
  }
  return chunk;
}

// The elements column0 ... column0 + 16 bytes of one row, as operands of a product.
template <typename Config>
CF_DEVICE Chunk load_operands(const Tensor& t, uint64 row, int column0, int columns,
                              int vector_bytes) {
  using T = typename Config::element;
  constexpr int size = sizeof(T);
  Chunk chunk;
  if (sizeof(T) == 2 && t.kind == FLOAT32) {
    if constexpr (sizeof(T) == 2) {
      chunk = load_narrowed<T>(row + 4 * column0, columns - column0);
    }
  } else {
    chunk = load_chunk(row + size * column0, size * (columns - column0), vector_bytes);
  }
  if constexpr (Config::precision == 1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) chunk.word[i] = ptx::tf32_word(chunk.word[i]);
  }
  return chunk;
}

// A row is left out of a tile where skip[r] is +inf; nullptr: none is.
template <typename T>
CF_DEVICE bool kept(const T* skip, int r) {
  return skip == nullptr || skip[r] != inf<T>();
}

// tile[r, c] = packed row `row0 + r`, column c, of the heads that start at `base`. Rows before
// `begin` and from `count` on, and columns from `columns` on, are zero, whatever memory holds:
// 0 * NaN would be NaN.
template <typename Config, int height, int width>
CF_DEVICE void load_tile(typename Config::element* tile, const Tensor& t, uint64 base, int64 row0,
                         int begin, int count, int columns, int64 group, int64 vector_bytes,
                         const accumulator<typename Config::element>* skip = nullptr) {
  using T = typename Config::element;
  constexpr int elements = 16 / int(sizeof(T));
  constexpr int chunks = width / elements;
  const PackedRows rows(row0, group);
  for (int i = int(threadIdx.x); i < height * chunks; i += 32 * Config::warps) {
    const int r = i / chunks, c = i % chunks * elements;
    Chunk chunk = {};
    if (r >= begin && r < count && c < columns && kept(skip, r)) {
      chunk = load_operands<Config>(t, base + rows.offset(t, r), c, columns, int(vector_bytes));
    }
    *reinterpret_cast<Chunk*>(tile + r * pitch<T>(width) + c) = chunk;
  }
}

}  // namespace cf

// Tiles in shared memory: how arrays get into them, which keys their rows see, and what of them
// nobody sees.
#pragma once

#include "../attention/band.cuh"
#include "../memory.cuh"

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

// tile = the block, without the rows that are left out.
template <typename Config, int height, int width>
CF_DEVICE void load_tile(typename Config::element* tile, const RowBlock& block,
                         const accumulator<typename Config::element>* skip = nullptr) {
  using T = typename Config::element;
  constexpr int elements = 16 / int(sizeof(T));
  constexpr int chunks = width / elements;
  for (int i = int(threadIdx.x); i < height * chunks; i += 32 * Config::warps) {
    const int r = i / chunks, c = i % chunks * elements;
    Chunk chunk = {};
    if (block.has(r, c) && kept(skip, r)) {
      chunk = load_operands<Config>(block.t, block.row(r), c, block.columns,
                                    int(block.vector_bytes));
    }
    *reinterpret_cast<Chunk*>(tile + r * pitch<T>(width) + c) = chunk;
  }
}

// ranges[r] = the keys that row r sees; none if it is not a real one.
template <typename Config>
CF_DEVICE void find_ranges(KeyRange* ranges, const Params& p, const Rows& rows) {
#pragma unroll 1
  for (int r = int(threadIdx.x); r < Config::Br; r += 32 * Config::warps) {
    Range range = {0, 0};
    if (r < rows.rows) range = visible_keys(p, rows.position(r), rows.position(r), rows.kv_len);
    ranges[r] = {int(range.first), int(range.end)};
  }
}

// seen[j] = whether any row of the score tile S [Br, keys] sees key j. Needs S complete.
template <typename Config, typename T>
CF_DEVICE void find_seen_keys(int* seen, const T* S, int rows, int keys) {
  for (int j = int(threadIdx.x); j < keys; j += 32 * Config::warps) {
    bool any = false;
    for (int r = 0; r < rows; ++r) any = any || S[r * pitch<T>(Config::Bc) + j] != -inf<T>();
    seen[j] = any;
  }
}

// Zeroes the rows of a tile of K or V that no query of the tile sees: whatever they hold must not
// matter. 0 * NaN is NaN, so a probability of 0 is not enough to keep it out of a product.
template <typename Config, int width, typename T>
CF_DEVICE void forget_unseen_keys(T* tile, const int* seen, int keys) {
  for (int i = int(threadIdx.x); i < keys * width; i += 32 * Config::warps) {
    const int j = i / width;
    if (!seen[j]) tile[j * pitch<T>(width) + i % width] = T{};
  }
}

}  // namespace cf

// Kernels whose threads own rows: the walk over the keys. A thread has R rows of queries and all
// that belongs to them in registers; keys lie in shared memory, where one load serves R rows.
#pragma once

#include "../attention/schedule.cuh"
#include "../attention/score.cuh"
#include "../ptx/shared.cuh"
#include "../view/threads.cuh"
#include "records.cuh"

namespace cf {

// values: whether the values are walked over, too.
template <typename Config, bool values>
struct KeyTraits {
  using T = typename Config::element;
  static constexpr int threads = block_threads<Config>();
  static constexpr int R = Config::Br / threads;
  static constexpr int width = Config::d + (values ? Config::d_v : 0);   // of a record
  static constexpr int smem_bytes = Config::Bc * width * int(sizeof(T));
  static_assert(sizeof(T) >= 4, "16-bit types have tensor cores");
  static_assert(Config::Br % threads == 0, "Br must be whole rows of all threads");
  static_assert(Config::Bc % Config::chunk == 0, "Bc must be whole chunks");
};

template <bool value_>
struct Flag {
  static constexpr bool value = value_;
};

// The rows of a block, and the keys that they see. Lies in memory: registers are for the loop.
struct RowTask {
  Rows rows;
  TileKeys keys;
  SeenKeys seen;
  uint64 k, v;               // the first keys and values of the key head

  CF_DEVICE RowTask(const Params& p, const Rows& rows_, int64 low, int64 high, int Br,
                    int64 head_k)
      : rows(rows_), keys(p, rows_, low, high), seen(keys, rows_, 0, Br),
        k(head_address(p.k, rows_.b, head_k)), v(head_address(p.v, rows_.b, head_k)) {}
};

// Tasks: tiles of query rows of a key head, each once per split of the keys. body(task, split).
template <typename Config, typename Body>
CF_DEVICE void for_each_task(const Params& p, int64 splits, int64 split_keys, const Body& body) {
  const int64 tiles = ceil_div(p.group * p.Nq, int64(Config::Br));
  for (int64 i = blockIdx.x; i < p.tasks; i += gridDim.x) {
    const SplitTile at = split_tile(p, i, splits, tiles, true);
    RowTask task(p, open_rows(p, at.b, at.head_k * p.group, p.group, at.tile * Config::Br,
                              Config::Br),
                 at.split * split_keys, (at.split + 1) * split_keys, Config::Br, at.head_k);
    ptx::keep_in_memory(task);
    body(task, at.split);
  }
}

// The elements of a thread's rows.
template <typename Config, int columns, int R, typename T>
CF_DEVICE void load_owned(T (&x)[R][columns], const Tensor& t, const Rows& rows) {
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int r = owned<Config>(i);
    load_row<columns>(x[i], rows.address(t, r), r < rows.rows);
  }
}

// The keys begin ... count - 1 of a tile; zeros beyond.
template <typename Config, bool values>
CF_DEVICE void load_keys(typename Config::element* tile, const Params& p, const RowTask& task,
                         int key0, int begin, int count) {
  using Traits = KeyTraits<Config, values>;
#pragma unroll
  for (int j0 = 0; j0 < Config::Bc; j0 += Traits::threads) {
    const int j = j0 + int(threadIdx.x);
    if (Config::Bc % Traits::threads != 0 && j >= Config::Bc) break;
    const bool there = j >= begin && j < count;
    const int64 key = int64(key0) + j;
    load_row<Config::d>(tile + j * Traits::width, task.k + key * p.k.n, there);
    if constexpr (values) {
      load_row<Config::d_v>(tile + j * Traits::width + Config::d, task.v + key * p.v.n, there);
    }
  }
}

// All tiles of keys that the rows of a task see. open(i, range): the `ScoreRow` of a thread's i-th
// row. chunk(hides, records, key0, rows): what is done with the keys of a chunk, from key0 on;
// hides: whether any of them may be hidden from a row. end(): what is done behind a tile.
template <typename Config, bool values, typename Open, typename Chunk, typename End>
CF_DEVICE void walk_keys(const Params& p, const RowTask& task, typename Config::element* tile,
                         const Open& open, const Chunk& chunk, const End& end) {
  using T = typename Config::element;
  using Traits = KeyTraits<Config, values>;
  constexpr int Bc = Config::Bc, n = Config::chunk;
#pragma unroll 1
  for (int key0 = task.seen.first / Bc * Bc; key0 < task.seen.end; key0 += Bc) {
    const int begin = max(task.seen.first - key0, 0), count = min(task.seen.end - key0, Bc);
    ptx::sync_block("tile_read");
    load_keys<Config, values>(tile, p, task, key0, begin, count);
    ptx::sync_block("tile_loaded");
    if (!changes_scores<Config>() && task.seen.all(key0, Bc)) {
      const ScoreRow<T> rows[Traits::R] = {};
#pragma unroll 1
      for (int j = 0; j < Bc; j += n) {
        T x[n * Traits::width];
        load_pieces(x, tile + j * Traits::width);
        chunk(Flag<false>(), x, key0 + j, rows);
      }
    } else {
      ScoreRow<T> rows[Traits::R];
#pragma unroll
      for (int i = 0; i < Traits::R; ++i) {
        rows[i] = open(i, task.keys.of_row(task.rows, owned<Config>(i)));
      }
#pragma unroll 1
      for (int j = begin / n * n; j < count; j += n) {
        T x[n * Traits::width];
        load_pieces(x, tile + j * Traits::width);
        chunk(Flag<true>(), x, key0 + j, rows);
      }
    }
    end();
  }
}

}  // namespace cf

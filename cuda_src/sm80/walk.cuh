// The walk of a block of the fused backward kernel over the tiles of rows that see its keys.
#pragma once

#include "gradient.cuh"

namespace cf {

// The threads that copy, in the eyes of the functions that share out tiles.
template <typename Config>
struct Copiers : Config {
  static constexpr int warps = BackwardSm80Traits<Config>::copiers / 32;
};

// Whole tiles are copied by steps if a thread's rows belong to one head and 16-byte copies fit.
template <typename Config>
CF_DEVICE bool find_steps(Steps& steps, const Tensor& t, int64 group, int row_step) {
  if (group <= 1) {                                     // 0: no query heads at all
    steps = {Config::Br * t.n, row_step * t.n};
    return true;
  }
  const uint32 heads = uint32(group), tile = Config::Br, step = uint32(row_step);
  steps = {tile / heads * t.n, step / heads * t.n};
  return step % heads == 0 && tile % heads == 0;
}

template <typename Config>
CF_DEVICE OwnKeys open_keys(const BackwardParams& p, int64 b, int64 head_k, int64 key0,
                            const RowPiece& piece) {
  const Sequence s = open_sequence(p, b);
  const int64 keys = min(p.Nk - key0, int64(Config::Bc));
  OwnKeys own;
  static_cast<KeyBand&>(own) = KeyBand(p, s, key0, keys);
  if constexpr (has_pieces<Config>()) {
    own.first = max(own.first, piece.begin);
    own.end = min(own.end, piece.end);
  }
  own.template find_whole_tiles<Config::Br, Config::Bc>(p, s, key0, keys);
  own.head = b * p.heads_k + head_k;
  own.key0 = key0;
  own.keys = keys;
  own.offset = s.offset;
  own.kv_len = s.kv_len;
  own.k = head_address(p.k, b, head_k);
  own.v = head_address(p.v, b, head_k);
  own.q = head_address(p.q, b, head_k * p.group);
  own.dout = head_address(p.dout, b, head_k * p.group);
  constexpr int q_step = ChunkGrid<Copiers<Config>, Config::Br, Config::d>::step;
  constexpr int v_step = ChunkGrid<Copiers<Config>, Config::Br, Config::d_v>::step;
  const bool q_regular = find_steps<Config>(own.q_steps, p.q, p.group, q_step);
  const bool v_regular = find_steps<Config>(own.dout_steps, p.dout, p.group, v_step);
  own.scale = float(p.scale);
  own.regular = q_regular && v_regular && p.vector_bytes == 16 && p.dout.kind == p.q.kind;
  return own;
}

// Starts the copy of a whole tile of rows. base: the first row of the first head.
template <typename Config, int width, int pitch>
CF_DEVICE void copy_whole_tile(typename Config::element* tile, const Tensor& t, uint64 base,
                               const Steps& steps, int index, int columns, uint32 group) {
  using T = typename Config::element;
  using Grid = ChunkGrid<Copiers<Config>, Config::Br, width>;
  const ptx::Shared to(tile + Grid::row() * pitch + Grid::column());
  const uint32 row = uint32(Grid::row());
  const int last = columns - Grid::column();
  uint64 from = base + index * steps.tile + Grid::column() * int(sizeof(T));
  from += group == 1 ? row * t.n : row / group * t.n + row % group * t.h;
#pragma unroll
  for (int i = 0; i < Grid::rows; ++i) {
    if (!Grid::owns(i)) break;
#pragma unroll
    for (int j = 0; j < Grid::columns; ++j) {
      const int c = j * Grid::across * Grid::elements;
      ptx::copy_16_bytes(to + (i * Grid::step * pitch + c) * int(sizeof(T)),
                         from + c * int(sizeof(T)), c < last);
    }
    from += steps.row;
  }
}

template <typename Config>
struct Walk {
  using Traits = BackwardSm80Traits<Config>;
  using Tiles = FusedTiles<Config>;
  const BackwardParams& p;
  const Tiles& t;
  const OwnKeys& own;

  // Whether all rows of a tile see all of the block's keys.
  CF_DEVICE bool whole(int tile) const { return tile >= own.whole_first && tile < own.whole_end; }
  // The rows of a tile, as far as they see any key of the block's; those before `begin` do not. The
  // heads are left out: `own` has their addresses.
  CF_DEVICE Rows rows_of(int tile) const {
    const int64 row0 = int64(tile) * Config::Br;
    const int count = int(min(own.end - row0, int64(Config::Br)));
    return {0, 0, row0, count, own.offset, own.kv_len, PackedRows(row0, p.group)};
  }
  // Rows of the tile before the first that sees a key.
  CF_DEVICE int begin_of(const Rows& rows) const {
    return int(max(own.first - rows.row0, int64(0)));
  }

  CF_DEVICE static bool copies() { return int(threadIdx.x) < Traits::copiers; }

  // Starts the copies of K and V. Keys that nobody sees become zeros.
  CF_DEVICE void copy_keys() const {
    if (!copies()) return;
    copy_keys_of<Config::d, Tiles::q_pitch>(t.K, p.k, own.k, int(p.d));
    copy_keys_of<Config::d_v, Tiles::v_pitch>(t.V, p.v, own.v, int(p.d_v));
  }

  template <int width, int pitch>
  CF_DEVICE void copy_keys_of(typename Config::element* tile, const Tensor& x, uint64 base,
                              int columns) const {
    if (!Traits::compact && copies_whole<Config>(x, p.vector_bytes)) {
      using Threads = Copiers<Config>;
      cf::copy_rows<Threads, Config::Bc, width, pitch>(
          copy_place<Threads, Config::Bc, width, pitch>(tile), x,
          copy_start<Threads, Config::Bc, width>(x, base, own.key0), own.seen_first, own.seen_end,
          columns);
    } else {
      copy_slowly<width, pitch>(
          tile, Config::Bc,
          key_block(p, x, base, own.key0, own.seen_first, own.seen_end, columns));
    }
  }

  // Starts the copies of a tile of rows and of what is known of them: by steps where that can be;
  // otherwise rows that see none of the keys become zeros.
  // slowly: in the way that is always there, which saves compiling the other.
  template <bool queries = true, bool gradients = true, bool slowly = false>
  CF_DEVICE void copy_rows(int tile, int stage) const {
    if (!copies()) return;
    using T = typename Config::element;
    T* const Q = t.Q + stage * Tiles::q_step;
    T* const dO = t.dO + stage * Tiles::v_step;
    const int64 row0 = int64(tile) * Config::Br;
    if (!slowly && own.regular && row0 >= own.first && row0 + Config::Br <= own.end) {
      const uint32 group = uint32(p.group);
      if (queries) {
        copy_whole_tile<Config, Config::d, Tiles::q_pitch>(Q, p.q, own.q, own.q_steps, tile,
                                                           int(p.d), group);
      }
      if (gradients) {
        copy_whole_tile<Config, Config::d_v, Tiles::v_pitch>(dO, p.dout, own.dout, own.dout_steps,
                                                             tile, int(p.d_v), group);
      }
    } else {
      copy_some_rows(p, tile, stage, queries, gradients);
    }
    if (gradients) copy_state(tile, stage);
    ptx::close_copies();
    if (gradients && (changes_scores<Config>() || !whole(tile))) find_hidden(p, tile, stage);
  }

  CF_DEVICE void copy_state(int tile, int stage) const {
    using A = accumulator<typename Config::element>;
    const uint64 from = state_address<A>(p, own.head, tile, Config::Br);
    const ptx::Shared to(t.state + stage * 2 * Config::Br);
#pragma unroll 1
    for (int i = 16 * int(threadIdx.x); i < Traits::state_bytes; i += 16 * Traits::copiers) {
      ptx::copy_16_bytes(to + i, from + i, true);
    }
  }

  // What follows is rare, and called so that it is compiled once, not wherever rows are copied.
  template <int width, int pitch>
  CF_DEVICE_CALLED static void copy_slowly(typename Config::element* tile, int height,
                                           RowBlock block) {
    copy_any_rows<Copiers<Config>, width, pitch>(tile, height, block);
  }

  CF_DEVICE_CALLED static void copy_some_rows(const BackwardParams& p, int tile, int stage,
                                              bool queries, bool gradients) {
    CF_DYNAMIC_SHARED(memory);
    const Tiles t(memory);
    const OwnKeys& own = *t.own;
    const Walk walk = {p, t, own};
    const Rows rows = walk.rows_of(tile);
    const int begin = walk.begin_of(rows);
    if (queries) {
      copy_slowly<Config::d, Tiles::q_pitch>(
          t.Q + stage * Tiles::q_step, Config::Br,
          {p.q, own.q, rows.packed, begin, rows.rows, int(p.d), p.vector_bytes});
    }
    if (gradients) {
      copy_slowly<Config::d_v, Tiles::v_pitch>(
          t.dO + stage * Tiles::v_step, Config::Br,
          {p.dout, own.dout, rows.packed, begin, rows.rows, int(p.d_v), p.vector_bytes});
    }
  }

  // The keys that each row sees, counted from the first of the block's, and those that any sees.
  CF_DEVICE_CALLED static void find_hidden(const BackwardParams& p, int tile, int stage) {
    CF_DYNAMIC_SHARED(memory);
    const Tiles t(memory);
    const OwnKeys& own = *t.own;
    const Walk walk = {p, t, own};
    const Rows rows = walk.rows_of(tile);
    const int begin = walk.begin_of(rows), key0 = int(own.key0);
    const TileKeys keys(p, rows, own.key0, own.key0 + own.keys);
    if (threadIdx.x == 0) {
      t.seen[tile % 4] = {keys.of_row(rows, begin).first - key0,
                          keys.of_row(rows, rows.rows - 1).end - key0};
    }
    KeyRange* const ranges = t.ranges + stage * Config::Br;
#pragma unroll 1
    for (int r = int(threadIdx.x); r < Config::Br; r += Traits::copiers) {
      const KeyRange seen = keys.of_row(rows, r);
      const bool real = r >= begin && r < rows.rows;
      ranges[r] = {real ? seen.first - key0 : 0, real ? seen.end - key0 : 0};
      if constexpr (changes_scores<Config>()) {
        walk.open_row(rows, stage, r, real ? seen : KeyRange{0, 0});
      }
    }
    if constexpr (adds_dbias<Config>()) {               // by other threads: rows take their time
#pragma unroll 1
      for (int r = int(threadIdx.x) - Config::Br; r < Config::Br; r += Traits::copiers) {
        if (r >= 0) walk.open_sums(rows, stage, r);
      }
    }
  }
  // What the scores of a row need beside the products, and where its gradient goes.
  CF_DEVICE void open_row(Rows rows, int stage, int r, KeyRange seen) const {
    using A = accumulator<typename Config::element>;
    rows.b = own.head / p.heads_k;
    rows.head0 = own.head % p.heads_k * p.group;
    t.rows[stage * Config::Br + r] = open_gradient_row<Config, A>(p, rows, r, seen);
    if constexpr (adds_dbias<Config>()) return;
    const bool writes = dbias_is<Config>(STORED) && rows.row0 + r < p.group * p.Nq;
    t.dbias[stage * Config::Br + r] = writes ? rows.address(p.dbias, r) : 0;
  }
  // Where the dS of a row or its sum is added; that of no row, which is 0, at the first place.
  CF_DEVICE void open_sums(Rows rows, int stage, int r) const {
    rows.b = own.head / p.heads_k;
    rows.head0 = own.head % p.heads_k * p.group;
    const bool real = rows.row0 + r < p.group * p.Nq;
    t.dbias[stage * Config::Br + r] =
        dbias_sums_of_row<Config>(p, rows, real ? r : 0, own.key0 / Config::Bc);
  }

  // Waits for what the thread itself has copied, and rounds it where the kind asks for it.
  CF_DEVICE void round_keys() const {
    if (Config::precision != 1 || !copies()) return;
    ptx::wait_for_copies<0>("keys_copied");
    round_tile<Copiers<Config>, Config::Bc, Config::d, Tiles::q_pitch>(t.K);
    round_tile<Copiers<Config>, Config::Bc, Config::d_v, Tiles::v_pitch>(t.V);
  }
  CF_DEVICE void await_rows(int stage) const {
    if (!copies()) return;
    ptx::wait_for_copies<0>("rows_copied");
    if constexpr (Config::precision == 2 && Traits::rests == 0) return;
    ready_tile<Copiers<Config>, Config::Br, Config::d, Tiles::q_pitch>(t.Q
                                                                       + stage * Tiles::q_step);
    ready_tile<Copiers<Config>, Config::Br, Config::d_v, Tiles::v_pitch>(t.dO
                                                                         + stage * Tiles::v_step);
  }
};

}  // namespace cf

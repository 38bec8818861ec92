// The fused backward kernel: dk, dv and the sums of dq in one walk over the queries of a key tile.
// Dao, "FlashAttention-2" (2023), algorithm 2.
//
// Scores are computed transposed, keys as rows: P^T and dS^T are then operands of dV += P^T dO and
// dK += dS^T Q in the registers that hold them. dS goes through shared memory once, for dQ += dS K,
// which is added to sums in global memory.
#pragma once

#include "roles.cuh"
#include "store.cuh"

namespace cf {

template <typename Config, int roles = Config::roles>
struct Kinds {
  using Step = cf::Step<Config>;
  using Gradient = Gradients<Config>;
};
template <typename Config>
struct Kinds<Config, 2> {
  using Step = RoleStep<Config>;
  using Gradient = RoleGradient<Config>;
};
template <typename Config>
using StepOf = typename Kinds<Config>::Step;
template <typename Config>
using GradientOf = typename Kinds<Config>::Gradient;

// Whether the warp has a part of dV, and of dK.
template <typename Config>
CF_DEVICE bool has_dv() {
  return Config::roles == 1 || Share<Config>::role() == 0;
}
template <typename Config>
CF_DEVICE bool has_dk() {
  return Config::roles == 1 || Share<Config>::role() == 1;
}

// Sums that lie side by side as 16 bytes of elements.
template <typename T, typename A>
CF_DEVICE Chunk round_sums(const A* x) {
  Chunk chunk;
  if constexpr (sizeof(T) == sizeof(A)) {
    chunk = *reinterpret_cast<const Chunk*>(x);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) chunk.word[i] = ptx::pack<T>(x[2 * i], x[2 * i + 1]);
  }
  return chunk;
}

// The rows of a tile [Bc, width] to dk or dv, 16 bytes at a time where that can be: it can only if
// they are of the type of the operands.
template <typename Config, int width>
CF_DEVICE void write_rows(const Tensor& t, uint64 base, const OwnKeys& own, int columns,
                          const accumulator<typename Config::element>* tile) {
  using T = typename Config::element;
  constexpr int pitch = width + 4, threads = 32 * Config::warps;
  const uint64 first = base + own.key0 * t.n;
  if (in_pieces(t, sizeof(T), columns, 16)) {
    constexpr int elements = 16 / int(sizeof(T)), chunks = width / elements;
    constexpr int unrolled = BackwardSm80Traits<Config>::compact ? 1 : 2;
#pragma unroll unrolled
    for (int i = int(threadIdx.x); i < Config::Bc * chunks; i += threads) {
      const int key = i / chunks, c = i % chunks * elements;
      if (key < own.keys && c < columns) {
        at<Chunk>(first + key * t.n + c * int(sizeof(T))) = round_sums<T>(tile + key * pitch + c);
      }
    }
  } else {
    constexpr int pairs = width / 2;
#pragma unroll 1
    for (int i = int(threadIdx.x); i < Config::Bc * pairs; i += threads) {
      const int key = i / pairs, c = i % pairs * 2;
      if (key >= own.keys) break;
      store_pair(t, first + key * t.n + c * t.c, columns - c, tile[key * pitch + c],
                 tile[key * pitch + c + 1]);
    }
  }
}

// The rows of a tile [Bc, width] to sums [Nk, columns] in memory: the first of them, or one more.
template <typename Config, int width>
CF_DEVICE void add_rows_to(uint64 sums, const OwnKeys& own, int columns, bool first,
                           const accumulator<typename Config::element>* tile) {
  using A = accumulator<typename Config::element>;
  constexpr int pitch = width + 4, threads = 32 * Config::warps;
#pragma unroll 1
  for (int i = int(threadIdx.x); i < Config::Bc * width; i += threads) {
    const int key = i / width, c = i % width;
    if (key >= own.keys) break;
    if (c >= columns) continue;
    A& sum = at<A>(sums + ((own.key0 + key) * columns + c) * int64(sizeof(A)));
    sum = first ? tile[key * pitch + c] : sum + tile[key * pitch + c];
  }
}

// scale * acc as rows of a tile [Bc, width] in shared memory: the columns from `column` on of the
// warp's strip. mine: whether the warp has a part of it.
template <typename Config, int width, int M, int N>
CF_DEVICE const accumulator<typename Config::element>* stage_gradient(
    const typename Fragments<Config>::C (&acc)[M][N], int column,
    accumulator<typename Config::element> scale, bool mine, unsigned char* memory) {
  using A = accumulator<typename Config::element>;
  constexpr int pitch = width + 4;
  A* const tile = reinterpret_cast<A*>(memory);
  ptx::sync_block("tiles_read");                        // the memory is free
  if (mine) {
#pragma unroll
    for (int i = 0; i < M; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        A* const corner = tile + (Share<Config>::strip() + 16 * i + lane_row()) * pitch + column
                          + 16 * j + lane_column();
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          corner[row_step(e) * pitch + column_step(e)] = acc[i][j].x[e] * scale;
        }
      }
    }
  }
  ptx::sync_block("gradient_staged");
  return tile;
}

// One tile of rows, whose operands are in a stage. The next one is copied meanwhile: into the other
// stage, or as soon as nobody reads what it replaces.
template <typename Config, typename Gradient>
CF_DEVICE void add_tile(Gradient& g, const Walk<Config>& walk,
                        accumulator<typename Config::element> scale, int tile, int end,
                        int stage) {
  using Traits = BackwardSm80Traits<Config>;
  const StepOf<Config> step(walk.p, walk.t, tile, stage, !walk.whole(tile));
  if constexpr (hides_any<Config>()) forget_blind_rows<Config>(walk.t, stage);
  step.add_own(g, scale, [&] {
    if (Config::stages > 1 && tile + 1 < end) walk.copy_rows(tile + 1, 1 - stage);
    if (Config::stages == 1 && !Traits::own && Config::roles == 1 && tile + 1 < end) {
      walk.template copy_rows<false, true>(tile + 1, 0);          // lse and delta are read, too
    }
  });
  if constexpr (Traits::arrives_early) walk.await_rows(1 - stage);
  ptx::sync_block("dS_written");                        // and P
  const uint64 sums = dq_address<Config>(walk.p, walk.own.head, tile);
  if constexpr (Config::stages == 1 && !Traits::own) {
    if (Config::roles > 1 && tile + 1 < end) walk.template copy_rows<false, true>(tile + 1, 0);
    step.add_shared(g);
    ptx::sync_block("Q_read");
    if (tile + 1 < end) walk.template copy_rows<true, false>(tile + 1, 0);
#pragma unroll 1
    for (int pass = 0; pass < Traits::dq_passes; ++pass) {
      if constexpr (wants<Config>(DQ)) step.add_queries(sums, pass);
    }
  } else {
    if (Config::stages == 1 && Traits::free_early && tile + 1 < end) walk.copy_rows(tile + 1, 0);
#pragma unroll 1
    for (int pass = 0; pass < Traits::dq_passes; ++pass) {
      if constexpr (wants<Config>(DQ)) step.add_queries(sums, pass);
      if (pass == 0) step.add_shared(g);                // while the sums of dq are on their way
    }
  }
  if constexpr (Config::stages == 1 && Traits::own && !Traits::free_early) {
    ptx::sync_block("rows_read");                       // Q and dO
    if (tile + 1 < end) walk.copy_rows(tile + 1, 0);
  }
}

// The walk over all rows that see the block's keys.
template <typename Config, typename Gradient>
CF_DEVICE void add_rows(Gradient& g, const BackwardParams& p, const FusedTiles<Config>& t) {
  using Traits = BackwardSm80Traits<Config>;
  const OwnKeys& own = *t.own;
  const Walk<Config> walk = {p, t, own};
  // A float of shared memory where it is enough: converted from the parameter, it would be so anew
  // in each step.
  using A = accumulator<typename Config::element>;
  const A scale = sizeof(A) == 8 ? A(p.scale) : A(own.scale);
  const int first = int(own.first / Config::Br), end = int(ceil_div(own.end, int64(Config::Br)));
  walk.copy_keys();
  walk.template copy_rows<true, true, Traits::compact>(first, 0);
  walk.round_keys();
  if constexpr (Traits::arrives_early) {
    walk.await_rows(0);
    ptx::sync_block("first_rows_ready");                // Q and dO, K and V
  }
  int stage = 0;
#pragma unroll 1
  for (int tile = first; tile < end; ++tile) {
    if constexpr (!Traits::arrives_early) {
      walk.await_rows(stage);
      ptx::sync_block("rows_ready");                    // Q and dO, first also K and V
    }
    add_tile<Config>(g, walk, scale, tile, end, stage);
    if constexpr (Config::stages > 1) stage = 1 - stage;
  }
}

// Where dk or dv of the block's keys goes, or what a piece of the rows adds to its sums.
struct GradientPlace {
  const Tensor& t;
  uint64 sums;
  int columns;
};

template <typename Config, int width>
CF_DEVICE void store_gradient(const BackwardParams& p, const GradientPlace& place,
                              const OwnKeys& own, const RowPiece& piece, int64 split,
                              const accumulator<typename Config::element>* tile) {
  using A = accumulator<typename Config::element>;
  if constexpr (has_pieces<Config>()) {
    add_rows_to<Config, width>(sums_of<A>(p, place.sums, place.columns, split, own.head), own,
                               place.columns, piece.first, tile);
  } else {
    const uint64 base = head_address(place.t, own.head / p.heads_k, own.head % p.heads_k);
    write_rows<Config, width>(place.t, base, own, place.columns, tile);
  }
}

// dk, dv and what the keys of a tile add to dq, over a piece of the rows.
template <typename Config>
CF_DEVICE void fused_keys(const BackwardParams& p, const FusedTiles<Config>& t,
                          const SplitTile& at, const RowPiece& piece, unsigned char* memory) {
  using Traits = BackwardSm80Traits<Config>;
  using A = accumulator<typename Config::element>;
  if (threadIdx.x == 0) {
    *t.own = open_keys<Config>(p, at.b, at.head_k, at.tile * Config::Bc, piece);
  }
  ptx::sync_block("keys_opened");                       // it is known who sees the keys
  GradientOf<Config> g = {};
  const OwnKeys& own = *t.own;
  if constexpr (dbias_is<Config>(OVER_ROWS)) clear_row_sums(t);
  if (own.first < own.end) add_rows(g, p, t);
  if constexpr (dbias_is<Config>(OVER_ROWS)) store_row_sums(p, t, piece, at.split);
  if constexpr (dbias_is<Config>(STORED)) {
    const int first = int(own.first / Config::Br);
    clear_dbias<Config>(p, own, first,
                        own.first < own.end ? int(ceil_div(own.end, int64(Config::Br))) : first,
                        piece);
  }
  const int part = Share<Config>::part();
  if constexpr (wants<Config>(DK)) {
    const A* const tile = stage_gradient<Config, Config::d>(
        g.dk(), part * Traits::d_part, A(p.scale), has_dk<Config>(), memory);
    store_gradient<Config, Config::d>(p, {p.dk, p.dk_sums, int(p.d)}, own, piece, at.split, tile);
  }
  if constexpr (wants<Config>(DV)) {
    const A* const tile = stage_gradient<Config, Config::d_v>(
        g.dv(), part * Traits::v_part, A(1), has_dv<Config>(), memory);
    store_gradient<Config, Config::d_v>(p, {p.dv, p.dv_sums, int(p.d_v)}, own, piece, at.split,
                                        tile);
  }
}

// Tasks: tiles of keys of a key head, each once per split of the rows.
template <typename Config>
CF_DEVICE void backward_sm80(const BackwardParams& p) {
  CF_DYNAMIC_SHARED(memory);
  const FusedTiles<Config> t(memory);
  const int64 tiles = ceil_div(p.Nk, int64(Config::Bc));
  for (int64 task = blockIdx.x; task < p.tasks; task += gridDim.x) {
    const SplitTile at = split_tile(p, task, has_pieces<Config>() ? p.row_splits : 1, tiles, false);
    walk_pieces<Config>(p, at.split, [&](const RowPiece& piece) {
      fused_keys<Config>(p, t, at, piece, memory);
      ptx::sync_block("memory_free");                   // for the next piece or task
    });
  }
}

}  // namespace cf

// dk and dv without tensor cores and without atomics: a thread owns keys and walks the rows. Where
// each score has an element of dbias, it is written on the way.
#pragma once

#include "../attention/sums.cuh"
#include "../ptx/shared.cuh"
#include "rows.cuh"

namespace cf {

template <typename Config>
struct DkdvSimtTraits : RowTraits<Config> {
  static constexpr int smem_bytes =
      RowTraits<Config>::rows_bytes + (Config::dbias ? Config::Br * int(sizeof(uint64)) : 0);
  static_assert(Config::chunk % Config::together == 0, "a chunk must be whole steps");
  static_assert(Config::Br % Config::chunk == 0, "Br must be whole chunks");
  static_assert(Pieces<Config>::rows % Config::Br == 0, "a piece must be whole tiles");
};

// dk and dv of a thread's keys over some rows.
template <typename Config>
struct KeySums {
  using T = typename Config::element;
  static constexpr int K = RowTraits<Config>::K, d = Config::d, d_v = Config::d_v;
  T dk[K][d] = {}, dv[K][d_v] = {};

  CF_DEVICE void take(const KeySums& part) {
#pragma unroll
    for (int j = 0; j < K; ++j) {
#pragma unroll
      for (int c = 0; c < d; ++c) dk[j][c] += part.dk[j][c];
#pragma unroll
      for (int c = 0; c < d_v; ++c) dv[j][c] += part.dv[j][c];
    }
  }
};

// The keys of a thread, of which its block has those from key0 on.
template <typename Config>
struct OwnKeys {
  using T = typename Config::element;
  using Traits = DkdvSimtTraits<Config>;
  static constexpr int K = Traits::K, d = Config::d, d_v = Config::d_v;
  const BackwardParams& p;
  const RowTile<Config> t;
  const uint64* dbias;       // [Br]: where the rows begin in dbias; 0: nowhere
  const Scaling<T> scaling;
  int key0;
  T k[K][d], v[K][d_v];

  // Rows r ... r + n of the tile. hides: whether any may not see one of the keys.
  template <bool hides, int n>
  CF_DEVICE void add(KeySums<Config>& sums, int r0) const {
    constexpr int width = Traits::width;
    T x[n * width];
    load_pieces(x, t.records + r0 * width);
#pragma unroll
    for (int j = 0; j < K; ++j) {
      const int key = key0 + owned<Config>(j);
      Gradient<T> g[n];
      find_key_gradients<Config, hides>(g, x, t.rows + r0, key, k[j], v[j], p, scaling);
#pragma unroll
      for (int r = 0; r < n; ++r) {
        if constexpr (Config::dbias) write_dbias(r0 + r, key, g[r].dS);
        if (hides && g[r].S == -inf<T>()) continue;
        if constexpr (wants<Config>(DV)) {
#pragma unroll
          for (int c = 0; c < d_v; ++c) {
            sums.dv[j][c] = fma(g[r].P, x[r * width + d + c], sums.dv[j][c]);
          }
        }
        if constexpr (wants<Config>(DK)) {
#pragma unroll
          for (int c = 0; c < d; ++c) {
            sums.dk[j][c] = fma(g[r].dU, x[r * width + c], sums.dk[j][c]);
          }
        }
      }
    }
  }
  CF_DEVICE void write_dbias(int r, int key, T dS) const {
    if (dbias[r] != 0 && key < p.Nk) store(dbias[r] + key * p.dbias.c, p.dbias.kind, dS);
  }

  // All rows of the tile, in short sums of a chunk. If that is the tile, the others are seldom
  // needed.
  template <bool hides>
  CF_DEVICE void add_tile(KeySums<Config>& sums) const {
    if constexpr (Config::chunk == Config::Br) ptx::keep_in_memory(sums);
#pragma unroll 1
    for (int r0 = 0; r0 < Config::Br; r0 += Config::chunk) {
      KeySums<Config> part;
#pragma unroll 1
      for (int r = r0; r < r0 + Config::chunk; r += Config::together) {
        add<hides, Config::together>(part, r);
      }
      sums.take(part);
    }
  }
};

// A thread's keys of dk or dv: to the array, or a piece of the rows to the sums of a split.
template <typename Config, int columns, int K, typename T>
CF_DEVICE void store_keys(const BackwardParams& p, const Tensor& t, uint64 sums,
                          const SplitTile& tile, const RowPiece& piece, int64 kv_len,
                          const T (&x)[K][columns], T factor) {
  const int64 key0 = tile.tile * Config::Bc, head = tile.b * p.heads_k + tile.head_k;
  const uint64 base = head_address(t, tile.b, tile.head_k);
#pragma unroll
  for (int j = 0; j < K; ++j) {
    const int64 key = key0 + owned<Config>(j);
    if (key >= p.Nk) continue;
#pragma unroll
    for (int c = 0; c < columns; ++c) {
      // A key behind kv_len has been added to like one that all rows see.
      const T value = key < kv_len ? x[j][c] * factor : T(0);
      if constexpr (has_pieces<Config>()) {
        T& sum = at<T>(sums_of<T>(p, sums, columns, tile.split, head)
                       + (key * columns + c) * int64(sizeof(T)));
        sum = piece.first ? value : sum + value;
      } else {
        at<T>(base + key * t.n + c * t.c) = value;
      }
    }
  }
}

// dk and dv of a tile of keys over a piece of the rows.
template <typename Config>
CF_DEVICE void dkdv_keys(const BackwardParams& p, unsigned char* memory, const SplitTile& at,
                         const RowPiece& piece) {
  using T = typename Config::element;
  using Traits = DkdvSimtTraits<Config>;
  constexpr int Br = Config::Br, Bc = Config::Bc;
  const int64 key0 = at.tile * Bc;
  const Sequence s = open_sequence(p, at.b);
  const RowTile<Config> t(memory);
  uint64* const dbias = reinterpret_cast<uint64*>(t.rest);
  OwnKeys<Config> own = {p, t, dbias, scaling_of<Config>(p), int(key0), {}, {}};
  const int keys = int(min(s.kv_len - key0, int64(Bc)));       // that any row may see
#pragma unroll
  for (int j = 0; j < Traits::K; ++j) {
    const int64 key = key0 + owned<Config>(j);
    load_key(own.k[j], p.k, head_address(p.k, at.b, at.head_k), key, key < s.kv_len);
    load_key(own.v[j], p.v, head_address(p.v, at.b, at.head_k), key, key < s.kv_len);
  }
  const KeyBand band(p, s, key0, min(p.Nk - key0, int64(Bc)));
  // Each element of dbias is written, those of fully masked rows among them.
  const int64 first = Config::dbias ? piece.begin : max(band.first / Br * Br, piece.begin);
  const int64 end = Config::dbias ? piece.end : min(band.end, piece.end);
  KeySums<Config> sums;
#pragma unroll 1
  for (int64 row0 = first; row0 < end; row0 += Br) {
    const Rows rows = open_rows(p, at.b, at.head_k * p.group, p.group, row0,
                                int(min(end - row0, int64(Br))));
    const TileKeys seen(p, rows, 0, s.kv_len);
    ptx::sync_block("rows_read");
    t.load(p, rows, seen);
    if constexpr (Config::dbias) {
      for (int r = int(threadIdx.x); r < Br; r += Traits::threads) {
        dbias[r] = row0 + r < end ? rows.address(p.dbias, r) : 0;
      }
    }
    ptx::sync_block("rows_loaded");
    if (!changes_scores<Config>() && SeenKeys(seen, rows, 0, Br).all(int(key0), keys)) {
      own.template add_tile<false>(sums);
    } else {
      own.template add_tile<true>(sums);
    }
  }
  if constexpr (wants<Config>(DK)) {
    store_keys<Config>(p, p.dk, p.dk_sums, at, piece, s.kv_len, sums.dk, T(p.scale));
  }
  if constexpr (wants<Config>(DV)) {
    store_keys<Config>(p, p.dv, p.dv_sums, at, piece, s.kv_len, sums.dv, T(1));
  }
}

// Tasks: tiles of keys of a key head, each once per split of the rows.
template <typename Config>
CF_DEVICE void dkdv_simt(const BackwardParams& p) {
  CF_DYNAMIC_SHARED(memory);
  const int64 tiles = ceil_div(p.Nk, int64(Config::Bc));
  for (int64 task = blockIdx.x; task < p.tasks; task += gridDim.x) {
    const SplitTile at = split_tile(p, task, has_pieces<Config>() ? p.row_splits : 1, tiles, false);
    walk_pieces<Config>(p, at.split, [&](const RowPiece& piece) {
      dkdv_keys<Config>(p, memory, at, piece);
    });
  }
}

}  // namespace cf

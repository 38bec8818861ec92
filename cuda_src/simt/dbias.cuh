// The gradient of the bias without tensor cores, summed over the axes along which it was broadcast.
//
// A task owns one tile of dbias and walks everything that was added with it, so that each element
// has one writer and a fixed order of sums. A thread owns keys.
#pragma once

#include "rows.cuh"

namespace cf {

template <typename Config>
struct DbiasSimtTraits : RowTraits<Config> {
  using T = typename Config::element;
  static constexpr int smem_bytes =
      RowTraits<Config>::rows_bytes + Config::Br * Config::Bc * int(sizeof(T));      // + sums
  static_assert(has<Config>(BIAS), "there is no dbias without a bias");
};

// A tile of dbias: [Br, Bc], each element touched by the thread that owns the key.
template <typename Config>
struct DbiasTile {
  using Traits = DbiasSimtTraits<Config>;
  using T = typename Config::element;
  static constexpr int Br = Config::Br, Bc = Config::Bc, K = Traits::K;
  const BackwardParams& p;
  const RowTile<Config> t;
  T* sums;
  const Scaling<T> scaling;

  CF_DEVICE DbiasTile(const BackwardParams& p_, unsigned char* memory)
      : p(p_), t(memory), sums(reinterpret_cast<T*>(t.rest)), scaling(scaling_of<Config>(p_)) {}

  CF_DEVICE void clear() const {
#pragma unroll
    for (int j = 0; j < K; ++j) {
#pragma unroll 1
      for (int r = 0; r < Br; ++r) sums[r * Bc + owned<Config>(j)] = T(0);
    }
  }

  // sums += dS of the tile of rows and one of the thread's keys; dS is that behind the softcap.
  CF_DEVICE void add_key(int64 b, int64 head, int64 key, int column) const {
    constexpr int n = Config::together;
    T k[Config::d], v[Config::d_v];
    load_key(k, p.k, head_address(p.k, b, head / p.group), key, key < p.Nk);
    load_key(v, p.v, head_address(p.v, b, head / p.group), key, key < p.Nk);
#pragma unroll 1
    for (int r0 = 0; r0 < Br; r0 += n) {
      T x[n * Traits::width];
      load_pieces(x, t.records + r0 * Traits::width);
      Gradient<T> g[n];
      find_key_gradients<Config, true>(g, x, t.rows + r0, int(key), k, v, p, scaling);
#pragma unroll
      for (int r = 0; r < n; ++r) sums[(r0 + r) * Bc + column] += g[r].dS;
    }
  }

  // The rows and keys of one head that meet the tile at (row0, key0).
  CF_DEVICE void add_head(int64 b, int64 head, int64 row0, int64 key0) const {
    const int64 row_end = p.Nbias_q == 1 ? p.Nq : min(row0 + Br, p.Nq);
    const int64 key_end = p.Nbias_k == 1 ? p.Nk : min(key0 + Bc, p.Nk);
#pragma unroll 1
    for (int64 row = row0; row < row_end; row += Br) {
      const Rows rows = open_rows(p, b, head, 1, row, Br);
      const Range range = key_range(p, rows);
      ptx::sync_block("rows_read");
      t.load(p, rows, TileKeys(p, rows, 0, p.Nk));
      ptx::sync_block("rows_loaded");
#pragma unroll 1
      for (int64 key = key0; key < key_end; key += Bc) {
        if (key >= range.end || key + Bc <= range.first) continue;
#pragma unroll 1
        for (int j = 0; j < K; ++j) add_key(b, head, key + owned<Config>(j), owned<Config>(j));
      }
    }
  }

  // The sums, folded along the axes of length 1.
  CF_DEVICE void store_all(int64 b, int64 head, int64 row0, int64 key0) const {
    const int folded_rows = p.Nbias_q == 1 ? Br : 1, folded_keys = p.Nbias_k == 1 ? Bc : 1;
    const int rows = int(min(p.Nbias_q - row0, int64(Br)));
    const int keys = int(min(p.Nbias_k - key0, int64(Bc)));
    const uint64 base = head_address(p.dbias, b, head);
    for (int i = int(threadIdx.x); i < rows * keys; i += Traits::threads) {
      const int r = i / keys, j = i % keys;
      T total = T(0);
      for (int m = r; m < r + folded_rows; ++m) {
        T line = T(0);
        for (int n = j; n < j + folded_keys; ++n) line += sums[m * Bc + n];
        total += line;
      }
      store(base + (row0 + r) * p.dbias.n + (key0 + j) * p.dbias.c, p.dbias.kind, total);
    }
  }
};

// Tasks: tiles of dbias.
template <typename Config>
CF_DEVICE void dbias_simt(const BackwardParams& p) {
  CF_DYNAMIC_SHARED(memory);
  const DbiasTile<Config> tile(p, memory);
  const int64 tiles_q = ceil_div(p.Nbias_q, int64(Config::Br));
  const int64 tiles_k = ceil_div(p.Nbias_k, int64(Config::Bc));
  for (int64 task = blockIdx.x; task < p.tasks; task += gridDim.x) {
    const int64 key0 = task % tiles_k * Config::Bc;
    const int64 row0 = task / tiles_k % tiles_q * Config::Br;
    const int64 head = task / (tiles_k * tiles_q) % p.heads_bias;
    const int64 b = task / (tiles_k * tiles_q * p.heads_bias);
    tile.clear();
    for (int64 b_in = b; b_in < (p.batch_bias == 1 ? p.batch : b + 1); ++b_in) {
      for (int64 head_in = head; head_in < (p.heads_bias == 1 ? p.heads_q : head + 1); ++head_in) {
        tile.add_head(b_in, head_in, row0, key0);
      }
    }
    ptx::sync_block("sums_written");                    // by all threads
    tile.store_all(b, head, row0, key0);
    ptx::sync_block("sums_read");                       // the next task may clear them
  }
}

}  // namespace cf

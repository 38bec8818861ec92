// The gradient of the bias, summed over the axes along which it was broadcast.
//
// A task owns one tile of dbias and walks everything that was added with it, so that each element
// has one writer and a fixed order of sums. The scores are computed once more for it, which keeps
// the workspace O(1) for every shape of bias.
#pragma once

#include "gradient.cuh"

namespace cf {

template <typename Config>
struct DbiasWmmaTraits : GradientTraits<Config, Keeps::none> {
  using A = accumulator<typename Config::element>;
  static constexpr int smem_bytes = GradientTraits<Config, Keeps::none>::common_bytes
                                    + tile_bytes<A>(Config::Br, Config::Bc);               // + sums
  static_assert(has<Config>(BIAS), "there is no dbias without a bias");
};

// Shared memory of a block. sums: [Br, Bc], each element touched by the thread that owns the score.
template <typename Config>
struct DbiasTiles : GradientTiles<Config, Keeps::none> {
  using A = accumulator<typename Config::element>;
  A* sums;

  CF_DEVICE explicit DbiasTiles(unsigned char* memory)
      : GradientTiles<Config, Keeps::none>(memory) {
    sums = reinterpret_cast<A*>(this->rest);
  }
};

// sums = 0, or sums += dS of the products S and dP; dS is that behind the softcap.
template <typename Config>
CF_DEVICE void clear_sums(const DbiasTiles<Config>& t) {
  using A = accumulator<typename Config::element>;
  for (int r = Own<Config>::row(); r < Config::Br; r += Own<Config>::row_step) {
    for (int j = Own<Config>::column(); j < Config::Bc; j += Own<Config>::lanes) {
      t.sums[r * pitch<A>(Config::Bc) + j] = A(0);
    }
  }
}
template <typename Config>
CF_DEVICE void add_to_sums(const DbiasTiles<Config>& t, const BackwardParams& p, const Rows& rows,
                           int64 key0) {
  using A = accumulator<typename Config::element>;
  const Scaling<A> scaling = scaling_of<Config>(p);
  for (int r = Own<Config>::row(); r < Config::Br; r += Own<Config>::row_step) {
    const ScoreRow<A> row = open_gradient_row<Config, A>(p, rows, r, t.ranges[r]);
    for (int j = Own<Config>::column(); j < Config::Bc; j += Own<Config>::lanes) {
      const int at = r * pitch<A>(Config::Bc) + j;
      t.sums[at] += gradient_of<Config>(p, row, scaling, t.S[at], t.dP[at], t.lse[r], t.delta[r],
                                        int(key0) + j).dS;
    }
  }
}

// The rows and keys of one head that meet the tile of dbias at (row0, key0).
template <typename Config>
CF_DEVICE void add_head(const BackwardParams& p, const DbiasTiles<Config>& t, int64 b, int64 head,
                        int64 row0, int64 key0) {
  constexpr int Br = Config::Br, Bc = Config::Bc;
  const int64 row_end = p.Nbias_q == 1 ? p.Nq : min(row0 + Br, p.Nq);
  const int64 key_end = p.Nbias_k == 1 ? p.Nk : min(key0 + Bc, p.Nk);
  for (int64 row = row0; row < row_end; row += Br) {
    const Rows rows = open_rows(p, b, head, 1, row, Br);
    const Range range = key_range(p, rows);
    ptx::sync_block("rows_read");                       // those before
    load_state(t, p, rows);
    ptx::sync_block("lse_loaded");
    load_rows(t, p, rows);
    for (int64 key = key0; key < key_end; key += Bc) {
      if (key >= range.end || key + Bc <= range.first) continue;
      load_keys(t, p, b, head / p.group, key, 0, int(min(key_end - key, int64(Bc))));
      ptx::sync_block("tiles_loaded");                  // Q, dO, K, V
      multiply_scores(t);
      ptx::sync_block("products_written");              // S and dP
      add_to_sums(t, p, rows, key);
    }
  }
}

// The tile of dbias: sums, folded along the axes of length 1.
template <typename Config>
CF_DEVICE void store_sums(const BackwardParams& p, const DbiasTiles<Config>& t, int64 b, int64 head,
                          int64 row0, int64 key0) {
  using A = accumulator<typename Config::element>;
  const int folded_rows = p.Nbias_q == 1 ? Config::Br : 1;
  const int folded_keys = p.Nbias_k == 1 ? Config::Bc : 1;
  const int rows = int(min(p.Nbias_q - row0, int64(Config::Br)));
  const int keys = int(min(p.Nbias_k - key0, int64(Config::Bc)));
  const uint64 base = head_address(p.dbias, b, head);
  for (int i = int(threadIdx.x); i < rows * keys; i += 32 * Config::warps) {
    const int r = i / keys, j = i % keys;
    A total = A(0);
    for (int m = r; m < r + folded_rows; ++m) {
      A line = A(0);
      for (int n = j; n < j + folded_keys; ++n) line += t.sums[m * pitch<A>(Config::Bc) + n];
      total += line;
    }
    store(base + (row0 + r) * p.dbias.n + (key0 + j) * p.dbias.c, p.dbias.kind, total);
  }
}

// Tasks: tiles of dbias.
template <typename Config>
CF_DEVICE void dbias_wmma(const BackwardParams& p) {
  CF_DYNAMIC_SHARED(memory);
  const DbiasTiles<Config> t(memory);
  const int64 tiles_q = ceil_div(p.Nbias_q, int64(Config::Br));
  const int64 tiles_k = ceil_div(p.Nbias_k, int64(Config::Bc));
  for (int64 task = blockIdx.x; task < p.tasks; task += gridDim.x) {
    const int64 key0 = task % tiles_k * Config::Bc;
    const int64 row0 = task / tiles_k % tiles_q * Config::Br;
    const int64 head = task / (tiles_k * tiles_q) % p.heads_bias;
    const int64 b = task / (tiles_k * tiles_q * p.heads_bias);
    clear_sums(t);
    for (int64 b_in = b; b_in < (p.batch_bias == 1 ? p.batch : b + 1); ++b_in) {
      for (int64 head_in = head; head_in < (p.heads_bias == 1 ? p.heads_q : head + 1); ++head_in) {
        add_head(p, t, b_in, head_in, row0, key0);
      }
    }
    ptx::sync_block("sums_written");                    // by all threads
    store_sums(p, t, b, head, row0, key0);
    ptx::sync_block("sums_read");                       // the next task may clear them
  }
}

}  // namespace cf

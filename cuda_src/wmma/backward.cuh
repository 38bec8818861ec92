// The backward kernels: dk and dv by tiles of keys, dq by tiles of queries.
#pragma once

#include "gradient.cuh"

namespace cf {

template <typename Config>
struct DkdvWmmaTraits : GradientTraits<Config, Keeps::P_and_dS> {
  static constexpr int smem_bytes = GradientTraits<Config, Keeps::P_and_dS>::common_bytes;
};

template <typename Config>
struct DqWmmaTraits : GradientTraits<Config, Keeps::dS> {
  static constexpr int smem_bytes =
      GradientTraits<Config, Keeps::dS>::common_bytes + Config::Bc * int(sizeof(int));   // + seen
};

// dk and dv of the keys key0 ... key0 + Bc of one key head, over the rows of a piece that see any.
// Keys that nobody sees may hold NaN: their P and dS are 0 by selection, and K and V are only read
// for those two here.
template <typename Config>
CF_DEVICE void backward_keys(const BackwardParams& p,
                             const GradientTiles<Config, Keeps::P_and_dS>& t,
                             const Where<Config>& where, const SplitTile& at,
                             const RowPiece& piece) {
  using T = accumulator<typename Config::element>;
  const int64 b = at.b, head_k = at.head_k, key0 = at.tile * Config::Bc, split = at.split;
  constexpr int Br = Config::Br, Bc = Config::Bc, d = Config::d, d_v = Config::d_v;
  const int keys = int(min(p.Nk - key0, int64(Bc)));
  load_keys(t, p, b, head_k, key0, 0, keys);
  Accumulators<Config, Bc, d> dk;
  Accumulators<Config, Bc, d_v> dv;
  const Range queries = visible_queries(p, open_sequence(p, b), key0, key0 + keys);
  // From a whole tile on: the sums are then the same whether a mask or a range hides keys.
  int64 first = queries.first * p.group / Br * Br, end = queries.end * p.group;
  if constexpr (has_pieces<Config>()) {
    first = max(first, piece.begin);
    end = min(end, piece.end);
  }
  for (int64 row0 = first; row0 < end; row0 += Br) {
    const Rows rows = open_rows(p, b, head_k * p.group, p.group, row0, Br);
    load_state(t, p, rows);
    ptx::sync_block("lse_loaded");                      // and Q and dO may change
    load_rows(t, p, rows);
    ptx::sync_block("tiles_loaded");                    // K, V, Q, dO
    multiply_scores(t);
    ptx::sync_block("products_written");                // S and dP
    gradient_tile(t, p, rows, key0);
    ptx::sync_block("gradients_written");               // P and dS
    if constexpr (wants<Config>(DV)) {
      multiply<Br>(dv, transposed<Bc>(t.P), as_is<d_v>(t.dO));   // dV += P^T dO
    }
    if constexpr (wants<Config>(DK)) {
      multiply<Br>(dk, transposed<Bc>(t.dS), as_is<d>(t.Q));     // dK += dS^T Q
    }
  }
  const auto store_keys = [&](const Tensor& to, uint64 sums, int64 columns, const auto& acc,
                              T scale) {
    if constexpr (has_pieces<Config>()) {
      add_rows_to(sums_of<T>(p, sums, columns, split, b * p.heads_k + head_k), key0, keys,
                  int(columns), acc, where, scale, piece.first);
    } else {
      store_rows(key_block(p, to, head_address(to, b, head_k), key0, 0, keys, columns), acc, where,
                 Uniform<T>{scale});
    }
  };
  if constexpr (wants<Config>(DK)) store_keys(p.dk, p.dk_sums, p.d, dk, T(p.scale));
  if constexpr (wants<Config>(DV)) store_keys(p.dv, p.dv_sums, p.d_v, dv, T(1));
}

// Tasks: tiles of keys of a key head, each once per split of the rows.
template <typename Config>
CF_DEVICE void dkdv_wmma(const BackwardParams& p) {
  CF_DYNAMIC_SHARED(memory);
  const GradientTiles<Config, Keeps::P_and_dS> t(memory);
  const Where<Config> where = find_where<Config>(t.S);
  const int64 tiles = ceil_div(p.Nk, int64(Config::Bc));
  for (int64 task = blockIdx.x; task < p.tasks; task += gridDim.x) {
    const SplitTile at = split_tile(p, task, has_pieces<Config>() ? p.row_splits : 1, tiles, false);
    walk_pieces<Config>(p, at.split, [&](const RowPiece& piece) {
      backward_keys<Config>(p, t, where, at, piece);
    });
  }
}

// dq of the packed rows row0 ... row0 + Br of one key head, over all keys that any of them sees.
template <typename Config>
CF_DEVICE void backward_rows(const BackwardParams& p, const GradientTiles<Config, Keeps::dS>& t,
                             const Where<Config>& where, int64 b, int64 head_k, int64 row0) {
  using T = accumulator<typename Config::element>;
  constexpr int Br = Config::Br, Bc = Config::Bc, d = Config::d;
  int* const seen = reinterpret_cast<int*>(t.rest);
  const Rows rows = open_rows(p, b, head_k * p.group, p.group, row0, Br);
  load_state(t, p, rows);
  ptx::sync_block("lse_loaded");
  load_rows(t, p, rows);
  Accumulators<Config, Br, d> dq;
  const Range range = key_range(p, rows);
  for (int64 key0 = range.first / Bc * Bc; key0 < range.end; key0 += Bc) {
    const int begin = int(max(range.first - key0, int64(0)));
    const int keys = int(min(range.end - key0, int64(Bc)));
    load_keys(t, p, b, head_k, key0, begin, keys);
    ptx::sync_block("tiles_loaded");                    // Q, dO, K, V
    multiply_scores(t);
    ptx::sync_block("products_written");                // S and dP
    gradient_tile(t, p, rows, key0);
    ptx::sync_block("dS_written");                      // and S, to see hidden keys
    if constexpr (hides_any<Config>()) {
      find_seen_keys<Config>(seen, t.S, rows.rows, keys);
      ptx::sync_block("seen_found");
      forget_unseen_keys<Config, d>(t.K, seen, keys);
      ptx::sync_block("K_cleaned");
    }
    multiply<Bc>(dq, as_is<Bc>(t.dS), as_is<d>(t.K));                  // dQ += dS K
    ptx::sync_block("tiles_read");                      // K, V, delta
  }
  for (int r = int(threadIdx.x); r < Br; r += 32 * Config::warps) {
    t.delta[r] = t.lse[r] != inf<T>() ? T(p.scale) : T(0);       // no gradient where no key is seen
  }
  ptx::sync_block("factors_written");
  const int count = int(min(p.group * p.Nq - row0, int64(Br)));
  store_rows(RowBlock{p.dq, rows.base(p.dq), rows.packed, 0, count, int(p.d), 0}, dq, where,
             t.delta);
}

// Tasks: tiles of query rows of a key head.
template <typename Config>
CF_DEVICE void dq_wmma(const BackwardParams& p) {
  CF_DYNAMIC_SHARED(memory);
  const GradientTiles<Config, Keeps::dS> t(memory);
  const Where<Config> where = find_where<Config>(t.S);
  const int64 tiles = ceil_div(p.group * p.Nq, int64(Config::Br));
  for (int64 task = blockIdx.x; task < p.tasks; task += gridDim.x) {
    const SplitTile at = split_tile(p, task, 1, tiles, true);
    backward_rows<Config>(p, t, where, at.b, at.head_k, at.tile * Config::Br);
    ptx::sync_block("memory_free");                     // for the next task
  }
}

}  // namespace cf

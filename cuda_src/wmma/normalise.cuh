// The normalisers of rows with a large lse: the sums of the forward pass once more, without values.
#pragma once

#include "../attention/gradient.cuh"
#include "forward.cuh"

namespace cf {

template <typename Config>
struct NormaliseTraits : ForwardWmmaTraits<Config> {};

// lse and 0 for each row of the tile; whether one of them is large.
template <typename Config>
CF_DEVICE bool keep_lse(const BackwardParams& p, const Rows& rows) {
  using T = accumulator<typename Config::element>;
  bool large = false;
  for (int r = int(threadIdx.x); r < rows.rows; r += 32 * Config::warps) {
    const T lse = at<const T>(rows.address(p.lse, r));
    at<Normaliser<T>>(normaliser_address<T>(p, rows, r)) = {lse, T(0)};
    large = large || needs_sums<Config>(p, rows.head0 + rows.packed.head(r), lse);
  }
  return ptx::sync_block_or(large, "some_large");       // and the memory is free
}

// What the sums of those rows say.
template <typename Config>
CF_DEVICE void keep_sums(const BackwardParams& p, const Rows& rows,
                         const Statistics<Config>& state) {
  using T = accumulator<typename Config::element>;
#pragma unroll
  for (int i = 0; i < Own<Config>::rows; ++i) {
    const int r = Own<Config>::row() + i * Own<Config>::row_step;
    if (r >= rows.rows || Own<Config>::column() != 0) continue;
    const T lse = at<const T>(rows.address(p.lse, r));
    const int64 head = rows.head0 + rows.packed.head(r);
    if (!needs_sums<Config>(p, head, lse)) continue;
    at<Normaliser<T>>(normaliser_address<T>(p, rows, r)) =
        normaliser_from<Config>(p, head, lse, state.m[i], state.l[i]);
  }
}

// The packed rows row0 ... row0 + Br of one key head.
template <typename Config>
CF_DEVICE void normalise_tile(const BackwardParams& p, const ForwardWmmaTiles<Config>& t, int64 b,
                              int64 head_k, int64 row0) {
  constexpr int Bc = Config::Bc;
  using T = accumulator<typename Config::element>;
  const Rows rows = open_rows(p, b, head_k * p.group, p.group, row0, Config::Br);
  if (!keep_lse<Config>(p, rows)) return;
  load_tile<Config, Config::Br, Config::d>(t.Q, query_block(p, p.q, rows, p.d));
  find_ranges<Config>(t.ranges, p, rows);
  const uint64 k_base = head_address(p.k, b, head_k);
  Statistics<Config> state;
  const Range range = key_range(p, rows);
  for (int64 key0 = range.first / Bc * Bc; key0 < range.end; key0 += Bc) {
    const int begin = int(max(range.first - key0, int64(0)));
    const int keys = int(min(range.end - key0, int64(Bc)));
    load_tile<Config, Bc, Config::d>(t.K, key_block(p, p.k, k_base, key0, begin, keys, p.d));
    ptx::sync_block("tiles_loaded");                    // Q, K and ranges
    multiply_into<Config::d, Config::Br, Bc, Config>(t.S, as_is<Config::d>(t.Q),
                                                     transposed<Config::d>(t.K));
    ptx::sync_block("scores_written");                  // and K may change
    score_tile<Config>(t, p, rows, key0);
    softmax_tile<Config>(t, state, T(0));               // a thread's own scores
  }
  keep_sums<Config>(p, rows, state);
}

// Tasks: tiles of packed rows of a key head.
template <typename Config>
CF_DEVICE void normalise(const BackwardParams& p) {
  CF_DYNAMIC_SHARED(memory);
  const ForwardWmmaTiles<Config> t(memory);
  const int64 tiles = ceil_div(p.group * p.Nq, int64(Config::Br));
  for (int64 task = blockIdx.x; task < p.tasks; task += gridDim.x) {
    const int64 tile = task % tiles, sequence = task / tiles;
    normalise_tile<Config>(p, t, sequence / p.heads_k, sequence % p.heads_k, tile * Config::Br);
  }
}

}  // namespace cf

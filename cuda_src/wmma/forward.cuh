// The forward kernel. Dao, "FlashAttention-2" (2023), algorithm 1.
#pragma once

#include "../attention/schedule.cuh"
#include "softmax.cuh"
#include "store.cuh"

namespace cf {

template <typename Config>
struct ForwardWmmaTraits {
  using T = typename Config::element;
  using A = accumulator<T>;
  static constexpr int side = ptx::Wmma<T>::side;
  static constexpr int threads = 32 * Config::warps;
  static constexpr bool own_P = sizeof(T) < sizeof(A);  // otherwise P takes the place of S
  static constexpr int smem_bytes =
      tile_bytes<T>(Config::Br, Config::d) + tile_bytes<T>(Config::Bc, Config::d)
      + tile_bytes<T>(Config::Bc, Config::d_v) + tile_bytes<A>(Config::Br, Config::Bc)
      + (own_P ? tile_bytes<T>(Config::Br, Config::Bc) : 0) + Config::Br * int(sizeof(A))
      + Config::Br * int(sizeof(KeyRange)) + Config::Bc * int(sizeof(int));
  static_assert(Config::d % 16 == 0 && Config::d_v % 16 == 0, "d and d_v must be multiples of 16");
  static_assert(Config::Br % side == 0, "Br must be a multiple of 16, of 8 in float64");
  static_assert(Config::Bc % side == 0, "Bc must be a multiple of 16, of 8 in float64");
};

// Shared memory of a block.
template <typename Config>
struct ForwardWmmaTiles {
  using T = typename Config::element;
  using A = accumulator<T>;
  T* Q;        // [Br, d]
  T* K;        // [Bc, d]
  T* V;        // [Bc, d_v]
  A* S;        // [Br, Bc]
  T* P;        // [Br, Bc], in S where both have one type
  A* alpha;    // [Br]
  KeyRange* ranges;  // [Br]
  int* seen;   // [Bc]

  CF_DEVICE explicit ForwardWmmaTiles(unsigned char* memory) {
    Carver carver{memory};
    Q = carver.take<T>(tile_bytes<T>(Config::Br, Config::d));
    K = carver.take<T>(tile_bytes<T>(Config::Bc, Config::d));
    V = carver.take<T>(tile_bytes<T>(Config::Bc, Config::d_v));
    S = carver.take<A>(tile_bytes<A>(Config::Br, Config::Bc));
    P = reinterpret_cast<T*>(S);
    if constexpr (ForwardWmmaTraits<Config>::own_P) {
      P = carver.take<T>(tile_bytes<T>(Config::Br, Config::Bc));
    }
    alpha = carver.take<A>(Config::Br * int(sizeof(A)));
    ranges = carver.take<KeyRange>(Config::Br * int(sizeof(KeyRange)));
    seen = carver.take<int>(Config::Bc * int(sizeof(int)));
  }
};

// S: q.k -> scores, for the keys key0 ... of this tile.
template <typename Config>
CF_DEVICE void score_tile(const ForwardWmmaTiles<Config>& t, const Params& p, const Rows& rows,
                          int64 key0) {
  using T = accumulator<typename Config::element>;
  const Scaling<T> scaling = scaling_of<Config>(p);
  for (int r = Own<Config>::row(); r < Config::Br; r += Own<Config>::row_step) {
    const ScoreRow<T> row = open_score_row<Config, T>(p, rows, r, t.ranges[r]);
    T* line = t.S + r * pitch<T>(Config::Bc);
    for (int j = Own<Config>::column(); j < Config::Bc; j += Own<Config>::lanes) {
      const OneScore<T, ScoreRow<T>> view = {row, int(key0) + j};
      finish_scores<Config>(line[j], view, p, scaling, [](int, T) {});
      hide_keys(line[j], view, -inf<T>());
    }
  }
}

// S -> P and alpha for all rows of the tile.
template <typename Config, typename T>
CF_DEVICE void softmax_tile(const ForwardWmmaTiles<Config>& t, Statistics<Config>& state, T lazy) {
#pragma unroll
  for (int i = 0; i < Own<Config>::rows; ++i) {
    const int r = Own<Config>::row() + i * Own<Config>::row_step;
    if (r >= Config::Br) continue;                      // the same in a whole warp
    const T alpha = softmax_step<Config>(t.S + r * pitch<T>(Config::Bc),
                                         t.P + r * pitch<typename Config::element>(Config::Bc),
                                         state.m[i], state.l[i], lazy);
    if (Own<Config>::column() == 0) t.alpha[r] = alpha;
  }
}

// lse, and 1 / l into t.alpha; 0 for rows that see no key and rows behind q_lens.
template <typename Config>
CF_DEVICE void finish_rows(const ForwardParams& p, const ForwardWmmaTiles<Config>& t,
                           const Rows& rows, const Statistics<Config>& state, int64 split,
                           int count) {
  using T = accumulator<typename Config::element>;
#pragma unroll
  for (int i = 0; i < Own<Config>::rows; ++i) {
    const int r = Own<Config>::row() + i * Own<Config>::row_step;
    if (r >= count || Own<Config>::column() != 0) continue;
    const RowEnd<T> end = finish_row<Config>(p, rows.head0 + rows.packed.head(r), r < rows.rows,
                                             state.m[i], state.l[i]);
    t.alpha[r] = end.factor;
    store_end(p, rows, r, split, end);
  }
}

// The packed rows row0 ... row0 + Br of one key head, over the keys of one split.
template <typename Config>
CF_DEVICE void forward_tile(const ForwardParams& p, const ForwardWmmaTiles<Config>& t,
                            const Where<Config>& where, const SplitTile& at) {
  using T = accumulator<typename Config::element>;
  const int64 b = at.b, head_k = at.head_k, row0 = at.tile * Config::Br, split = at.split;
  const Rows rows = open_rows(p, b, head_k * p.group, p.group, row0, Config::Br);
  load_tile<Config, Config::Br, Config::d>(t.Q, query_block(p, p.q, rows, p.d));
  find_ranges<Config>(t.ranges, p, rows);
  const uint64 k_base = head_address(p.k, b, head_k), v_base = head_address(p.v, b, head_k);
  Accumulators<Config, Config::Br, Config::d_v> acc;
  Statistics<Config> state;
  const Range range = key_range(p, rows);
  const int64 first = max(range.first, split * p.split_keys);
  const int64 last = min(range.end, (split + 1) * p.split_keys);
  // From a whole tile on: the sums are then the same whether a mask or a range hides keys.
  for (int64 key0 = first / Config::Bc * Config::Bc; key0 < last; key0 += Config::Bc) {
    const int begin = int(max(first - key0, int64(0)));
    const int keys = int(min(last - key0, int64(Config::Bc)));
    load_tile<Config, Config::Bc, Config::d>(
        t.K, key_block(p, p.k, k_base, key0, begin, keys, p.d));
    load_tile<Config, Config::Bc, Config::d_v>(
        t.V, key_block(p, p.v, v_base, key0, begin, keys, p.d_v));
    ptx::sync_block("tiles_loaded");                    // Q, K, V and ranges
    multiply_into<Config::d, Config::Br, Config::Bc, Config>(t.S, as_is<Config::d>(t.Q),
                                                             transposed<Config::d>(t.K));
    ptx::sync_block("scores_written");
    score_tile<Config>(t, p, rows, key0);
    if constexpr (hides_any<Config>()) {
      ptx::sync_block("scores_finished");
      find_seen_keys<Config>(t.seen, t.S, rows.rows, keys);
      ptx::sync_block("seen_found");                    // and S may change
      forget_unseen_keys<Config, Config::d_v>(t.V, t.seen, keys);
    }
    softmax_tile<Config>(t, state, T(p.lazy));
    ptx::sync_block("P_written");                       // and alpha
    scale_rows(acc, where, t.alpha);
    multiply<Config::Bc>(acc, as_is<Config::Bc>(t.P), as_is<Config::d_v>(t.V));   // acc += P V
    ptx::sync_block("V_read");                          // and alpha
  }
  const int count = int(min(p.group * p.Nq - row0, int64(Config::Br)));
  const Tensor out = split_out<T>(p, split);
  finish_rows<Config>(p, t, rows, state, split, count);
  ptx::sync_block("l_written");
  store_rows(RowBlock{out, rows.base(out), rows.packed, 0, count, int(p.d_v), 0}, acc, where,
             t.alpha);
}

// Tasks: tiles of query rows of a key head, each once per split of the keys.
template <typename Config>
CF_DEVICE void forward_wmma(const ForwardParams& p) {
  CF_DYNAMIC_SHARED(memory);
  const ForwardWmmaTiles<Config> t(memory);
  const Where<Config> where = find_where<Config>(t.S);
  const int64 tiles = ceil_div(p.group * p.Nq, int64(Config::Br));
  for (int64 task = blockIdx.x; task < p.tasks; task += gridDim.x) {
    const SplitTile at = split_tile(p, task, p.splits, tiles, true);
    forward_tile<Config>(p, t, where, at);
    ptx::sync_block("memory_free");                     // for the next task
  }
}

}  // namespace cf

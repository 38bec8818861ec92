// The forward kernel without tensor cores, for heads so narrow that these would multiply zeros. A
// thread owns whole rows; no thread shares anything but keys with another.
// Dao, "FlashAttention-2" (2023), algorithm 1.
#pragma once

#include "softmax.cuh"

namespace cf {

template <typename Config>
struct ForwardSimtTraits : KeyTraits<Config, true> {};

// out and lse of the thread's rows; those that see nothing, and those behind q_lens, become 0.
template <typename Config, int R, typename T>
CF_DEVICE void store_sums(const ForwardParams& p, const Rows& rows, int64 split,
                          const LongRowSums<T, Config::d_v> (&sums)[R]) {
  const int count = int(min(p.group * p.Nq - rows.row0, int64(Config::Br)));
  const Tensor out = split_out<T>(p, split);
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int r = owned<Config>(i);
    if (r >= count) continue;
    const T m = Config::scaled ? sums[i].m : ptx::multiply(T(p.scale), sums[i].m);
    const RowEnd<T> end = finish_row<Config>(p, rows.head0 + rows.packed.head(r), r < rows.rows, m,
                                             sums[i].l.value());
    store_end(p, rows, r, split, end);
    const uint64 row = rows.address(out, r);
#pragma unroll
    for (int c = 0; c < Config::d_v; ++c) {
      at<T>(row + c * out.c) = end.factor != T(0) ? sums[i].acc[c].value() * end.factor : T(0);
    }
  }
}

// Tasks: tiles of query rows of a key head, each once per split of the keys.
template <typename Config>
CF_DEVICE void forward_simt(const ForwardParams& p) {
  using T = typename Config::element;
  constexpr int R = ForwardSimtTraits<Config>::R;
  CF_DYNAMIC_SHARED(memory);
  T* const tile = reinterpret_cast<T*>(memory);
  const int64 tiles = ceil_div(p.group * p.Nq, int64(Config::Br));
  for (int64 i = blockIdx.x; i < p.tasks; i += gridDim.x) {
    const SplitTile at = split_tile(p, i, p.splits, tiles, true);
    RowTask task(p, open_rows(p, at.b, at.head_k * p.group, p.group, at.tile * Config::Br,
                              Config::Br),
                 at.split * p.split_keys, (at.split + 1) * p.split_keys, Config::Br, at.head_k);
    ptx::keep_in_memory(task);
    LongRowSums<T, Config::d_v> sums[R];
    sum_over_keys<Config>(sums, p, task, tile, [&](int j, const KeyRange& range) {
      return open_score_row<Config, T>(p, task.rows, owned<Config>(j), range);
    });
    store_sums<Config>(p, task.rows, at.split, sums);
  }
}

}  // namespace cf

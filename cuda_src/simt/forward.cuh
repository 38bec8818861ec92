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

template <typename Config>
CF_DEVICE void forward_simt(const ForwardParams& p) {
  using T = typename Config::element;
  constexpr int R = ForwardSimtTraits<Config>::R;
  CF_DYNAMIC_SHARED(memory);
  T* const tile = reinterpret_cast<T*>(memory);
  for_each_task<Config>(p, p.splits, p.split_keys, [&](const RowTask& task, int64 split) {
    LongRowSums<T, Config::d_v> sums[R];
    sum_over_keys<Config>(sums, p, task, tile, [&](int j, const KeyRange& range) {
      return open_score_row<Config, T>(p, task.rows, owned<Config>(j), range);
    });
    store_sums<Config>(p, task.rows, split, sums);
  });
}

}  // namespace cf

// The normalisers of rows with a large lse: the sums of the forward pass once more, without values.
#pragma once

#include "../attention/gradient.cuh"
#include "softmax.cuh"

namespace cf {

template <typename Config>
struct NormaliseSimtTraits : KeyTraits<Config, false> {};

// The normaliser of the thread's rows: lse as it is, and what the sums say where it is large.
template <typename Config>
CF_DEVICE void normalise_rows(const BackwardParams& p, const RowTask& task,
                              typename Config::element* tile) {
  using T = typename Config::element;
  constexpr int R = NormaliseSimtTraits<Config>::R;
  const Rows& rows = task.rows;
  bool large = false;
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int r = owned<Config>(i);
    if (r >= rows.rows) continue;
    const T lse = at<const T>(rows.address(p.lse, r));
    at<Normaliser<T>>(normaliser_address<T>(p, rows, r)) = {lse, T(0)};
    large = large || needs_sums<Config>(p, rows.head0 + rows.packed.head(r), lse);
  }
  if (!ptx::sync_block_or(large, "some_large")) return;
  LongRowSums<T, 0> sums[R];
  sum_over_keys<Config>(sums, p, task, tile, [&](int j, const KeyRange& range) {
    return open_score_row<Config, T>(p, rows, owned<Config>(j), range);
  });
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int r = owned<Config>(i);
    if (r >= rows.rows) continue;
    const T lse = at<const T>(rows.address(p.lse, r));
    const int64 head = rows.head0 + rows.packed.head(r);
    if (!needs_sums<Config>(p, head, lse)) continue;
    at<Normaliser<T>>(normaliser_address<T>(p, rows, r)) =
        normaliser_from<Config>(p, head, lse, sums[i].m, sums[i].l.value());
  }
}

template <typename Config>
CF_DEVICE void normalise_simt(const BackwardParams& p) {
  using T = typename Config::element;
  static_assert(Config::scaled, "m is that of scores");
  CF_DYNAMIC_SHARED(memory);
  for_each_task<Config>(p, 1, p.Nk, [&](const RowTask& task, int64) {
    normalise_rows<Config>(p, task, reinterpret_cast<T*>(memory));
  });
}

}  // namespace cf

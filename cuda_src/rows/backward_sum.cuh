// dk and dv from their sums over the splits of the rows.
#pragma once

#include "../convert.cuh"
#include "../attention/workspace.cuh"

namespace cf {

template <typename Config>
struct BackwardSumTraits {
  static constexpr int threads = 32 * Config::warps;
  static constexpr int smem_bytes = 0;
  static_assert(Config::Br == Config::warps, "backward_sum has a warp a key: Br must be warps");
};

// One key of dk or dv: the sums of its splits, in chains of 32, in their order.
template <typename T>
CF_DEVICE void sum_splits(const BackwardParams& p, const Tensor& t, uint64 sums, int64 columns,
                          int64 head, int64 key) {
  const uint64 to = t.address + head / p.heads_k * t.b + head % p.heads_k * t.h + key * t.n;
  for (int64 c = int(threadIdx.x) % 32; c < columns; c += 32) {
    T total = T(0);
    for (int64 s0 = 0; s0 < p.row_splits; s0 += 32) {
      T part = T(0);
      for (int64 s = s0; s < min(s0 + 32, p.row_splits); ++s) {
        const uint64 from = sums_of<T>(p, sums, columns, s, head);
        part += at<const T>(from + (key * columns + c) * int64(sizeof(T)));
      }
      total += part;
    }
    store(to + c * t.c, t.kind, total);
  }
}

// Tasks: Br keys, one per warp.
template <typename Config>
CF_DEVICE void backward_sum(const BackwardParams& p) {
  using T = accumulator<typename Config::element>;
  const int64 keys = p.batch * p.heads_k * p.Nk;
  for (int64 task = blockIdx.x; task < p.tasks; task += gridDim.x) {
    const int64 i = task * Config::Br + int(threadIdx.x) / 32;
    if (i >= keys) continue;                            // the same in a whole warp
    if (p.dk_sums != 0) sum_splits<T>(p, p.dk, p.dk_sums, p.d, i / p.Nk, i % p.Nk);
    if (p.dv_sums != 0) sum_splits<T>(p, p.dv, p.dv_sums, p.d_v, i / p.Nk, i % p.Nk);
  }
}

}  // namespace cf

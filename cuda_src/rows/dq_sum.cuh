// dq from its sums over the splits of the keys.
#pragma once

#include "../attention/workspace.cuh"

namespace cf {

template <typename Config>
struct DqSumTraits {
  static constexpr int threads = 32 * Config::warps;
  static constexpr int smem_bytes = 0;
};

// Tasks: as many elements as a block has threads; each is summed in the order of the splits.
template <typename Config>
CF_DEVICE void dq_sum(const DqParams& p) {
  using T = accumulator<typename Config::element>;
  constexpr int threads = DqSumTraits<Config>::threads;
  const int64 elements = p.batch * p.heads_q * p.Nq * p.d;
  const T* const parts = reinterpret_cast<const T*>(p.dq_parts);
  for (int64 task = blockIdx.x; task < p.tasks; task += gridDim.x) {
    const int64 i = task * threads + int(threadIdx.x);
    if (i >= elements) continue;
    T total = T(0);
    for (int64 s0 = 0; s0 < p.key_splits; s0 += 32) {
      T part = T(0);
      for (int64 s = s0; s < min(s0 + 32, p.key_splits); ++s) part += parts[s * elements + i];
      total += part;
    }
    const int64 row = i / p.d, head = row / p.Nq;
    at<T>(head_address(p.dq, head / p.heads_q, head % p.heads_q) + row % p.Nq * p.dq.n
          + i % p.d * p.dq.c) = total;
  }
}

}  // namespace cf

// delta = rowsum(dO * O) - dlse, once for all kernels of the backward pass.
#pragma once

#include "../convert.cuh"

namespace cf {

template <typename Config>
struct DeltaTraits {
  static constexpr int threads = 32 * Config::warps;
  static constexpr int smem_bytes = 0;
  static_assert(Config::Br == Config::warps, "delta has a warp a row: Br must be warps");
};

// Address of a row's delta. The rows of a sequence stand side by side, whatever strides q has.
template <typename T>
CF_DEVICE uint64 delta_address(const BackwardParams& p, int64 b, int64 head, int64 i) {
  return p.delta + ((b * p.heads_q + head) * p.Nq + i) * int64(sizeof(T));
}

// Sum over the lanes of a warp.
template <typename T>
CF_DEVICE T warp_sum(T x) {
  for (int step = 1; step < 32; step *= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, step);
  return x;
}

// Tasks: Br rows, one per warp. dO is rounded as in the products: that shifts all dP of a row
// alike, and cancels in dP - delta only if delta is made of the same numbers.
template <typename Config>
CF_DEVICE void delta(const BackwardParams& p) {
  using T = accumulator<typename Config::element>;
  const int64 rows = p.batch * p.heads_q * p.Nq;
  const int lane = int(threadIdx.x) % 32;
  for (int64 task = blockIdx.x; task < p.tasks; task += gridDim.x) {
    const int64 row = task * Config::Br + int(threadIdx.x) / 32;
    if (row >= rows) continue;                          // the same in a whole warp
    const int64 i = row % p.Nq, head = row / p.Nq % p.heads_q, b = row / (p.Nq * p.heads_q);
    const uint64 out = p.out.address + b * p.out.b + head * p.out.h + i * p.out.n;
    const uint64 dout = p.dout.address + b * p.dout.b + head * p.dout.h + i * p.dout.n;
    T sum = T(0);
    for (int c = lane; c < p.d_v; c += 32) {
      const T dO = widen(to_operand<Config>(load<T>(dout + c * p.dout.c, p.dout.kind)));
      sum += load<T>(out + c * p.out.c, p.out.kind) * dO;
    }
    sum = warp_sum(sum);
    if (lane != 0) continue;
    if (p.dlse.address != 0) {
      sum -= at<const T>(p.dlse.address + b * p.dlse.b + head * p.dlse.h + i * p.dlse.n);
    }
    at<T>(delta_address<T>(p, b, head, i)) = sum;
  }
}

}  // namespace cf

// Merging the splits of the keys: the same sums as cupy_flash.merge, in the order of the splits.
#pragma once

#include "../attention/softmax.cuh"

namespace cf {

template <typename Config>
struct CombineTraits {
  static constexpr int threads = 32 * Config::warps;
  static constexpr int smem_bytes = 0;
  static_assert(Config::Br == Config::warps, "combine has a warp a row: Br must be warps");
};

// Tasks: Br rows, one per warp. l = sum exp(m_s - m) l_s; out = sum exp(m_s - m) l_s / l out_s.
template <typename Config>
CF_DEVICE void combine(const ForwardParams& p) {
  using T = accumulator<typename Config::element>;
  const int64 rows = p.batch * p.heads_q * p.Nq;
  const int lane = int(threadIdx.x) % 32;
  const T* const out_partial = reinterpret_cast<const T*>(p.out_partial);   // [splits, rows, d_v]
  const T* const m_partial = reinterpret_cast<const T*>(p.lse_partial);     // [splits, rows]
  const T* const l_partial = reinterpret_cast<const T*>(p.l_partial);       // [splits, rows]
  for (int64 task = blockIdx.x; task < p.tasks; task += gridDim.x) {
    const int64 row = task * Config::Br + int(threadIdx.x) / 32;
    if (row >= rows) continue;
    T m = -inf<T>();
    for (int64 s = 0; s < p.splits; ++s) {
      const T m_s = m_partial[s * rows + row];
      m = m_s > m || m_s != m_s ? m_s : m;              // a NaN stays
    }
    const T m_ref = reference_of(m);
    T l = T(0);
    for (int64 s = 0; s < p.splits; ++s) {
      l += exp(m_partial[s * rows + row] - m_ref) * l_partial[s * rows + row];
    }
    const int64 i = row % p.Nq, head = row / p.Nq % p.heads_q, b = row / (p.Nq * p.heads_q);
    const RowEnd<T> end = close_row<Config>(p, head, i < length(p.q_lens, b, p.Nq), m, l);
    const uint64 out = head_address(p.out, b, head) + i * p.out.n;
    for (int64 c = lane; c < p.d_v; c += 32) {
      T total = T(0);
      for (int64 s = 0; s < p.splits; ++s) {
        const int64 at = s * rows + row;
        total += exp(m_partial[at] - m_ref) * l_partial[at] * out_partial[at * p.d_v + c];
      }
      store(out + c * p.out.c, p.out.kind, total * end.factor);
    }
    if (lane == 0 && p.lse.address != 0) {
      at<T>(head_address(p.lse, b, head) + i * p.lse.n) = end.lse();
    }
  }
}

}  // namespace cf

// All kinds of products by a warpgroup, on tiles that the TMA unit loads: a unit to test alone.
#pragma once

#include "ptx/wgmma_columns.cuh"

namespace cf {

struct WgmmaParams {
  TensorMap a_map, b_map, v_map;   // of A [64, 64], B [N, 64], V [N, M]: boxes of whole panels
  uint64 S, out;                   // float32 [64, N]: S = A B^T; [64, M]: S, rounded, times V
  uint64 across;                   // float32 [64, 64]: B^T times the first 64 columns of V
  uint64 plain, copied;            // float32 [32]: `copied` is to be `plain`
};

// Shared memory: barrier, then A, B and V in panels.
// x[i] of each thread of the warpgroup into a matrix of 2 n columns.
template <int n>
CF_DEVICE void store_sums(uint64 to, const float (&x)[n]) {
  const int t = int(threadIdx.x);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const int row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8;
    const int column = i / 4 * 8 + t % 4 * 2 + i % 2;
    reinterpret_cast<float*>(to)[row * 2 * n + column] = x[i];
  }
}

template <typename T, int N, int M>
CF_DEVICE void wgmma_products(const WgmmaParams& p) {
  CF_DYNAMIC_SHARED(memory);
  const SmemAddress barrier = ptx::smem_address(memory);
  const SmemAddress A = barrier + PANEL_ALIGNMENT, B = A + panels_bytes(64, 64);
  const SmemAddress V = B + panels_bytes(N, 64);
  if (threadIdx.x == 0) {
    ptx::barrier_init(barrier, 1);
    ptx::barriers_ready();
    ptx::barrier_expect(barrier, panels_bytes(64, 64) + panels_bytes(N, 64) + panels_bytes(N, M)
                                     + 128);
    ptx::load_bytes(barrier + 128, p.plain, 128, barrier);
    ptx::load_box(A, p.a_map, barrier, 0, 0, 0, 0);
    ptx::load_box(B, p.b_map, barrier, 0, 0, 0, 0);
    for (int i = 0; i < ceil_div(M, PANEL); ++i) {
      ptx::load_box(V + i * N * PANEL_ROW_BYTES, p.v_map, barrier, i * PANEL, 0, 0, 0);
    }
  }
  ptx::sync_block("barrier_ready");
  ptx::barrier_wait(barrier, 0, "all");
  const ptx::Descriptor a(A, 64), b(B, N), v(V, N);
  float S[N / 2], acc[M / 2] = {};
  ptx::settle(acc);
  ptx::products_begin();
#pragma unroll
  for (int i = 0; i < 4; ++i) ptx::Wgmma<T, N>::rows(S, a.at(32 * i), b.at(32 * i), i > 0);
  ptx::products_commit();
  ptx::products_wait<0>();
  ptx::settle(S);
  store_sums(p.S, S);
  uint32 P[N / 16][4];
#pragma unroll
  for (int i = 0; i < N / 16; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) P[i][j] = ptx::pack<T>(S[8 * i + 2 * j], S[8 * i + 2 * j + 1]);
  }
  ptx::products_begin();
#pragma unroll
  for (int i = 0; i < N / 16; ++i) {
    ptx::Wgmma<T, M>::columns(acc, P[i], v.at(16 * PANEL_ROW_BYTES * i), 1);
  }
  ptx::products_commit();
  ptx::products_wait<0>();
  ptx::settle(acc);
  store_sums(p.out, acc);
  float across[32];
  ptx::products_begin();
#pragma unroll
  for (int i = 0; i < N / 16; ++i) {
    const int bytes = 16 * PANEL_ROW_BYTES * i;
    ptx::multiply_columns(T(), across, b.at(bytes), v.at(bytes), i > 0);
  }
  ptx::products_commit();
  ptx::products_wait<0>();
  ptx::settle(across);
  store_sums(p.across, across);
  if (threadIdx.x < 32) {
    reinterpret_cast<float*>(p.copied)[threadIdx.x] =
        reinterpret_cast<const float*>(memory + 128)[threadIdx.x];
  }
}

}  // namespace cf

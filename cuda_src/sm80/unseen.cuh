// Keys and rows that nobody sees, whose elements must not reach a product: 0 * NaN is NaN.
#pragma once

#include "scores.cuh"

namespace cf {

// b = 0 in rows (keys) before `first` and from `end` on, of a fragment whose rows start at 0:
// 0 * NaN would be NaN.
template <typename Config, Order order>
CF_DEVICE void forget_keys(typename Fragments<Config>::B& b, int first, int end) {
  const int t = here() % 4;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if constexpr (Fragments<Config>::depth == 16) {
      const int k = 2 * t + e % 2 * 8;
      if (k < first || k >= end) b.x[e] &= 0xFFFF0000;
      if (k + 1 < first || k + 1 >= end) b.x[e] &= 0x0000FFFF;
    } else {
      const int k = order == Order::paired ? 2 * t + e % 2 : t + e % 2 * 4;
      if (k < first || k >= end) b.x[e] = 0;
    }
  }
}

  // Which keys of the strip any of the warp's rows sees. first: these are the first of its rows.
  template <int M, int N, typename C>
CF_DEVICE void mark_seen(const C (&S)[M][N], unsigned char* seen, bool first) {
  using A = decltype(C{}.x[0] + C{}.x[0]);
#pragma unroll
    for (int x = 0; x < 2 * M; ++x) {
      uint32 any = 0;
#pragma unroll
      for (int y = 0; y < 8 * N; ++y) {
        const bool own = row_step(y % 8) == 8 * (x % 2);
        if (own && S[x / 2][y / 8].x[y % 8] != -inf<A>()) any = 1;
      }
      any |= __shfl_xor_sync(0xFFFFFFFF, any, 1);
      any |= __shfl_xor_sync(0xFFFFFFFF, any, 2);
      unsigned char& flag = seen[8 * x + row_here()];
      if (here() % 4 == 0) flag = static_cast<unsigned char>(first ? any : any | flag);
    }
  }

// b = 0 in rows (keys) that no row of the tile sees, of a fragment whose rows start at 0: 0 * NaN
// would be NaN. seen: [parts, Bc], from that row on, of the parts that have scores.
template <typename Config, Order order>
CF_DEVICE void forget_unseen(typename Fragments<Config>::B& b, const unsigned char* seen) {
  const auto sees = [&](int key) {
    bool any = false;
#pragma unroll
    for (int part = 0; part < Config::Br / BackwardSm80Traits<Config>::part; ++part) {
      any = any || seen[part * Config::Bc + key];
    }
    return any;
  };
  const int t = here() % 4;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if constexpr (Fragments<Config>::depth == 16) {
      const int k = 2 * t + e % 2 * 8;
      if (!sees(k)) b.x[e] &= 0xFFFF0000;
      if (!sees(k + 1)) b.x[e] &= 0x0000FFFF;
    } else {
      if (!sees(order == Order::paired ? 2 * t + e % 2 : t + e % 2 * 4)) b.x[e] = 0;
    }
  }
}

// Zeroes the rows of a tile that see no key by the mask: 0 * NaN must not reach dK and dV. All
// threads meet here if there are any.
template <typename Config>
CF_DEVICE void forget_blind_rows(const FusedTiles<Config>& t, int stage) {
  using T = typename Config::element;
  using A = accumulator<T>;
  using Tiles = FusedTiles<Config>;
  const A* const lse = t.state + stage * 2 * Config::Br;
  const bool blind = int(threadIdx.x) < Config::Br && lse[threadIdx.x % Config::Br] == inf<A>();
  if (!ptx::sync_block_or(blind, "blind_rows_found")) return;
  T* const Q = t.Q + stage * Tiles::q_step;
  T* const dO = t.dO + stage * Tiles::v_step;
#pragma unroll 1
  for (int r = warp_id(); r < Config::Br; r += Config::warps) {
    if (lse[r] != inf<A>()) continue;
#pragma unroll 1
    for (int rest = 0; rest <= BackwardSm80Traits<Config>::rests; rest += Config::Br) {
      for (int c = lane_id(); c < Config::d; c += 32) Q[(r + rest) * Tiles::q_pitch + c] = T{};
      for (int c = lane_id(); c < Config::d_v; c += 32) dO[(r + rest) * Tiles::v_pitch + c] = T{};
    }
  }
  ptx::sync_block("blind_rows_zeroed");
}

}  // namespace cf

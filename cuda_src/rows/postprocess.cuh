// Behind the backward kernels that sum dq in workspace: from these sums to dq.
#pragma once

#include "../attention/gradient.cuh"

namespace cf {

template <typename Config>
struct BackwardPostprocessTraits {
  static constexpr int threads = 32 * Config::warps;
  static constexpr int smem_bytes = 0;
};

// Four sums of a lane, as `add_to_global` leaves them.
template <typename A>
CF_DEVICE FourSums<A> load_sums(uint64 address) {
  if constexpr (sizeof(A) == 4) return at<const FourSums<A>>(address);
  return {at<const A>(address), at<const A>(address + 256), at<const A>(address + 512),
          at<const A>(address + 768)};
}

// Writes the fragments (i, j) ... (i, j + count) of a tile's sums to dq; 0 for rows that see no
// key: a NaN of their neighbours' keys may be in the sums. All are loaded before any is written.
template <typename Config, int count>
CF_DEVICE void finish_fragments(const BackwardParams& p, const Rows& rows, int real, uint64 sums,
                                uint64 state, int i, int j) {
  using A = accumulator<typename Config::element>;
  FourSums<A> x[2 * count];
#pragma unroll
  for (int n = 0; n < 2 * count; ++n) {
    x[n] = load_sums<A>(sums + dq_offset<Config>(i, j + n / 2, n % 2, lane_id()));
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = 16 * i + lane_row() + 8 * h;
    if (r >= real) continue;
    const bool seen = at<const A>(state + r * int64(sizeof(A))) != inf<A>();
    const A factor = A(p.scale);
    const uint64 row = rows.address(p.dq, r);
#pragma unroll
    for (int n = 0; n < 2 * count; ++n) {
      const int c = 16 * j + 8 * n + lane_column();
      store_pair(p.dq, row + c * p.dq.c, int(p.d) - c, seen ? x[n].x[2 * h] * factor : A(0),
                 seen ? x[n].x[2 * h + 1] * factor : A(0));
    }
  }
}

// Tasks: tiles of packed rows of a key head. A warp has up to four fragments of 16 rows at a time.
template <typename Config>
CF_DEVICE void backward_postprocess(const BackwardParams& p) {
  using A = accumulator<typename Config::element>;
  constexpr int across = Config::d / 16, count = min(across & -across, 4);
  const int64 tiles = row_tiles(p, Config::Br);
  for (int64 task = blockIdx.x; task < p.tasks; task += gridDim.x) {
    const int64 tile = task % tiles, head = task / tiles, row0 = tile * Config::Br;
    const Rows rows = open_rows(p, head / p.heads_k, head % p.heads_k * p.group, p.group, row0,
                                Config::Br);
    const int real = int(min(p.group * p.Nq - row0, int64(Config::Br)));
    for (int n = warp_id(); n < Config::Br / 16 * across / count; n += Config::warps) {
      finish_fragments<Config, count>(p, rows, real, dq_address<Config>(p, head, tile),
                                      state_address<A>(p, head, tile, Config::Br),
                                      n * count / across, n * count % across);
    }
  }
}

}  // namespace cf

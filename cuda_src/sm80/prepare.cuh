// Before and after the fused backward kernel: lse and delta by tiles of packed rows, zeros for the
// sums of dq, and from these sums to dq.
#pragma once

#include "../rows/delta.cuh"
#include "../attention/normaliser.cuh"
#include "gradient.cuh"

namespace cf {

template <typename Config>
struct BackwardPreprocessTraits {
  static constexpr int threads = 32 * Config::warps;
  static constexpr int smem_bytes = 0;
  static constexpr int lanes = 8;                        // threads of a row
};

template <typename Config>
struct BackwardPostprocessTraits {
  static constexpr int threads = 32 * Config::warps;
  static constexpr int smem_bytes = 0;
};

// One lane's part of rowsum(dO * O). whole: both are of the operands' type, in 16-byte pieces. dO
// is rounded as in the products: that shifts all dP of a row alike, and cancels in dP - delta only
// if delta is made of the same numbers.
template <typename Config>
CF_DEVICE accumulator<typename Config::element> lane_delta(const BackwardParams& p, uint64 out,
                                                           uint64 dout, int lane, bool whole) {
  using T = typename Config::element;
  using A = accumulator<T>;
  constexpr int elements = 16 / int(sizeof(T)), lanes = BackwardPreprocessTraits<Config>::lanes;
  struct alignas(16) Piece {
    T x[elements];
  };
  A sum = A(0);
  for (int c = lane * elements; c < p.d_v; c += lanes * elements) {
    if (whole) {
      const Piece O = at<const Piece>(out + c * int64(sizeof(T)));
      const Piece dO = at<const Piece>(dout + c * int64(sizeof(T)));
#pragma unroll
      for (int i = 0; i < elements; ++i) {
        sum += widen(O.x[i]) * widen(to_operand<Config>(widen(dO.x[i])));
      }
    } else {                                             // in the same order
      for (int i = c; i < min(c + elements, int(p.d_v)); ++i) {
        const A dO = widen(to_operand<Config>(load<A>(dout + i * p.dout.c, p.dout.kind)));
        sum += load<A>(out + i * p.out.c, p.out.kind) * dO;
      }
    }
  }
  return sum;
}

// Sum over the lanes of a row.
template <int lanes, typename A>
CF_DEVICE A lanes_sum(A x) {
#pragma unroll
  for (int step = 1; step < lanes; step *= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, step);
  return x;
}

// lse and delta of a tile of rows. Rows that see no key, or are none, get lse = +inf.
template <typename Config>
CF_DEVICE void prepare_rows(const BackwardParams& p, const Rows& rows, uint64 state) {
  using A = accumulator<typename Config::element>;
  using Traits = BackwardPreprocessTraits<Config>;
  constexpr int step = Traits::threads / Traits::lanes;
  const bool whole = p.vector_bytes == 16 && p.out.kind == p.q.kind && p.dout.kind == p.q.kind;
  const int lane = int(threadIdx.x) % Traits::lanes;
#pragma unroll
  for (int r0 = 0; r0 < Config::Br; r0 += step) {        // all threads meet in the sums
    const int r = r0 + int(threadIdx.x) / Traits::lanes;
    A lse = -inf<A>(), delta = A(0);
    if (r < rows.rows) {
      lse = Config::features ? normaliser_of<A>(p, rows, r).reference
                             : at<const A>(rows.address(p.lse, r));
      delta = lane_delta<Config>(p, rows.address(p.out, r), rows.address(p.dout, r), lane, whole);
    }
    delta = lanes_sum<Traits::lanes>(delta);
    if (lane != 0 || r >= Config::Br) continue;
    const bool empty = lse == -inf<A>();
    if (!empty && p.dlse.address != 0) delta -= at<const A>(rows.address(p.dlse, r));
    at<A>(state + r * int64(sizeof(A))) = empty ? inf<A>() : lse;
    at<A>(state + (Config::Br + r) * int64(sizeof(A))) = empty ? A(0) : delta;
  }
}

// Tasks: tiles of packed rows of a key head.
template <typename Config>
CF_DEVICE void backward_preprocess(const BackwardParams& p) {
  using A = accumulator<typename Config::element>;
  const int64 tiles = row_tiles<Config>(p);
  for (int64 task = blockIdx.x; task < p.tasks; task += gridDim.x) {
    const int64 tile = task % tiles, head = task / tiles;
    const Rows rows = open_rows(p, head / p.heads_k, head % p.heads_k * p.group, p.group,
                                tile * Config::Br, Config::Br);
    const uint64 sums = dq_address<Config>(p, head, tile);
    for (int i = int(threadIdx.x); i < Config::Br * Config::d * int(sizeof(A)) / 16;
         i += BackwardPreprocessTraits<Config>::threads) {
      at<Chunk>(sums + 16 * i) = Chunk{};
    }
    prepare_rows<Config>(p, rows, state_address<Config>(p, head, tile));
  }
}

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
  constexpr int across = Config::d / 16, count = min(across & -across, 4);
  const int64 tiles = row_tiles<Config>(p);
  for (int64 task = blockIdx.x; task < p.tasks; task += gridDim.x) {
    const int64 tile = task % tiles, head = task / tiles, row0 = tile * Config::Br;
    const Rows rows = open_rows(p, head / p.heads_k, head % p.heads_k * p.group, p.group, row0,
                                Config::Br);
    const int real = int(min(p.group * p.Nq - row0, int64(Config::Br)));
    for (int n = warp_id(); n < Config::Br / 16 * across / count; n += Config::warps) {
      finish_fragments<Config, count>(p, rows, real, dq_address<Config>(p, head, tile),
                                      state_address<Config>(p, head, tile), n * count / across,
                                      n * count % across);
    }
  }
}

}  // namespace cf

// Before the backward kernels: lse and delta = rowsum(dO * O) - dlse by tiles of packed rows, and
// zeros for the sums of dq and of dbias.
#pragma once

#include "../attention/gradient.cuh"

namespace cf {

template <typename Config>
struct BackwardPreprocessTraits {
  static constexpr int threads = 32 * Config::warps;
  static constexpr int smem_bytes = 0;
  static constexpr int lanes = 8;                        // threads of a row
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
      lse = reference_of_row<Config>(p, rows, r);
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
  const int64 tiles = row_tiles(p, Config::Br);
  for (int64 task = blockIdx.x; task < p.tasks; task += gridDim.x) {
    const int64 tile = task % tiles, head = task / tiles;
    const Rows rows = open_rows(p, head / p.heads_k, head % p.heads_k * p.group, p.group,
                                tile * Config::Br, Config::Br);
    const uint64 sums = dq_address<Config>(p, head, tile);
    const int chunks = p.dq_sums != 0 ? Config::Br * Config::d * int(sizeof(A)) / 16 : 0;
    for (int i = int(threadIdx.x); i < chunks; i += BackwardPreprocessTraits<Config>::threads) {
      at<Chunk>(sums + 16 * i) = Chunk{};
    }
    if constexpr (adds_dbias<Config>()) {
      clear_dbias_sums<Config>(p, task, BackwardPreprocessTraits<Config>::threads);
    }
    prepare_rows<Config>(p, rows, state_address<A>(p, head, tile, Config::Br));
  }
}

}  // namespace cf

// The forward kernel with S, P and acc in registers: each warp owns some of the tile's rows. V is
// copied during Q K^T, the next K during the softmax and P V.
// Dao, "FlashAttention-2" (2023), algorithm 1.
#pragma once

#include "../tile/split.cuh"
#include "forward_warp.cuh"
#include "store.cuh"

namespace cf {

// lse = ln l + m of the warp's rows, -inf of those that see nothing and those behind q_lens. The
// four lanes that have a row in common share out their rows.
template <typename Config>
CF_DEVICE void store_lse(const ForwardWarp<Config>& warp, const Tensor& lse, double scale,
                         const Rows& rows, int count) {
  using T = typename ForwardWarp<Config>::F::Sum;
  const int row0 = ForwardRegistersTiles<Config>::row0() + lane_row(), own = lane_id() % 4;
#pragma unroll
  for (int i = 0; i < 2 * warp.fragments; i += 4) {
    T m = T(0), l = T(0);
#pragma unroll
    for (int x = i; x < min(i + 4, 2 * warp.fragments); ++x) {
      if (x == i + own) {
        m = warp.softmax.m[x / 2][x % 2];
        l = warp.softmax.l[x / 2][x % 2];
      }
    }
    const int r = row0 + (i + own) * 8;
    if (i + own < 2 * warp.fragments && r < count) {
      const T l_real = r < rows.rows ? l : T(0);
      // The score is rounded as in the backward pass, or large ones and their lse would not cancel.
      at<T>(rows.address(lse, r)) = ptx::multiply(T(scale), m) + log(l_real);
    }
  }
}

// out and lse of the warp's rows; those that see nothing, and those behind q_lens, become 0. count:
// rows of the tile that exist in the arrays. 16-bit rows go by way of the warp's part of Q.
template <typename Config>
CF_DEVICE void store_warp(ForwardWarp<Config>& warp, const ForwardRegistersTiles<Config>& t,
                          const Params& p, const Tensor& out, const Tensor& lse, const Rows& rows,
                          int count) {
  using U = typename Config::element;
  using T = accumulator<U>;
  using Traits = ForwardRegistersTraits<Config>;
  constexpr int pitch = Traits::pitch;
  const int row0 = t.row0(), column0 = t.column0(), columns = int(p.d_v) - column0;
  const uint64 base = rows.base(out) + column0 * out.c;
  const bool staged = sizeof(U) == 2 && Config::d_v <= Config::d && out.kind != FLOAT32;
  U* const stage = t.Q + row0 * pitch + column0;
  warp.join_l(t.l);
#pragma unroll
  for (int i = 0; i < 2 * warp.fragments; ++i) {
    const int r = i * 8 + lane_row();
    const T l = row0 + r < rows.rows ? warp.softmax.l[i / 2][i % 2] : T(0);
    const T factor = l != T(0) ? reciprocal<U>(l) : T(0);
    if (staged) {
      if constexpr (sizeof(U) == 2) {
        stage_row<Config>(stage + r * pitch, warp.acc[i / 2], i % 2, factor);
      }
    } else if (row0 + r < count) {
      const uint64 row = base + rows.packed.offset(out, row0 + r);
      if (sizeof(U) == sizeof(T) || out.kind == FLOAT32) {
        store_row<T, Config>(warp.acc[i / 2], i % 2, factor, out, row, columns);
      } else {
        store_row<U, Config>(warp.acc[i / 2], i % 2, factor, out, row, columns);
      }
    }
  }
  if (staged) {
    __syncwarp();
    store_staged<Traits::rows, 16 * Traits::columns, pitch>(
        stage, out, base, rows.packed, row0, min(count - row0, Traits::rows), columns);
  }
  if (lse.address != 0 && t.part() == 0) store_lse(warp, lse, p.scale, rows, count);
}

// What the walk over the keys of one task needs to know.
template <typename Config>
struct ForwardTask {
  using Traits = ForwardRegistersTraits<Config>;
  const ForwardParams& p;
  const ForwardRegistersTiles<Config>& t;
  const Rows& rows;
  const TileKeys& keys;
  SeenKeys seen;                   // by the warp's rows
  uint64 k_base, v_base;
  ptx::Shared k_place, v_place;    // of the thread's copies
  int first, last;                 // keys that the block's rows see
  bool whole;                      // rows can be copied 16 bytes at a time

  CF_DEVICE uint64 start_K(int key0) const {
    return copy_start<Config, Config::Bc, Config::d>(p.k, k_base, key0);
  }
  CF_DEVICE uint64 start_V(int key0) const {
    return copy_start<Config, Config::Bc, Config::d_v>(p.v, v_base, key0);
  }
  CF_DEVICE void copy_K(int key0) const {
    constexpr int Bc = Config::Bc, d = Config::d;
    if (whole) {
      copy_rows<Config, Bc, d, Traits::pitch>(k_place, p.k, start_K(key0), first - key0,
                                              last - key0, int(p.d));
    } else {
      copy_tile_slowly<Config, Bc, d, Traits::pitch>(t.K, p.k, k_base, key0, first - key0,
                                                     last - key0, int(p.d), 1, int(p.vector_bytes));
    }
  }
  CF_DEVICE void copy_V(int key0) const {
    constexpr int Bc = Config::Bc, d_v = Config::d_v;
    if (whole) {
      copy_rows<Config, Bc, d_v, Traits::pitch_v>(v_place, p.v, start_V(key0), first - key0,
                                                  last - key0, int(p.d_v));
    } else {
      copy_tile_slowly<Config, Bc, d_v, Traits::pitch_v>(
          t.V, p.v, v_base, key0, first - key0, last - key0, int(p.d_v), 1, int(p.vector_bytes));
    }
  }
  // One tile of keys; its K is on the way, and so is the next one's K when this returns.
  // plain: a tile that all rows of the block see, of arrays that can be copied whole: this V and
  // the next K from the addresses given, which the caller has at hand when the barriers open.
  template <bool plain>
  CF_DEVICE void step(ForwardWarp<Config>& warp, int key0, uint64 k_from, uint64 v_from) const {
    constexpr int Bc = Config::Bc;
    typename ForwardWarp<Config>::S scores;
    ptx::wait_for_copies<0>();
    round_tile<Config, Bc, Config::d, Traits::pitch>(t.K);
    __syncthreads();                                    // K is there (first also Q); V may go
    if constexpr (plain) {
      copy_rows<Config, Bc, Config::d_v, Traits::pitch_v>(v_place, p.v, v_from, 0, Bc, int(p.d_v));
    } else {
      copy_V(key0);
    }
    ptx::close_copies();
    const bool any = plain || seen.any(key0, Bc);
    if (any) warp.multiply_keys(scores);
    if (!plain && any && !seen.all(key0, Bc)) {
      if (key0 >= seen.inner_first) {
        warp.template hide<false>(scores, keys, rows, key0);
      } else {
        warp.template hide<true>(scores, keys, rows, key0);
      }
    }
    typename ForwardWarp<Config>::Top top;
    bool moves = false;
    if constexpr (Traits::parts == 2) moves = warp.softmax.find_top(scores, any, top);
    ptx::wait_for_copies<0>();
    round_tile<Config, Bc, Config::d_v, Traits::pitch_v>(t.V);
    // V is there; K may go. Warps that share rows must agree on whether their references move; the
    // others look at their scores later, for the products may still be on their way.
    if constexpr (Traits::parts == 2) {
      moves = __syncthreads_or(moves);
    } else {
      __syncthreads();
    }
    if (key0 + Bc < last) {
      if constexpr (plain) {
        copy_rows<Config, Bc, Config::d, Traits::pitch>(k_place, p.k, k_from, 0, last - key0 - Bc,
                                                        int(p.d));
      } else {
        copy_K(key0 + Bc);
      }
    }
    ptx::close_copies();
    if constexpr (Traits::parts == 1) {
      if (!any) return;
      moves = __any_sync(0xFFFFFFFF, warp.softmax.find_top(scores, true, top));
    }
    if (moves) {
      warp.join_top(t.top, scores, top);
      warp.softmax.move_reference(top, scores, warp.acc);
    }
    if (any) warp.finish_tile(scores, t);
  }
};

// The packed rows row0 ... row0 + Br of one key head, over the keys of one split.
template <typename Config>
CF_DEVICE void forward_registers_tile(const ForwardParams& p,
                                      const ForwardRegistersTiles<Config>& t, int64 b, int64 head_k,
                                      int64 row0, int64 split) {
  using Traits = ForwardRegistersTraits<Config>;
  using Sum = typename ForwardWarp<Config>::F::Sum;
  constexpr int Br = Config::Br, Bc = Config::Bc;
  const Rows rows = open_rows(p, b, head_k * p.group, p.group, row0, Br);
  const bool whole = p.vector_bytes == 16;
  if (whole && p.group == 1) {
    copy_rows<Config, Br, Config::d, Traits::pitch>(
        copy_place<Config, Br, Config::d, Traits::pitch>(t.Q), p.q,
        copy_start<Config, Br, Config::d>(p.q, rows.base(p.q), row0), 0, rows.rows, int(p.d));
  } else {
    copy_tile<Config, Br, Config::d, Traits::pitch>(t.Q, p.q, rows.base(p.q), row0, 0, rows.rows,
                                                    int(p.d), p.group, p.vector_bytes);
  }
  const TileKeys keys(p, rows, split * p.split_keys, (split + 1) * p.split_keys);
  const SeenKeys seen(keys, rows, 0, Br);
  const ForwardTask<Config> task = {
      p, t, rows, keys, SeenKeys(keys, rows, t.row0(), Traits::rows),
      p.k.address + b * p.k.b + head_k * p.k.h, p.v.address + b * p.v.b + head_k * p.v.h,
      copy_place<Config, Bc, Config::d, Traits::pitch>(t.K).kept(),
      copy_place<Config, Bc, Config::d_v, Traits::pitch_v>(t.V).kept(), seen.first, seen.end,
      whole};
  const int begin = seen.first / Bc * Bc, last = seen.end;
  if (begin < last) task.copy_K(begin);
  ptx::close_copies();
  ForwardWarp<Config> warp(t, p);
  ptx::wait_for_copies<0>();
  round_tile<Config, Br, Config::d, Traits::pitch>(t.Q);
  if (Config::keep_Q || begin >= last) __syncthreads();  // Q is there, and may go
  if (Config::keep_Q) warp.keep_Q();
  int key0 = begin;
  while (key0 < last) {
    if (!task.whole || !seen.all(key0, Bc)) {
      task.template step<false>(warp, key0, 0, 0);
      key0 += Bc;
      continue;
    }
    uint64 k_from = task.start_K(key0 + Bc), v_from = task.start_V(key0);
#pragma unroll 1
    do {
      task.template step<true>(warp, key0, k_from, v_from);
      key0 += Bc;
      k_from += Bc * p.k.n;
      v_from += Bc * p.v.n;
    } while (key0 + Bc <= seen.inner_end);
  }
  const int count = int(min(p.group * p.Nq - row0, int64(Br)));
  store_warp(warp, t, p, split_result<Sum>(p, p.out, p.out_partial, p.d_v, split),
             split_result<Sum>(p, p.lse, p.lse_partial, 1, split), rows, count);
}

// a / b, quickly where both have 32 bits.
CF_DEVICE int64 divide(int64 a, int64 b) {
  return (uint64(a) | uint64(b)) >> 32 == 0 ? int64(uint32(a) / uint32(b)) : a / b;
}

// Tasks: tiles of query rows of a key head, each once per split of the keys.
template <typename Config>
CF_DEVICE void forward_registers(const ForwardParams& p) {
  CF_DYNAMIC_SHARED(memory);
  const ForwardRegistersTiles<Config> t(memory);
  const int64 tiles = ceil_div(p.group * p.Nq, int64(Config::Br));
  for (int64 task = blockIdx.x; task < p.tasks; task += gridDim.x) {
    const int64 tile_of_all = p.splits == 1 ? task : divide(task, p.splits);
    const int64 sequence = divide(tile_of_all, tiles);
    const int64 split = task - tile_of_all * p.splits;
    const int64 tile = tiles - 1 - (tile_of_all - sequence * tiles);  // longest causal rows first
    const int64 b = divide(sequence, p.heads_k), head_k = sequence - b * p.heads_k;
    forward_registers_tile<Config>(p, t, b, head_k, tile * Config::Br, split);
    __syncthreads();                                    // the memory is free for the next task
  }
}

}  // namespace cf

// The forward kernel with S, P and acc in registers: each warp owns some of the tile's rows and all
// of its keys. V is copied during Q K^T, the next K during the softmax and P V.
// Dao, "FlashAttention-2" (2023), algorithm 1.
#pragma once

#include "copy.cuh"
#include "online.cuh"
#include "store.cuh"

namespace cf {

template <typename Config>
struct ForwardRegistersTraits {
  using T = typename Config::element;
  static constexpr int threads = 32 * Config::warps;
  static constexpr int fragments = Config::Br / Config::warps / 16;    // of rows a warp
  static constexpr int keys = Config::Bc / 16, columns = Config::d_v / 16;
  static constexpr int pitch = rows_pitch<T>(Config::d), pitch_v = depth_pitch<T>(Config::d_v);
  static constexpr int smem_bytes =
      ((Config::Br + Config::Bc) * pitch + Config::Bc * pitch_v) * int(sizeof(T));
  static_assert(Config::d % 16 == 0 && Config::d_v % 16 == 0, "d and d_v must be multiples of 16");
  static_assert(Config::Br % (16 * Config::warps) == 0, "warps must have whole fragments of rows");
  static_assert(Config::Bc % 16 == 0, "Bc must be a multiple of 16");
};

// Shared memory of a block, and where a warp reads it.
template <typename Config>
struct ForwardRegistersTiles {
  using T = typename Config::element;
  using Traits = ForwardRegistersTraits<Config>;
  T* Q;                // [Br, d]
  T* K;                // [Bc, d]
  T* V;                // [Bc, d_v]

  CF_DEVICE explicit ForwardRegistersTiles(unsigned char* memory) {
    Carver carver{memory};
    Q = carver.take<T>(Config::Br * Traits::pitch * int(sizeof(T)));
    K = carver.take<T>(Config::Bc * Traits::pitch * int(sizeof(T)));
    V = carver.take<T>(Config::Bc * Traits::pitch_v * int(sizeof(T)));
  }
  static CF_DEVICE int row0() { return warp_id() * 16 * Traits::fragments; }
};

// What a warp keeps while it walks the keys.
template <typename Config>
struct ForwardWarp {
  using F = Fragments<Config>;
  using T = typename F::T;
  using Traits = ForwardRegistersTraits<Config>;
  static constexpr int fragments = Traits::fragments, keys = Traits::keys;
  static constexpr int columns = Traits::columns, depths = Config::d / F::depth;
  using S = typename F::C[fragments][keys];

  ReaderA<Config, Layout::row, Traits::pitch> Q;
  ReaderB<Config, Layout::col, Traits::pitch> K;
  ReaderB<Config, Layout::row, Traits::pitch_v> V;
  typename F::A kept[fragments][Config::keep_Q ? depths : 1];
  typename F::C acc[fragments][columns];
  OnlineSoftmax<Config, fragments> softmax;

  CF_DEVICE ForwardWarp(const ForwardRegistersTiles<Config>& t, const Params& p)
      : Q(t.Q + t.row0() * Traits::pitch), K(t.K), V(t.V), acc{}, softmax(p) {}

  CF_DEVICE void keep_Q() {
#pragma unroll
    for (int i = 0; i < fragments * depths; ++i) {
      kept[i / depths][i % depths] = Q.load(i / depths * 16, i % depths * F::depth);
    }
  }

  // scores = Q K^T
  CF_DEVICE void multiply_keys(S& scores) const {
    Sums<Config> sums[fragments][keys];
#pragma unroll
    for (int k = 0; k < depths; ++k) {
      decltype(operand<Config>(kept[0][0])) a[fragments];
#pragma unroll
      for (int i = 0; i < fragments; ++i) {
        a[i] = operand<Config>(Config::keep_Q ? kept[i][k] : Q.load(i * 16, k * F::depth));
      }
#pragma unroll
      for (int j = 0; j < keys; ++j) {
        const auto b = operand<Config>(K.load(k * F::depth, j * 16));
#pragma unroll
        for (int i = 0; i < fragments; ++i) add_product(sums[i][j], a[i], b);
      }
    }
#pragma unroll
    for (int i = 0; i < fragments * keys; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) scores[i / keys][i % keys].x[e] = sums[i / keys][i % keys].total(e);
    }
  }

  // Hides what a row does not see.
  static CF_DEVICE void hide(S& scores, const TileKeys& keys_of, const Rows& rows, int key0) {
    const int corner = key0 + lane_column();
#pragma unroll
    for (int i = 0; i < 2 * fragments; ++i) {
      const int r = ForwardRegistersTiles<Config>::row0() + i * 8 + lane_row();
      const int first = keys_of.first_of(rows, r) - corner, end = keys_of.end_of(rows, r) - corner;
#pragma unroll
      for (int j = 0; j < keys; ++j) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const int key = j * 16 + column_step(e);
          if (row_step(e) == i % 2 * 8 && (key < first || key >= end)) {
            scores[i / 2][j].x[e] = -inf<typename F::Sum>();
          }
        }
      }
    }
  }

  // acc += P V, summed in acc itself.
  CF_DEVICE void multiply_values(const S& P) {
#pragma unroll
    for (int j = 0; j < keys; ++j) {
      typename F::A a[fragments][16 / F::depth];
#pragma unroll
      for (int i = 0; i < fragments; ++i) {
        const AccumulatorAsA<Config> one(P[i][j]);
#pragma unroll
        for (int x = 0; x < one.count; ++x) a[i][x] = one.a[x];
      }
#pragma unroll
      for (int x = 0; x < 16 / F::depth; ++x) {
#pragma unroll
        for (int n = 0; n < columns; ++n) {
          const typename F::B b = V.load(j * 16 + x * F::depth, n * 16);
#pragma unroll
          for (int i = 0; i < fragments; ++i) mma<Config>(acc[i][n], a[i][x], b);
        }
      }
    }
  }

  // acc += P V, each 16 columns of it summed apart and added as a whole.
  CF_DEVICE void multiply_values_apart(const S& P) {
    constexpr int count = 16 / F::depth;
    decltype(operand<Config>(kept[0][0])) a[fragments][keys][count];
#pragma unroll
    for (int i = 0; i < fragments * keys; ++i) {
      const AccumulatorAsA<Config> one(P[i / keys][i % keys]);
#pragma unroll
      for (int x = 0; x < count; ++x) a[i / keys][i % keys][x] = operand<Config>(one.a[x]);
    }
#pragma unroll
    for (int n = 0; n < columns; ++n) {
      Sums<Config> sums[fragments];
#pragma unroll
      for (int k = 0; k < keys * count; ++k) {
        const auto b = operand<Config>(V.load(k * F::depth, n * 16));
#pragma unroll
        for (int i = 0; i < fragments; ++i) add_product(sums[i], a[i][k / count][k % count], b);
      }
#pragma unroll
      for (int i = 0; i < fragments; ++i) {
#pragma unroll
        for (int e = 0; e < 8; ++e) acc[i][n].x[e] += sums[i].total(e);
      }
    }
  }

  CF_DEVICE void finish_tile(S& scores) {
    softmax.move_reference(scores, acc);
    softmax.exponentials(scores);
    if constexpr (fresh_sums<Config>()) {
      multiply_values_apart(scores);
    } else {
      multiply_values(scores);
    }
  }
};

// out and lse of the warp's rows; rows that see nothing, and those behind q_lens, become 0 and -inf.
// count: rows of the tile that exist in the arrays. 16-bit rows go by way of the warp's part of Q.
template <typename Config>
CF_DEVICE void store_warp(const ForwardWarp<Config>& warp, typename Config::element* stage,
                          const Tensor& out, const Tensor& lse, const Rows& rows, int count,
                          int columns) {
  using U = typename Config::element;
  using T = accumulator<U>;
  constexpr int pitch = ForwardRegistersTraits<Config>::pitch;
  const int row0 = ForwardRegistersTiles<Config>::row0();
  const auto address = [&](int r) { return rows.address(out, row0 + r); };
  const bool staged = sizeof(U) == 2 && Config::d_v <= Config::d && out.kind != FLOAT32;
#pragma unroll
  for (int i = 0; i < 2 * warp.fragments; ++i) {
    const int r = i * 8 + lane_row();
    const T sum = row_sum(warp.softmax.l[i / 2][i % 2]);
    const T l = row0 + r < rows.rows ? sum : T(0), factor = l != T(0) ? T(1) / l : T(0);
    if (lse.address != 0 && row0 + r < count && lane_id() % 4 == 0) {
      const T m_ref = warp.softmax.reference(warp.softmax.m[i / 2][i % 2]);
      at<T>(rows.address(lse, row0 + r)) = T(0.6931471805599453) * m_ref + log(l);
    }
    if (staged) {
      if constexpr (sizeof(U) == 2) {
        stage_row<Config>(stage + r * pitch, warp.acc[i / 2], i % 2, factor);
      }
    } else if (row0 + r < count) {
      if (sizeof(U) == sizeof(T) || out.kind == FLOAT32) {
        store_row<T, Config>(warp.acc[i / 2], i % 2, factor, out, address(r), columns);
      } else {
        store_row<U, Config>(warp.acc[i / 2], i % 2, factor, out, address(r), columns);
      }
    }
  }
  if (staged) {
    __syncwarp();
    store_staged<Config::d_v, pitch>(stage, out, address,
                                     min(count - row0, 16 * warp.fragments), columns);
  }
}

// out or, of one split, out_partial; lse likewise.
template <typename T>
CF_DEVICE Tensor split_result(const ForwardParams& p, const Tensor& whole, uint64 partial,
                              int64 columns, int64 split) {
  if (p.splits == 1) return whole;
  const int64 row = columns * int64(sizeof(T)), head = row * p.Nq, batch = head * p.heads_q;
  return {partial + split * p.batch * batch, batch, head, row, sizeof(T),
          sizeof(T) == 8 ? FLOAT64 : FLOAT32};
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
  int first, last;                 // keys that the block's rows see
  bool whole;                      // rows can be copied 16 bytes at a time

  CF_DEVICE void copy_K(int key0) const {
    constexpr int Bc = Config::Bc, d = Config::d;
    if (whole) {
      copy_rows<Config, Bc, d, Traits::pitch>(ptx::Shared(t.K), p.k, k_base, key0, first - key0,
                                              last - key0, int(p.d));
    } else {
      copy_tile_slowly<Config, Bc, d, Traits::pitch>(t.K, p.k, k_base, key0, first - key0,
                                                     last - key0, int(p.d), 1, int(p.vector_bytes));
    }
  }
  CF_DEVICE void copy_V(int key0) const {
    constexpr int Bc = Config::Bc, d_v = Config::d_v;
    if (whole) {
      copy_rows<Config, Bc, d_v, Traits::pitch_v>(ptx::Shared(t.V), p.v, v_base, key0,
                                                  first - key0, last - key0, int(p.d_v));
    } else {
      copy_tile_slowly<Config, Bc, d_v, Traits::pitch_v>(
          t.V, p.v, v_base, key0, first - key0, last - key0, int(p.d_v), 1, int(p.vector_bytes));
    }
  }
  // The same for tiles whose first keys are there, of arrays that can be copied whole.
  CF_DEVICE void copy_plain_K(int key0) const {
    copy_rows<Config, Config::Bc, Config::d, Traits::pitch>(ptx::Shared(t.K), p.k, k_base, key0, 0,
                                                            last - key0, int(p.d));
  }
  CF_DEVICE void copy_plain_V(int key0) const {
    copy_rows<Config, Config::Bc, Config::d_v, Traits::pitch_v>(
        ptx::Shared(t.V), p.v, v_base, key0, 0, Config::Bc, int(p.d_v));
  }

  // One tile of keys; its K is on the way, and so is the next one's K when this returns.
  // plain: a tile that all rows of the block see, of arrays that can be copied whole.
  template <bool plain>
  CF_DEVICE void step(ForwardWarp<Config>& warp, int key0) const {
    constexpr int Bc = Config::Bc;
    typename ForwardWarp<Config>::S scores;
    ptx::wait_for_copies<0>();
    round_tile<Config, Bc, Config::d, Traits::pitch>(t.K);
    __syncthreads();                                    // K is there (first also Q); V may go
    plain ? copy_plain_V(key0) : copy_V(key0);
    ptx::close_copies();
    const bool any = plain || seen.any(key0, Bc);
    if (any) warp.multiply_keys(scores);
    ptx::wait_for_copies<0>();
    round_tile<Config, Bc, Config::d_v, Traits::pitch_v>(t.V);
    __syncthreads();                                    // V is there; K may go
    if (key0 + Bc < last) plain ? copy_plain_K(key0 + Bc) : copy_K(key0 + Bc);
    ptx::close_copies();
    if (!any) return;
    if (!plain && !seen.all(key0, Bc)) warp.hide(scores, keys, rows, key0);
    warp.finish_tile(scores);
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
  const TileKeys keys(p, rows, split * p.split_keys, (split + 1) * p.split_keys);
  const SeenKeys seen(keys, rows, 0, Br);
  const ForwardTask<Config> task = {
      p, t, rows, keys, SeenKeys(keys, rows, t.row0(), 16 * Traits::fragments),
      p.k.address + b * p.k.b + head_k * p.k.h, p.v.address + b * p.v.b + head_k * p.v.h,
      seen.first, seen.end, p.vector_bytes == 16};
  const int begin = seen.first / Bc * Bc, last = seen.end;
  if (task.whole && p.group == 1) {
    copy_rows<Config, Br, Config::d, Traits::pitch>(ptx::Shared(t.Q), p.q, rows.base(p.q), row0, 0,
                                                    rows.rows, int(p.d));
  } else {
    copy_tile<Config, Br, Config::d, Traits::pitch>(t.Q, p.q, rows.base(p.q), row0, 0, rows.rows,
                                                    int(p.d), p.group, p.vector_bytes);
  }
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
      task.template step<false>(warp, key0);
      key0 += Bc;
      continue;
    }
#pragma unroll 1
    do {
      task.template step<true>(warp, key0);
      key0 += Bc;
    } while (key0 + Bc <= seen.inner_end);
  }
  const int count = int(min(p.group * p.Nq - row0, int64(Br)));
  store_warp(warp, t.Q + t.row0() * Traits::pitch,
             split_result<Sum>(p, p.out, p.out_partial, p.d_v, split),
             split_result<Sum>(p, p.lse, p.lse_partial, 1, split), rows, count, int(p.d_v));
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

// The forward kernel with S, P and acc in registers: each warp owns some of the tile's rows. V is
// copied during Q K^T, the next K during the softmax and P V.
// Dao, "FlashAttention-2" (2023), algorithm 1.
#pragma once

#include "../attention/schedule.cuh"
#include "forward_warp.cuh"
#include "store.cuh"

namespace cf {

// A row at its end, from m of q.k or of scores.
template <typename Config, typename T>
CF_DEVICE RowEnd<T> end_of(const ForwardParams& p, const Rows& rows, int r, T m, T l) {
  return finish_row<Config>(p, rows.head0 + rows.packed.head(r), r < rows.rows,
                            Config::scaled ? m : ptx::multiply(T(p.scale), m), l);
}

// lse of the warp's rows, -inf of those that see nothing and those behind q_lens. The
// four lanes that have a row in common share out their rows.
template <typename Config>
CF_DEVICE void store_lse(const ForwardWarp<Config>& warp, const ForwardParams& p, int64 split,
                         const Rows& rows, int count) {
  using T = typename ForwardWarp<Config>::F::Sum;
  const int row0 = ForwardSm80Tiles<Config>::row0() + lane_row(), own = lane_id() % 4;
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
      store_end(p, rows, r, split, end_of<Config>(p, rows, r, m, l));
    }
  }
}

// out and lse of the warp's rows; those that see nothing, and those behind q_lens, become 0. count:
// rows of the tile that exist in the arrays. They go by way of the warp's part of Q.
template <typename Config>
CF_DEVICE void store_warp(ForwardWarp<Config>& warp, const ForwardSm80Tiles<Config>& t,
                          const ForwardParams& p, const Rows& rows, int64 split, int count) {
  using U = typename Config::element;
  using T = accumulator<U>;
  using Traits = ForwardSm80Traits<Config>;
  constexpr int pitch = Traits::pitch_Q, width = 16 * Traits::columns;
  const Tensor out = split_out<T>(p, split);
  const int row0 = t.row0(), column0 = t.column0(), columns = int(p.d_v) - column0;
  const int rows_left = count - row0;
  const uint64 base = rows.base(out) + column0 * out.c;
  warp.join_l(t.l);
  T factor[2 * Traits::fragments];
#pragma unroll
  for (int i = 0; i < 2 * Traits::fragments; ++i) {
    factor[i] = end_of<Config>(p, rows, row0 + i * 8 + lane_row(), warp.softmax.m[i / 2][i % 2],
                               warp.softmax.l[i / 2][i % 2]).factor;
  }
  forget_unseen_rows<Config>(warp.acc, factor);
  U* const part = t.Q + row0 * pitch;
  if (sizeof(U) == 2 && out.kind == FLOAT32) {
    if constexpr (sizeof(U) == 2) {
      // Such rows are twice as long: half of them at a time.
      float* const stage = reinterpret_cast<float*>(part) + column0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < Traits::fragments; ++i) {
          stage_row<float, Config>(stage + (i * 8 + lane_row()) * pitch + lane_column(),
                                   warp.acc[i], half, factor[2 * i + half]);
        }
        ptx::sync_warp("half_staged");
        store_staged<Traits::rows / 2, width, pitch, true>(
            stage, out, base, rows.packed, row0 + 8 * half, rows_left - 8 * half, columns);
        ptx::sync_warp("half_stored");
      }
    }
  } else {
    U* const stage = part + column0;
#pragma unroll
    for (int i = 0; i < 2 * Traits::fragments; ++i) {
      stage_row<U, Config>(stage + (i * 8 + lane_row()) * pitch + lane_column(), warp.acc[i / 2],
                           i % 2, factor[i]);
    }
    ptx::sync_warp("rows_staged");
    store_staged<Traits::rows, width, pitch>(stage, out, base, rows.packed, row0, rows_left,
                                             columns);
  }
  if ((p.lse.address != 0 || p.splits > 1) && t.part() == 0) {
    store_lse(warp, p, split, rows, count);
  }
}

// What a task is, beside the loop over tiles that all rows see whole: it lies in memory, for that
// loop leaves no registers.
struct ForwardTask {
  Rows rows;
  TileKeys keys;
  SeenKeys seen, own;              // by the block's rows and by the warp's
  uint64 k_base, v_base;
  int64 split;
};

// The walk over the keys of one task.
template <typename Config>
struct ForwardWalk {
  using Traits = ForwardSm80Traits<Config>;
  using Warp = ForwardWarp<Config>;
  static constexpr int Bc = Config::Bc;
  const ForwardParams& p;
  const ForwardSm80Tiles<Config>& t;
  const ForwardTask& task;
  ptx::Shared k_place, v_place;    // of the thread's copies

  CF_DEVICE ForwardWalk(const ForwardParams& p_, const ForwardSm80Tiles<Config>& t_,
                        const ForwardTask& task_)
      : p(p_),
        t(t_),
        task(task_),
        k_place(copy_place<Config, Bc, Config::d, Traits::pitch>(t.K).kept()),
        v_place(copy_place<Config, Bc, Config::d_v, Traits::pitch_v>(t.V).kept()) {}

  CF_DEVICE uint64 start_K(const ForwardTask& of, int key0) const {
    return copy_start<Config, Bc, Config::d>(p.k, of.k_base, key0);
  }
  CF_DEVICE uint64 start_V(int key0) const {
    return copy_start<Config, Bc, Config::d_v>(p.v, task.v_base, key0);
  }
  // of: the task, wherever it is at hand.
  CF_DEVICE void copy_K(const ForwardTask& of, int key0) const {
    const int first = of.seen.first - key0, end = of.seen.end - key0;
    if (p.vector_bytes == 16) {
      copy_rows<Config, Bc, Config::d, Traits::pitch>(k_place, p.k, start_K(of, key0), first, end,
                                                      int(p.d));
    } else {
      copy_any_rows<Config, Config::d, Traits::pitch>(
          t.K, Bc, key_block(p, p.k, of.k_base, key0, first, end, p.d));
    }
  }
  CF_DEVICE void copy_V(int key0) const {
    const int first = task.seen.first - key0, end = task.seen.end - key0;
    if (p.vector_bytes == 16) {
      copy_rows<Config, Bc, Config::d_v, Traits::pitch_v>(v_place, p.v, start_V(key0), first, end,
                                                          int(p.d_v));
    } else {
      copy_any_rows<Config, Config::d_v, Traits::pitch_v>(
          t.V, Bc, key_block(p, p.v, task.v_base, key0, first, end, p.d_v));
    }
  }

  // Where the plain tiles from key0 on end: all rows see all of their keys, and they and the K that
  // is copied during the last of them can be copied whole.
  CF_DEVICE int plain_end(int key0) const {
    if (p.vector_bytes != 16 || key0 < task.seen.inner_first) return key0;
    return min(task.seen.inner_end, task.seen.end - Bc);
  }

  // The scores of one tile of keys, whose K is on the way; V is there and the next K on its way
  // when it returns: whether the warp sees any of the keys. moves: whether its references must.
  // plain: see `plain_end`; this V and the next K come from the addresses given, which the caller
  // has at hand when the barriers open. often: see `multiply_keys`.
  template <bool often>
  CF_DEVICE bool score(Warp& warp, typename Warp::S& scores, typename Warp::Top& top, bool& moves,
                       int key0, bool plain, uint64 k_from, uint64 v_from) const {
    ptx::wait_for_copies<0>("K_copied");
    ready_tile<Config, Bc, Config::d, Traits::pitch>(t.K);
    ptx::sync_block("K_ready");                         // V may go
    if (plain) {
      copy_rows<Config, Bc, Config::d_v, Traits::pitch_v, true>(v_place, p.v, v_from, 0, Bc,
                                                                int(p.d_v));
    } else {
      copy_V(key0);
    }
    ptx::close_copies();
    const bool any = plain || task.own.any(key0, Bc);
    const bool there = one_scores<Config>() ? any && t.has_scores() : any;
    if (there) warp.template multiply_keys<often>(scores);
    if constexpr (Config::scaled) {
      if (there) warp.finish_scores(scores, t, p, key0);
    }
    if (!plain && there && !task.own.all(key0, Bc)) {
      if (key0 >= task.own.inner_first) {
        warp.template hide<false>(scores, task.keys, task.rows, key0);
      } else {
        warp.template hide<true>(scores, task.keys, task.rows, key0);
      }
    }
    if constexpr (Traits::parts == 2) moves = warp.softmax.find_top(scores, there, top);
    ptx::wait_for_copies<0>("V_copied");
    ready_tile<Config, Bc, Config::d_v, Traits::pitch_v>(t.V);
    if constexpr (hides_any<Config>()) forget_values(scores, there);
    // V is there; K may go. Warps that share rows must agree on whether their references move; the
    // others look at their scores later, for the products may still be on their way.
    if constexpr (Traits::parts == 2) {
      moves = ptx::sync_block_or(moves, "V_ready_and_moves");
    } else {
      ptx::sync_block("V_ready");
    }
    if (plain) {
      copy_rows<Config, Bc, Config::d, Traits::pitch, true>(k_place, p.k, k_from, 0, Bc, int(p.d));
    } else if (key0 + Bc < task.seen.end) {
      copy_K(task, key0 + Bc);
    }
    ptx::close_copies();
    return any;
  }

  // Zeroes the values of keys that mask or bias hide from all rows of the block: 0 * NaN is NaN.
  // there: whether the warp has scores of the tile.
  CF_DEVICE void forget_values(const typename Warp::S& scores, bool there) const {
    constexpr int parts = key_parts<Config>(), own = Bc / parts;    // keys of a warp
    const uint32 all = 0xFFFFFFFFu >> (32 - own / 4);
    const uint32 seen = there ? seen_columns<Warp::fragments, Warp::keys>(scores) : 0;
    if (!ptx::sync_block_or(seen != all && t.has_scores(), "some_unseen")) return;
    if (lane_id() < 4) t.seen[4 * warp_id() + lane_id()] = seen;
    ptx::sync_block("seen_written");
#pragma unroll 1
    for (int key = warp_id(); key < Bc; key += Config::warps) {
      const int part = key / own;
      if (SeenColumns(t.seen + 4 * part, Config::warps / parts, 4 * parts).has(key - part * own)) {
        continue;
      }
#pragma unroll 1
      for (int rest = 0; rest <= Traits::rests; rest += Bc) {
        for (int c = lane_id(); c < Config::d_v; c += 32) {
          t.V[(key + rest) * Traits::pitch_v + c] = typename Warp::T{};
        }
      }
    }
  }

  // From the scores of a tile to acc.
  CF_DEVICE void finish(Warp& warp, typename Warp::S& scores, typename Warp::Top& top, bool any,
                        bool moves) const {
    if constexpr (Traits::parts == 1) {
      if (!any) return;
      moves = __any_sync(0xFFFFFFFF, warp.softmax.find_top(scores, true, top));
    }
    if (moves) {
      warp.join_top(t.top, scores, any && t.has_scores(), top);
      warp.softmax.move_reference(top, scores, warp.acc);
    }
    if (any) warp.finish_tile(scores, t);
  }

  // All tiles from key0 on. Plain ones have a loop of their own.
  CF_DEVICE void walk_apart(Warp& warp, int key0) const {
    while (key0 < task.seen.end) {
      typename Warp::S scores;
      typename Warp::Top top;
      bool moves = false;
      const int stop = plain_end(key0);
      if (key0 + Bc > stop) {
        const bool any = score<false>(warp, scores, top, moves, key0, false, 0, 0);
        finish(warp, scores, top, any, moves);
        key0 += Bc;
        continue;
      }
      uint64 k_from = start_K(task, key0 + Bc), v_from = start_V(key0);
#pragma unroll 1
      do {
        score<true>(warp, scores, top, moves, key0, true, k_from, v_from);
        finish(warp, scores, top, true, moves);
        key0 += Bc;
        k_from += Bc * p.k.n;
        v_from += Bc * p.v.n;
      } while (key0 + Bc <= stop);
    }
  }

  // The same in one loop, with half the code to compile.
  CF_DEVICE void walk_together(Warp& warp, int key0) const {
    int stop = plain_end(key0);
    uint64 k_from = start_K(task, key0 + Bc), v_from = start_V(key0);
#pragma unroll 1
    for (; key0 < task.seen.end; key0 += Bc) {
      typename Warp::S scores;
      typename Warp::Top top;
      bool moves = false;
      const bool plain = key0 + Bc <= stop;
      const bool any = score<true>(warp, scores, top, moves, key0, plain, k_from, v_from);
      if (plain) {                                      // now, so that no register waits for it
        k_from += Bc * p.k.n;
        v_from += Bc * p.v.n;
      } else {
        stop = plain_end(key0 + Bc);
        k_from = start_K(task, key0 + 2 * Bc);
        v_from = start_V(key0 + Bc);
      }
      finish(warp, scores, top, any, moves);
    }
  }

  CF_DEVICE void walk(Warp& warp, int key0) const {
    if constexpr (Config::together) {
      walk_together(warp, key0);
    } else {
      walk_apart(warp, key0);
    }
  }
};

// The packed rows row0 ... row0 + Br of one key head, over the keys of one split.
template <typename Config>
CF_DEVICE void forward_sm80_tile(const ForwardParams& p,
                                      const ForwardSm80Tiles<Config>& t, int64 b, int64 head_k,
                                      int64 row0, int64 split) {
  using Traits = ForwardSm80Traits<Config>;
  constexpr int Br = Config::Br, Bc = Config::Bc;
  const Rows rows = open_rows(p, b, head_k * p.group, p.group, row0, Br);
  const TileKeys keys(p, rows, split * p.split_keys, (split + 1) * p.split_keys);
  const ForwardTask known = {rows, keys, SeenKeys(keys, rows, 0, Br),
                             SeenKeys(keys, rows, t.row0(), Traits::rows),
                             head_address(p.k, b, head_k), head_address(p.v, b, head_k), split};
  ForwardTask task = known;
  ptx::keep_in_memory(task);       // before there are copies to wait behind
  if (p.vector_bytes == 16 && p.group == 1) {
    copy_rows<Config, Br, Config::d, Traits::pitch_Q>(
        copy_place<Config, Br, Config::d, Traits::pitch_Q>(t.Q), p.q,
        copy_start<Config, Br, Config::d>(p.q, rows.base(p.q), row0), 0, rows.rows, int(p.d));
  } else {
    copy_any_rows<Config, Config::d, Traits::pitch_Q>(t.Q, Br, query_block(p, p.q, rows, p.d));
  }
  if constexpr (changes_scores<Config>()) {
    for (int r = int(threadIdx.x); r < Br; r += Traits::threads) {
      using Row = typename Traits::Row;
      t.rows[r] = open_score_row<Config, decltype(Row::slope)>(p, rows, r, keys.of_row(rows, r));
    }
  }
  const ForwardWalk<Config> walk(p, t, task);
  const int begin = known.seen.first / Bc * Bc;
  const bool any = begin < known.seen.end;
  if (any) walk.copy_K(known, begin);
  ptx::close_copies();
  ForwardWarp<Config> warp(t, p);
  ptx::wait_for_copies<0>("Q_copied");
  if constexpr (Config::split_Q) {
    ready_tile<Config, Br, Config::d, Traits::pitch_Q>(t.Q);
  } else {
    round_tile<Config, Br, Config::d, Traits::pitch_Q>(t.Q);
  }
  if (Config::keep_Q || !any) ptx::sync_block("Q_ready");  // and may go
  if (Config::keep_Q && any) warp.keep_Q();             // otherwise results take its place at once
  walk.walk(warp, begin);
  const int count = int(min(p.group * p.Nq - task.rows.row0, int64(Br)));
  store_warp(warp, t, p, task.rows, task.split, count);
}

// Tasks: tiles of query rows of a key head, each once per split of the keys.
template <typename Config>
CF_DEVICE void forward_sm80(const ForwardParams& p) {
  CF_DYNAMIC_SHARED(memory);
  const ForwardSm80Tiles<Config> t(memory);
  const int64 tiles = ceil_div(p.group * p.Nq, int64(Config::Br));
  for (int64 task = blockIdx.x; task < p.tasks; task += gridDim.x) {
    const SplitTile at = split_tile(p, task, p.splits, tiles, true);
    forward_sm80_tile<Config>(p, t, at.b, at.head_k, at.tile * Config::Br, at.split);
    ptx::sync_block("memory_free");                     // for the next task
  }
}

}  // namespace cf

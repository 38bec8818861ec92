// dq without tensor cores and without atomics: a thread owns rows and walks the keys.
#pragma once

#include "../attention/gradient.cuh"
#include "../attention/sums.cuh"
#include "keys.cuh"

namespace cf {

template <typename Config>
struct DqSimtTraits : KeyTraits<Config, true> {};

// The rows of a thread: what they are multiplied by, and dq of the keys of a tile.
template <typename Config>
struct GradientRows {
  using T = typename Config::element;
  static constexpr int R = DqSimtTraits<Config>::R, d = Config::d, d_v = Config::d_v;
  T q[R][d], dO[R][d_v], dq[R][d] = {};
  StateOfRow<T> state[R];    // lse is +inf for fully masked rows, so that their P is 0

  CF_DEVICE GradientRows(const BackwardParams& p, const Rows& rows) {
    load_owned<Config>(q, p.q, rows);
    load_owned<Config>(dO, p.dout, rows);
#pragma unroll
    for (int i = 0; i < R; ++i) {
      const int r = owned<Config>(i);
      state[i] = {inf<T>(), T(0)};
      if (r < rows.rows) {
        const uint64 from = row_state<T>(p, rows, r);
        state[i] = {at<const T>(from), at<const T>(from + p.state_rows * int(sizeof(T)))};
      }
    }
  }

  // dq += dS K of a chunk of keys, whose records are x.
  template <bool hides, int n>
  CF_DEVICE void add(const T (&x)[n], int key0, const ScoreRow<T> (&rows)[R], const Params& p,
                     const Scaling<T>& scaling) {
    constexpr int keys = Config::chunk, width = d + d_v;
#pragma unroll
    for (int i = 0; i < R; ++i) {
      T S[keys], dP[keys];
#pragma unroll
      for (int j = 0; j < keys; ++j) {
        S[j] = dot<d>(q[i], x + j * width);
        dP[j] = dot<d_v>(dO[i], x + j * width + d);
      }
      const KeysOfQuery<T, ScoreRow<T>, keys> view = {rows[i], key0};
      Gradient<T> g[keys];
      find_gradients<Config, hides>(g, S, dP, view, p, scaling, [&](int) { return state[i]; });
#pragma unroll
      for (int c = 0; c < d; ++c) {
        T part = T(0);
#pragma unroll
        for (int j = 0; j < keys; ++j) {
          if (!hides || g[j].S != -inf<T>()) part = fma(g[j].dU, x[j * width + c], part);
        }
        dq[i][c] += part;
      }
    }
  }
};

// dq of a tile of rows over the keys of a task, which may be one split of them.
template <typename Config>
CF_DEVICE void find_dq(const DqParams& p, const RowTask& task, int64 split,
                       typename Config::element* tile) {
  using T = typename Config::element;
  constexpr int R = DqSimtTraits<Config>::R, d = Config::d;
  constexpr int n = Config::chunk * DqSimtTraits<Config>::width;
  const Scaling<T> scaling = scaling_of<Config>(p);
  GradientRows<Config> own(p, task.rows);
  LongSum<T> total[R][d];
  walk_keys<Config, true>(
      p, task, tile,
      [&](int i, const KeyRange& range) {
        return open_gradient_row<Config, T>(p, task.rows, owned<Config>(i), range);
      },
      [&](auto hides, const T(&x)[n], int key0, const ScoreRow<T>(&rows)[R]) {
        own.template add<hides.value>(x, key0, rows, p, scaling);
      },
      [&] {
        ptx::keep_in_memory(total);
#pragma unroll
        for (int i = 0; i < R * d; ++i) {
          total[i / d][i % d].add(own.dq[i / d][i % d]);
          own.dq[i / d][i % d] = T(0);
        }
      });
  const int count = int(min(p.group * p.Nq - task.rows.row0, int64(Config::Br)));
  const Tensor to = p.key_splits == 1 ? p.dq : split_part<T>(p, p.dq_parts, d, split);
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int r = owned<Config>(i);
    if (r >= count) continue;
    const uint64 row = task.rows.address(to, r);
    // A fully masked row may have met a NaN beside others, which are not.
    const bool seen = own.state[i].lse != inf<T>();
#pragma unroll
    for (int c = 0; c < d; ++c) {
      at<T>(row + c * to.c) = seen ? total[i][c].value() * T(p.scale) : T(0);
    }
  }
}

template <typename Config>
CF_DEVICE void dq_simt(const DqParams& p) {
  using T = typename Config::element;
  CF_DYNAMIC_SHARED(memory);
  for_each_task<Config>(p, p.key_splits, p.split_keys, [&](const RowTask& task, int64 split) {
    find_dq<Config>(p, task, split, reinterpret_cast<T*>(memory));
  });
}

}  // namespace cf

// The online softmax of a thread's own rows, by chunks of keys.
//
// Sums over keys are short ones of a chunk, which are added to those of a tile, which are added to
// long sums: a chain of 2^17 additions would lose three digits.
#pragma once

#include "../attention/softmax.cuh"
#include "../attention/sums.cuh"
#include "keys.cuh"

namespace cf {

// m, l and acc of a row over the keys of a tile; acc has `values` columns.
template <typename T, int values>
struct RowSums {
  T m = lowest<T>(), l = T(0), acc[max(values, 1)] = {};

  CF_DEVICE void scale(T alpha) {
    l *= alpha;
#pragma unroll
    for (int c = 0; c < values; ++c) acc[c] *= alpha;
  }

  // P of scores; returns whether the reference has to move first. sum: of P.
  template <int n>
  CF_DEVICE bool exponentiate(const T (&S)[n], T (&P)[n], T& sum, const Passing<T>& passing,
                              T factor) const {
    T x[n];
#pragma unroll
    for (int j = 0; j < n; ++j) {
      x[j] = S[j] - m;
      P[j] = exp2_of(x[j], factor);
    }
    sum = sum_of(P);
    return passing.any(x, sum);
  }

  // The reference becomes the largest of the scores, if that is larger.
  template <int n>
  CF_DEVICE void move(const T (&S)[n], T factor) {
    T top = m;
#pragma unroll
    for (int j = 0; j < n; ++j) top = S[j] > top ? S[j] : top;
    scale(exp2_of(m - top, factor));
    m = top;
  }

  // A chunk of keys, whose values stand in the records x behind d columns each. hides: whether some
  // of the scores may be -inf, which values must not matter to.
  template <bool hides, int d, int n>
  CF_DEVICE void add(const T (&S)[n], const T* x, const Passing<T>& passing, T factor) {
    T P[n], sum;
    if (exponentiate(S, P, sum, passing, factor)) {
      move(S, factor);
      exponentiate(S, P, sum, passing, factor);
    }
    l += sum;
#pragma unroll
    for (int c = 0; c < values; ++c) {
      T part = T(0);
#pragma unroll
      for (int j = 0; j < n; ++j) {
        if (!hides || S[j] != -inf<T>()) part = fma(P[j], x[j * (d + values) + d + c], part);
      }
      acc[c] += part;
    }
  }
};

// The same over all keys.
template <typename T, int values>
struct LongRowSums {
  T m = lowest<T>();
  LongSum<T> l, acc[max(values, 1)];

  // Adds the sums of a tile, which start anew; their m goes on.
  CF_DEVICE void take(RowSums<T, values>& tile, T factor) {
    const T alpha = exp2_of(m - tile.m, factor);
    m = tile.m;
    take_one(l, tile.l, alpha);
#pragma unroll
    for (int c = 0; c < values; ++c) take_one(acc[c], tile.acc[c], alpha);
  }
  static CF_DEVICE void take_one(LongSum<T>& sum, T& part, T alpha) {
    sum.scale(alpha);
    sum.add(part);
    part = T(0);
  }
};

// The sums of a thread's R rows over all keys of a task. open: see walk_keys.
template <typename Config, int values, int R, typename T, typename Open>
CF_DEVICE void sum_over_keys(LongRowSums<T, values> (&total)[R], const Params& p,
                             const RowTask& task, T* tile, const Open& open) {
  constexpr int d = Config::d, n = Config::chunk, width = d + values;
  const T factor = T(Config::scaled ? LOG2_E : p.scale * LOG2_E);
  const Passing<T> passing(factor, T(p.lazy * LOG2_E));
  const Scaling<T> scaling = scaling_of<Config>(p);
  T q[R][d];
  load_owned<Config>(q, p.q, task.rows);
  RowSums<T, values> own[R];
  walk_keys<Config, (values > 0)>(
      p, task, tile, open,
      [&](auto hides, const T(&x)[n * width], int key0, const ScoreRow<T>(&rows)[R]) {
#pragma unroll
        for (int i = 0; i < R; ++i) {
          T S[n];
#pragma unroll
          for (int j = 0; j < n; ++j) S[j] = dot<d>(q[i], x + j * width);
          const KeysOfQuery<T, ScoreRow<T>, n> view = {rows[i], key0};
          if constexpr (Config::scaled) {
            finish_scores<Config>(S, view, p, scaling, [](int, T) {});
          }
          if constexpr (hides.value) hide_keys(S, view, -inf<T>());
          own[i].template add<hides.value, d>(S, x, passing, factor);
        }
      },
      [&] {
        ptx::keep_in_memory(total);
#pragma unroll
        for (int i = 0; i < R; ++i) total[i].take(own[i], factor);
      });
}

}  // namespace cf

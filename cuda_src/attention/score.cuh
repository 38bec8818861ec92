// From q.k to the score S that enters the softmax: scale, softcap, ALiBi, bias, masks, in this
// order; on whatever a thread has of a tile of scores, which it sees through a view (../view).
//
// A view has `count` elements, in an order in which loads and sums of one row follow each other.
// Element x is view.at(S, x), a score of the query view.row(x), a ScoreRow, and of the key
// view.key0 + view.key(x); all but key0 is known when the kernel is compiled. view.seen(x) says of
// `span` elements, those from x on, whether the key lies in the range that the query sees. `loads`
// elements are loaded together, so that their loads are on their way together.
#pragma once

#include "band.cuh"
#include "options.cuh"

namespace cf {

// What the scores of one query have in common.
template <typename T>
struct ScoreRow {
  int first, end;      // the visible keys by position
  int64 position;
  T slope;             // ALiBi's, of the head
  T log_l;             // see gradient.cuh
  uint64 bias, mask;   // where the row starts
};

template <typename Config, typename T>
CF_DEVICE ScoreRow<T> open_score_row(const Params& p, const Rows& rows, int r, KeyRange range) {
  ScoreRow<T> row = {range.first, range.end, 0, T(0), T(0), 0, 0};
  if (!changes_scores<Config>() || r >= rows.rows) return row;
  row.position = rows.position(r);
  if constexpr (has<Config>(BIAS)) row.bias = rows.address(p.bias, r);
  if constexpr (has<Config>(MASK)) row.mask = rows.address(p.mask, r);
  if constexpr (has<Config>(ALIBI)) {
    const int64 head = rows.head0 + rows.packed.head(r);
    row.slope = load<T>(head_address(p.slopes, rows.b, head), p.slopes.kind);
  }
  return row;
}

// scale, softcap and, for 16-bit types, its inverse: a division would err less than they can tell.
template <typename T>
struct Scaling {
  T scale, cap, per_cap;
};
template <typename Config, typename T = accumulator<typename Config::element>>
CF_DEVICE Scaling<T> scaling_of(const Params& p) {
  const T cap = T(p.softcap);
  const bool inverse = has<Config>(SOFTCAP) && sizeof(typename Config::element) == 2;
  return {T(p.scale), cap, inverse ? T(1) / cap : T(0)};
}

// S *= scale, behind the softcap. Never fused with what follows: in backward the score must be that
// which is in lse. derivative(x, by): element x changes by so much of what scale * q.k does.
template <typename Config, typename View, typename Scores, typename T, typename Derivative>
CF_DEVICE void scale_scores(Scores& S, const View& view, const Scaling<T>& scaling,
                            const Derivative& derivative) {
#pragma unroll
  for (int x = 0; x < View::count; ++x) {
    T& score = view.at(S, x);
    score = ptx::multiply(scaling.scale, score);
    if constexpr (has<Config>(SOFTCAP)) {
      const bool inverse = sizeof(typename Config::element) == 2;
      const T t = tanh(inverse ? score * scaling.per_cap : score / scaling.cap);
      score = ptx::multiply(scaling.cap, t);
      derivative(x, T(1) - t * t);
    }
  }
}

// S -= slope of the head * |position of the query - key|. The distance is rounded once: that of the
// first key comes in two parts, which are exact together below 2^47, less a small number.
template <typename View, typename Scores>
CF_DEVICE void add_alibi(Scores& S, const View& view) {
  using T = typename View::T;
#pragma unroll
  for (int x = 0; x < View::count; ++x) {
    const int64 distance = view.row(x).position - view.key0;
    const T high = T(distance), low = T(distance - int64(high));
    const T from = View::count == 1 ? high : high + (low - T(view.key(x)));
    view.at(S, x) -= view.row(x).slope * (from < T(0) ? -from : from);
  }
}

// What an element of bias or mask adds; -inf hides the key even if its score is NaN.
template <typename T, typename X>
CF_DEVICE T added_by(X x) {
  return T(widen(x));
}
template <typename T>
CF_DEVICE T added_by(unsigned char x) {
  return x != 0 ? T(0) : -inf<T>();
}

// S += the elements of an array, of which row(x).*start says where they begin. What no query sees
// need not exist.
template <typename X, typename View, typename Scores>
CF_DEVICE void add_array(Scores& S, const View& view, const Tensor& t,
                         uint64 ScoreRow<typename View::T>::*start) {
  using T = typename View::T;
#pragma unroll
  for (int x0 = 0; x0 < View::count; x0 += View::loads) {
    T added[View::loads];
#pragma unroll
    for (int i = 0; i < View::loads && x0 + i < View::count; ++i) {
      const ScoreRow<T>& row = view.row(x0 + i);
      const uint32 key = uint32(view.key0 - row.first + view.key(x0 + i));
      const uint64 from = row.*start + view.key0 * t.c;
      const bool seen = key < uint32(row.end - row.first);
      added[i] = seen ? added_by<T>(at<const X>(from + view.key(x0 + i) * t.c)) : -inf<T>();
    }
#pragma unroll
    for (int i = 0; i < View::loads && x0 + i < View::count; ++i) {
      T& score = view.at(S, x0 + i);
      score = added[i] != -inf<T>() ? score + added[i] : added[i];
    }
  }
}

// What comes behind the softcap, but for what positions hide.
template <typename Config, typename View, typename Scores>
CF_DEVICE void add_options(Scores& S, const View& view, const Params& p) {
  using Row = ScoreRow<typename View::T>;
  if constexpr (has<Config>(ALIBI)) add_alibi(S, view);
  if constexpr (has<Config>(BIAS)) {
    if (p.bias.kind == FLOAT16) {
      add_array<half_t>(S, view, p.bias, &Row::bias);
    } else if (p.bias.kind == BFLOAT16) {
      add_array<bfloat16_t>(S, view, p.bias, &Row::bias);
    } else if (p.bias.kind == FLOAT32) {
      add_array<float>(S, view, p.bias, &Row::bias);
    } else {
      add_array<double>(S, view, p.bias, &Row::bias);
    }
  }
  if constexpr (has<Config>(MASK)) add_array<unsigned char>(S, view, p.mask, &Row::mask);
}

// S = `hidden` where a query does not see a key by its position. A select: a hidden key may hold
// NaN.
template <typename View, typename Scores>
CF_DEVICE void hide_keys(Scores& S, const View& view, typename View::T hidden) {
#pragma unroll
  for (int x0 = 0; x0 < View::count; x0 += View::span) {
    const auto seen = view.seen(x0);
#pragma unroll
    for (int i = 0; i < View::span; ++i) {
      if (!seen.has(i)) view.at(S, x0 + i) = hidden;
    }
  }
}

// The scores of a view from its products.
template <typename Config, typename View, typename Scores, typename T, typename Derivative>
CF_DEVICE void finish_scores(Scores& S, const View& view, const Params& p,
                             const Scaling<T>& scaling, const Derivative& derivative) {
  scale_scores<Config>(S, view, scaling, derivative);
  add_options<Config>(S, view, p);
}

}  // namespace cf

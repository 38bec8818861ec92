// The probabilities rebuilt in the backward pass, and the gradient of the scores.
//
// P = exp(S - lse); dS = P * (dP - delta). Dao et al., "FlashAttention" (2022), appendix B.2.
//
// A sink is in lse, and so in P; nothing else in this pass knows of it but dsink.
//
// P carries the rounding error of lse, half a unit in its last place. Beside a bias of -3.4e38 for
// every key, ln l is lost, and P would be 1 for each of n keys. So for rows with an lse beyond
// LARGE_LSE, where P would lose more than float16 holds of it, the kernel `normalise` works m and l
// out once more, and P = exp(S - m - ln l). The keys of a call may be a part of all keys, and lse
// that of the whole. So m and l count only if they say the same as lse to its precision; otherwise
// P = exp(S - lse) stays.
#pragma once

#include "../view/accumulators.cuh"
#include "dbias_sums.cuh"
#include "score.cuh"
#include "softmax.cuh"

namespace cf {

// In float32 half a unit of it is 2^-11. In float64, too: there P would only lose digits.
constexpr double LARGE_LSE = 8192.;

// Of a row: P = exp(S - reference - log_l).
template <typename T>
struct Normaliser {
  T reference, log_l;
};

// Where it lies of row r, if the plan has normalisers.
template <typename T>
CF_DEVICE uint64 normaliser_address(const BackwardParams& p, const Rows& rows, int r) {
  const int64 head = rows.head0 + rows.packed.head(r);
  return p.normalisers
         + row_index(p, rows.b, head, rows.packed.query(r)) * int64(sizeof(Normaliser<T>));
}

// Whether the row's lse is too large to give P.
template <typename T>
CF_DEVICE bool is_large(T lse) {
  const T size = lse < T(0) ? -lse : lse;
  return size >= T(LARGE_LSE) && size < inf<T>();
}

// Whether m and l have to be looked at beside the lse of a row of this query head.
template <typename Config, typename T>
CF_DEVICE bool needs_sums(const BackwardParams& p, int64 head, T lse) {
  if constexpr (has<Config>(SINK) && hides_any<Config>()) {
    // As where mask or bias hide all keys; of a NaN lse does not tell.
    if (lse == sink_of<T>(p, head) || lse != lse) return true;
  }
  return is_large(lse);
}

// The normaliser of such a row, whose keys in this call sum to m and l.
template <typename Config, typename T>
CF_DEVICE Normaliser<T> normaliser_from(const BackwardParams& p, int64 head, T lse, T m, T l) {
  constexpr T unit = sizeof(T) == 8 ? T(2.220446049250313e-16) : T(1.1920929e-7f);
  if (has<Config>(SINK) && l == T(0)) return {-inf<T>(), T(0)};
  const RowEnd<T> end = close_row<Config>(p, head, true, m, l);
  const T log_l = log(end.l), difference = end.m + log_l - lse, size = lse < T(0) ? -lse : lse;
  const bool same = difference <= 2 * unit * size && difference >= -2 * unit * size;
  return is_large(lse) && same ? Normaliser<T>{end.m, log_l} : Normaliser<T>{lse, T(0)};
}

// Row r: from the kernel `normalise` if the plan has it, otherwise from lse alone.
template <typename T>
CF_DEVICE Normaliser<T> normaliser_of(const BackwardParams& p, const Rows& rows, int r) {
  if (p.normalisers == 0) return {at<const T>(rows.address(p.lse, r)), T(0)};
  return at<const Normaliser<T>>(normaliser_address<T>(p, rows, r));
}

// What exponents are taken against in row r; -inf: fully masked. With a sink lse does not say so.
template <typename Config>
CF_DEVICE auto reference_of_row(const BackwardParams& p, const Rows& rows, int r) {
  using T = accumulator<typename Config::element>;
  if constexpr (has<Config>(SINK)) {
    const int64 position = rows.position(r);
    const Range keys = visible_keys(p, position, position, rows.kv_len);
    if (keys.first >= keys.end) return -inf<T>();
  }
  return normaliser_of<T>(p, rows, r).reference;
}

// The row of scores of the backward pass.
template <typename Config, typename T>
CF_DEVICE ScoreRow<T> open_gradient_row(const BackwardParams& p, const Rows& rows, int r,
                                        KeyRange range) {
  ScoreRow<T> row = open_score_row<Config, T>(p, rows, r, range);
  if (has_large_lse<Config>() && p.normalisers != 0 && r < rows.rows) {
    row.log_l = normaliser_of<T>(p, rows, r).log_l;
  }
  return row;
}

// P of an exponent S - lse. 16-bit and TF32 probabilities are rounded far more coarsely than 2^x
// errs; in float64 the error of x in units of powers of 2 is felt only where P is small.
template <typename Config>
CF_DEVICE float probability(float x) {
  return Config::precision == 2 ? exp(x) : exp2(x * 1.44269504f);
}
template <typename Config>
CF_DEVICE double probability(double x) {
  return exp2_of(x, 1.4426950408889634);
}

// What follows is for scores [M, N] of fragments with keys as rows, in registers; lse and delta of
// the rows of queries lie in shared memory, from the lane's first row on.

// q.k -> S - lse. The score is rounded by itself, so that P is 1 where a key is all there is,
// however large the score.
template <int M, int N, typename Scores, typename T>
CF_DEVICE void subtract_lse(Scores& S, T scale, const T* lse) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const FourRows<T> reference(lse, j);
#pragma unroll
    for (int x = 0; x < M * 8; ++x) {
      T& score = element(S, x / 8, j, x % 8);
      score = ptx::multiply(scale, score) - reference[x % 8];
    }
  }
}

// S - lse -> P.
template <typename Config, int M, int N, typename Scores>
CF_DEVICE void exponentiate(Scores& S) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
#pragma unroll
    for (int x = 0; x < M * 8; ++x) {
      auto& score = element(S, x / 8, j, x % 8);
      score = probability<Config>(score);
    }
  }
}

// dP -> dS = P * (dP - delta).
template <int M, int N, typename Scores, typename T>
CF_DEVICE void differentiate(Scores& dP, const Scores& P, const T* delta) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const FourRows<T> shift(delta, j);
#pragma unroll
    for (int x = 0; x < M * 8; ++x) {
      T& dS = element(dP, x / 8, j, x % 8);
      dS = element(P, x / 8, j, x % 8) * (dS - shift[x % 8]);
    }
  }
}

// P of one score, and the gradients of the score behind the softcap and before it: 0 where a key is
// hidden, whatever dP is there. slope: the derivative of the softcap.
template <typename T>
struct Gradient {
  T S, P, dS, dU;
};
template <typename Config, bool hides, typename Row, typename T>
CF_DEVICE Gradient<T> gradient_from(T S, T dP, const Row& row, T lse, T delta, T slope) {
  T exponent = S - lse;
  if constexpr (has_large_lse<Config>()) exponent -= row.log_l;
  const T P = probability<Config>(exponent);
  const T dS = hides && S == -inf<T>() ? T(0) : P * (dP - delta);
  return {S, P, dS, dS != T(0) ? dS * slope : dS};
}

// The same from q.k.
template <typename Config, typename T>
CF_DEVICE Gradient<T> gradient_of(const Params& p, const ScoreRow<T>& row,
                                  const Scaling<T>& scaling, T S, T dP, T lse, T delta, int key) {
  const OneScore<T, ScoreRow<T>> view = {row, key};
  T slope = T(1);
  finish_scores<Config>(S, view, p, scaling, [&](int, T by) { slope = by; });
  hide_keys(S, view, -inf<T>());
  return gradient_from<Config, true>(S, dP, row, lse, delta, slope);
}

// The same of a view of scores. hides: whether any key may be hidden from its row; state(x): lse
// and delta of the row of element x.
template <typename T>
struct StateOfRow {
  T lse, delta;
};
template <typename Config, bool hides, int n, typename View, typename T, typename State>
CF_DEVICE void find_gradients(Gradient<T> (&g)[n], T (&S)[n], const T (&dP)[n], const View& view,
                              const Params& p, const Scaling<T>& scaling, const State& state) {
  T slope[n];
#pragma unroll
  for (int x = 0; x < n; ++x) slope[x] = T(1);
  finish_scores<Config>(S, view, p, scaling, [&](int x, T by) { slope[x] = by; });
  if constexpr (hides) hide_keys(S, view, -inf<T>());
#pragma unroll
  for (int x = 0; x < n; ++x) {
    const StateOfRow<T> row = state(x);
    g[x] = gradient_from<Config, hides>(S[x], dP[x], view.row(x), row.lse, row.delta, slope[x]);
  }
}

// With options. q.k -> P, and dP -> dS but for the factor P; both stay 0 where a key is hidden,
// whatever dP is there. view: of these scores. hides: whether positions hide any. rows_of_keys(S):
// called with the scores, to see which keys are hidden.
template <typename Config, int M, int N, typename Scores, typename View, typename T, typename Seen>
CF_DEVICE void rebuild_scores(Scores& S, Scores& dP, const View& view, const BackwardParams& p,
                              const Scaling<T>& scaling, const T* lse, const T* delta, bool hides,
                              const Seen& seen) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const FourRows<T> shift(delta, j);
#pragma unroll
    for (int x = 0; x < M * 8; ++x) element(dP, x / 8, j, x % 8) -= shift[x % 8];
  }
  finish_scores<Config>(S, view, p, scaling, [&](int x, T by) { view.at(dP, x) *= by; });
  if (hides) hide_keys(S, view, -inf<T>());
  seen(S);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const FourRows<T> reference(lse, j);
#pragma unroll
    for (int x = 0; x < M * 8; ++x) {
      T& score = element(S, x / 8, j, x % 8);
      T& rest = element(dP, x / 8, j, x % 8);
      const bool hidden = score == -inf<T>();
      rest = hidden ? T(0) : rest;
      // A row with a NaN for its lse has none for the keys that it does not see, whose dbias is the
      // sum of other rows, too.
      if (!sums_dbias<Config>() || !hidden) score -= reference[x % 8];
    }
  }
  if constexpr (has_large_lse<Config>()) {
    if (p.normalisers != 0) subtract_log_l(S, view);
  }
}

// S -= ln l, which is 0 in all but a few rows.
template <typename View, typename Scores>
CF_DEVICE void subtract_log_l(Scores& S, const View& view) {
#pragma unroll
  for (int x0 = 0; x0 < View::count; x0 += View::loads) {
    bool some = false;
#pragma unroll
    for (int i = 0; i < View::loads; ++i) some = some || view.row(x0 + i).log_l != 0;
    if (!some) continue;
#pragma unroll
    for (int i = 0; i < View::loads; ++i) view.at(S, x0 + i) -= view.row(x0 + i).log_l;
  }
}

}  // namespace cf

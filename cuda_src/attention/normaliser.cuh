// Rows whose lse cannot hold ln l: what backward takes in the place of it.
//
// P = exp(S - lse) carries the rounding error of lse, half a unit in its last place. Beside a bias
// of -3.4e38 for every key, ln l is lost, and P would be 1 for each of n keys. So for rows with an
// lse beyond LARGE_LSE, where P would lose more than float16 holds of it, the kernel `normalise`
// works m and l out once more, and P = exp(S - m - ln l).
//
// The keys of a call may be a part of all keys, and lse that of the whole. So m and l count only if
// they say the same as lse to its precision; otherwise P = exp(S - lse) stays.
#pragma once

#include "scores.cuh"

namespace cf {

// In float32 half a unit of it is 2^-11. In float64, too: there P would only lose digits.
constexpr double LARGE_LSE = 8192.;

// Of a row: P = exp(S - reference - log_l).
template <typename T>
struct Normaliser {
  T reference, log_l;
};

template <typename T>
CF_DEVICE uint64 normaliser_address(const BackwardParams& p, int64 b, int64 head, int64 i) {
  return p.normalisers + ((b * p.heads_q + head) * p.Nq + i) * int64(sizeof(Normaliser<T>));
}

// Whether the row's lse is too large to give P.
template <typename T>
CF_DEVICE bool is_large(T lse) {
  const T size = lse < T(0) ? -lse : lse;
  return size >= T(LARGE_LSE) && size < inf<T>();
}

// Row r: from the kernel `normalise` if the plan has it, otherwise from lse alone.
template <typename T>
CF_DEVICE Normaliser<T> normaliser_of(const BackwardParams& p, const Rows& rows, int r) {
  if (p.normalisers == 0) return {at<const T>(rows.address(p.lse, r)), T(0)};
  const int64 head = rows.head0 + rows.packed.head(r);
  return at<const Normaliser<T>>(normaliser_address<T>(p, rows.b, head, rows.packed.query(r)));
}

// The row of scores of the backward pass.
template <typename Config, typename T>
CF_DEVICE ScoreRow<T> open_gradient_row(const BackwardParams& p, const Rows& rows, int r,
                                        KeyRange range) {
  ScoreRow<T> row = open_score_row<Config, T>(p, rows, r, range);
  if constexpr (Config::features) {
    if (p.normalisers != 0 && r < rows.rows) row.log_l = normaliser_of<T>(p, rows, r).log_l;
  }
  return row;
}

}  // namespace cf

// The online softmax of one row: when its reference moves, and how it ends.
//
// Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), algorithm 3;
// Dao, "FlashAttention-2" (2023), algorithm 1. A tile of keys whose scores are S moves on
//
//     m_new = max(m, rowmax(S));  alpha = exp(m - m_new);  P = exp(S - m_new)
//     l = alpha l + rowsum(P);    acc = alpha acc + P V
//
// m is lazy: it moves only where the maximum passes it by `lazy`. The division by l at the end
// cancels any common reference; P stays below exp(lazy). Scores may be in other units than natural
// ones: exp(S - m) is 2^(factor (S - m)), and the factor is positive.
#pragma once

#include "exp2.cuh"
#include "options.cuh"
#include "workspace.cuh"

namespace cf {

constexpr double LOG2_E = 1.4426950408889634;

// Kernels for 16-bit types keep a reference as a rounded power of 2, m_ref = factor m, so that
// P = 2^(factor S - m_ref) costs one multiply-add. That is not rounded, and m_ref is: the largest P
// is 2 to the power of the rounding error. Up to LARGE that is 2^-15 at most, less than these types
// can tell from 1, and anything for scores of 1e11. Rows beyond, and rows that have seen no key,
// have LOWEST for m_ref: it brings them to where references move in every tile, where m is taken
// off their scores first.
constexpr float LARGE = 1024.f, LOWEST = -3.4028234663852886e38f;

// Maximum and sum over the four threads that share a row.
template <typename T>
CF_DEVICE T row_max(T x) {
  for (int step = 1; step < 4; step *= 2) {
    const T other = __shfl_xor_sync(0xFFFFFFFF, x, step);
    x = other > x ? other : x;
  }
  return x;
}
template <typename T>
CF_DEVICE T row_sum(T x) {
  for (int step = 1; step < 4; step *= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, step);
  return x;
}

// Whether a row that reaches `top` must move its reference. A NaN never does; it shows up in P.
template <typename T>
CF_DEVICE bool passes(T top, T m, T factor, T lazy) {
  return m == -inf<T>() ? top != m : (top - m) * factor > lazy;
}

// Whether a row that reaches `top` may have to, by one multiply-add from its reference as a power
// of 2 (see PowerReference): yes where it must, and in rows without such a reference.
template <typename Config>
CF_DEVICE bool may_pass(float top, float factor, float m_ref, float lazy) {
  // Beside a large bias all scores of a row may lie below LOWEST / factor.
  if constexpr (has_large_lse<Config>()) top = fmaxf(top, -1e38f);
  return fmaf(top, factor, -m_ref) > lazy;
}

// A reference for rows that have seen no key: S - m of any score is 0 or without bounds.
template <typename T>
CF_HOST_DEVICE constexpr T lowest() {
  return sizeof(T) == 8 ? T(-1.7976931348623157e308) : T(LOWEST);
}

// Whether a row has to move its reference, told from S - m of some keys and the sum of their P, and
// not from a maximum. factor: as above; lazy: in powers of 2.
template <typename T>
struct Passing;
// 2^x is infinite where x is too large, so that the sum says all. A NaN says yes.
template <>
struct Passing<float> {
  float most;

  CF_DEVICE Passing(float, float lazy) : most(exp2(lazy)) {}
  template <int n>
  CF_DEVICE bool any(const float (&)[n], float sum) const {
    return !(sum <= most);
  }
};
// 2^x of doubles says nothing where x is too large. The upper halves of numbers are in their order,
// as integers, which do not hold up the doubles' pipe; those of negative numbers are below.
template <>
struct Passing<double> {
  int most;

  CF_DEVICE Passing(double factor, double lazy) : most(upper(lazy / factor)) {}
  static CF_DEVICE int upper(double x) { return int(ptx::double_to_bits(x) >> 32); }
  template <int n>
  CF_DEVICE bool any(const double (&x)[n], double) const {
    int top = upper(x[0]);
#pragma unroll
    for (int i = 1; i < n; ++i) top = max(top, upper(x[i]));
    return top >= most;
  }
};

// What a row's sums are multiplied by when its reference goes from m to m_new.
template <typename T>
CF_DEVICE T alpha_of(T m, T m_new, T factor) {
  return m == -inf<T>() ? T(0) : exp2_of(m - m_new, factor);
}

// What m is, as a reference: nothing visible yet is 0, so that exp(-inf - m_ref) is 0.
template <typename T>
CF_DEVICE T reference_of(T m) {
  return m == -inf<T>() ? T(0) : m;
}

// The same as a power of 2; `shift` is taken off the scores of this tile beforehand.
struct PowerReference {
  float m_ref, shift;

  CF_DEVICE PowerReference(float m, float power) {
    const bool usual = fabsf(power) < LARGE;
    m_ref = usual ? power : LOWEST;
    shift = usual ? 0.f : reference_of(m);
  }
  // What is taken off factor * S.
  static CF_DEVICE float after(float m_ref) { return m_ref == LOWEST ? 0.f : m_ref; }
};

// 1 / x for x that are no denormals; for results of 16 bits to one unit in the last place of float.
template <typename Element>
CF_DEVICE accumulator<Element> reciprocal(accumulator<Element> x) {
  if constexpr (sizeof(Element) == 2) return ptx::reciprocal_approx(x);
  return 1 / x;
}

// A row at its end: out = factor * acc, 0 if it sees no key.
template <typename T>
struct RowEnd {
  T m, l, factor;

  CF_DEVICE T lse() const { return l != T(0) ? m + log(l) : -inf<T>(); }
};

// The logit that joins the denominator of a head's rows; -inf: none does.
template <typename T>
CF_DEVICE T sink_of(const Params& p, int64 head) {
  return at<const T>(p.sink + head * int64(sizeof(T)));
}

// A row at its end, from its keys alone.
template <typename Config, typename T>
CF_DEVICE RowEnd<T> close_keys(bool real, T m, T l) {
  l = real ? l : T(0);
  return {m, l, l != T(0) ? reciprocal<typename Config::element>(l) : T(0)};
}

// The same with a sink: l' = l exp(m - m') + exp(sink - m'), where m' is the larger of the two.
template <typename Config, typename T>
CF_DEVICE RowEnd<T> join_sink(T sink, T m, T l) {
  const T keys = l != T(0) ? m : -inf<T>(), top = sink > keys ? sink : keys;
  const T scale = exp(keys - reference_of(top));
  const T sum = l * scale + exp(sink - reference_of(top));
  const T inverse = sum != T(0) ? reciprocal<typename Config::element>(sum) : T(0);
  return {top, sum, l != T(0) ? scale * inverse : T(0)};
}

// All keys of a row have been seen. m: of scores in natural units, rounded as in the backward pass,
// or large ones and their lse would not cancel. real: whether the row is one of q_lens. head: the
// query head.
template <typename Config, typename T>
CF_DEVICE RowEnd<T> close_row(const Params& p, int64 head, bool real, T m, T l) {
  if constexpr (has<Config>(SINK)) {
    if (real) return join_sink<Config>(sink_of<T>(p, head), m, l);
  }
  return close_keys<Config>(real, m, l);
}

// The same of the keys of one split, if they are split: the sink counts once, behind all of them.
template <typename Config, typename T>
CF_DEVICE RowEnd<T> finish_row(const ForwardParams& p, int64 head, bool real, T m, T l) {
  if (has<Config>(SINK) && p.splits > 1) return close_keys<Config>(real, m, l);
  return close_row<Config>(p, head, real, m, l);
}

// lse of row r, or m and l of one split of its keys: beside a large m there is no room for ln l.
// l = 0: the row sees none of them.
template <typename T>
CF_DEVICE void store_end(const ForwardParams& p, const Rows& rows, int r, int64 split,
                         const RowEnd<T>& end) {
  if (p.splits == 1) {
    if (p.lse.address != 0) at<T>(rows.address(p.lse, r)) = end.lse();
    return;
  }
  const T m = end.l != T(0) ? end.m : -inf<T>();
  at<T>(rows.address(split_part<T>(p, p.lse_partial, 1, split), r)) = m;
  at<T>(rows.address(split_part<T>(p, p.l_partial, 1, split), r)) = end.l;
}

}  // namespace cf

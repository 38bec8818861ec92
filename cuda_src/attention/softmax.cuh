// The recurrence of the online softmax, and the probabilities rebuilt in the backward pass.
//
// Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), algorithm 3;
// Dao, "FlashAttention-2" (2023), algorithm 1.
#pragma once

#include "normaliser.cuh"

namespace cf {

// Kernels for 16-bit types keep a reference as a rounded power of 2. Up to LARGE that is off by
// 2^-15 at most, less than these types can tell from 1; LOWEST stands for what is no such
// reference.
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

// m and l of the rows that a thread works on; the four threads of a row hold the same.
template <typename Config>
struct Statistics {
  using T = accumulator<typename Config::element>;
  T m[Own<Config>::rows], l[Own<Config>::rows];

  CF_DEVICE Statistics() {
#pragma unroll
    for (int i = 0; i < Own<Config>::rows; ++i) {
      m[i] = -inf<T>();
      l[i] = T(0);
    }
  }
};

// One row of a key tile: P from S, m and l move on; returns alpha.
// m_new = max(m, rowmax(S)); m_ref = 0 if m_new == -inf else m_new; alpha = exp(m - m_ref);
// P = exp(S - m_ref); l = alpha l + rowsum(P).
// The reference is lazy: it moves only when the maximum passes it by `lazy`. The division by l at
// the end cancels any common reference; P stays below exp(lazy).
template <typename Config, typename T>
CF_DEVICE T softmax_step(const T* S, typename Config::element* P, T& m, T& l, T lazy) {
  constexpr int lanes = Own<Config>::lanes;
  T m_new = -inf<T>();
  for (int j = Own<Config>::column(); j < Config::Bc; j += lanes) {
    m_new = S[j] > m_new ? S[j] : m_new;                // a NaN shows up in P
  }
  m_new = row_max(m_new);
  m_new = m_new > m + lazy ? m_new : m;
  const T m_ref = m_new == -inf<T>() ? T(0) : m_new;    // nothing visible yet
  const T alpha = exp(m - m_ref);
  T sum = T(0);
  for (int j = Own<Config>::column(); j < Config::Bc; j += lanes) {
    const T x = exp(S[j] - m_ref);
    P[j] = to_operand<Config>(x);
    sum += x;                                           // of the unrounded P
  }
  m = m_new;
  l = alpha * l + row_sum(sum);
  return alpha;
}

// What the backward pass knows of one score.
template <typename T>
struct Gradient {
  T S, P;
  T dS;        // of the score behind the softcap: 0 wherever S is -inf, so that no NaN gets out
  T dU;        // of scale * qk, before the softcap
};

// P = exp(S - lse); dS = P * (dP - delta). Dao et al., "FlashAttention" (2022), appendix B.2.
// lse and row.log_l are those of a Normaliser.
template <typename Config, typename T>
CF_DEVICE Gradient<T> softmax_backward(const Params& p, const ScoreRow<T>& row, T qk, T dP, T lse,
                                       T delta, int key) {
  T slope;
  const T S = score<Config>(p, row, qk, key, slope);
  const T P = exp(Config::features ? S - lse - row.log_l : S - lse);
  const T dS = S == -inf<T>() ? T(0) : P * (dP - delta);
  return {S, P, dS, dS != T(0) ? dS * slope : dS};
}

}  // namespace cf

// The online softmax of rows in shared memory, four threads a row.
#pragma once

#include "../attention/softmax.cuh"
#include "../attention/score.cuh"
#include "../view/accumulators.cuh"
#include "tiles.cuh"

namespace cf {

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
template <typename Config, typename T>
CF_DEVICE T softmax_step(const T* S, typename Config::element* P, T& m, T& l, T lazy) {
  constexpr int lanes = Own<Config>::lanes;
  constexpr T factor = T(LOG2_E);
  T top = -inf<T>();
  for (int j = Own<Config>::column(); j < Config::Bc; j += lanes) top = S[j] > top ? S[j] : top;
  top = row_max(top);
  const T m_new = passes(top, m, factor, lazy * factor) ? top : m;
  const T m_ref = reference_of(m_new), alpha = alpha_of(m, m_new, factor);
  T sum = T(0);
  for (int j = Own<Config>::column(); j < Config::Bc; j += lanes) {
    const T x = exp2_of(S[j] - m_ref, factor);
    P[j] = to_operand<Config>(x);
    sum += x;                                           // of the unrounded P
  }
  m = m_new;
  l = alpha * l + row_sum(sum);
  return alpha;
}

}  // namespace cf

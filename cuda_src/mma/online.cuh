// The online softmax of rows whose scores lie in accumulators: `tile/softmax.cuh` in registers.
//
// Scores stay q.k here; `scale` and the base of the exponential meet in one factor, so that
// P = 2^(factor S - factor m) costs one multiply-add and one exponential. Both the factor and so
// the scale must be positive.
#pragma once

#include "../tile/softmax.cuh"
#include "exp2.cuh"
#include "fragment.cuh"

namespace cf {

// Rows of a warp: `fragments` times 16, of which a lane has two each, g and g + 8. Its l is the sum
// over the columns that it has itself.
template <typename Config, int fragments_>
struct OnlineSoftmax {
  using F = Fragments<Config>;
  using T = typename F::Sum;
  static constexpr int fragments = fragments_;
  T m[fragments][2], l[fragments][2];
  T factor, lazy;          // log2(e) scale; how far q.k may pass m

  CF_DEVICE explicit OnlineSoftmax(const Params& p)
      : factor(ptx::kept(T(p.scale * 1.4426950408889634))), lazy(ptx::kept(T(p.lazy / p.scale))) {
#pragma unroll
    for (int i = 0; i < 2 * fragments; ++i) {
      m[i / 2][i % 2] = -inf<T>();
      l[i / 2][i % 2] = T(0);
    }
  }

  // The reference in the exponent; 0 while nothing was visible.
  CF_DEVICE T reference(T m_) const { return m_ == -inf<T>() ? T(0) : m_ * factor; }

  // Each lane's largest scores, and whether any of them passes m by more than `lazy`. there:
  // whether there are scores at all.
  template <int keys>
  CF_DEVICE bool find_top(const typename F::C (&S)[fragments][keys], bool there,
                          T (&top)[fragments][2]) const {
    bool passes = false;
#pragma unroll
    for (int i = 0; i < 2 * fragments; ++i) {
      top[i / 2][i % 2] = there ? lane_max(S[i / 2], i % 2) : -inf<T>();
      passes = passes || top[i / 2][i % 2] > m[i / 2][i % 2] + lazy;
    }
    return passes;
  }

  // m_new = max(m, rowmax(S)) where that passes m by more than `lazy`; l and acc follow. top: the
  // rows' maxima. Each row decides for itself: calling this is a matter of speed only, as long as
  // it is called where a row passes.
  template <int columns>
  CF_DEVICE void move_reference(const T (&top)[fragments][2],
                                typename F::C (&acc)[fragments][columns]) {
#pragma unroll
    for (int i = 0; i < 2 * fragments; ++i) {
      T& m_row = m[i / 2][i % 2];
      const T highest = top[i / 2][i % 2];
      const T m_new = highest > m_row + lazy ? highest : m_row;
      const T alpha = m_row == -inf<T>() ? T(0) : exp2(reference(m_row) - reference(m_new));
      m_row = m_new;
      l[i / 2][i % 2] *= alpha;
#pragma unroll
      for (int n = 0; n < columns; ++n) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (row_step(e) == 8 * (i % 2)) acc[i / 2][n].x[e] *= alpha;
        }
      }
    }
  }

  // One tile's way from S to P and to l, in as many pieces as suit the products around it.
  struct Exponentials {
    T factor, m_ref[fragments][2], sum[fragments][2];

    CF_DEVICE explicit Exponentials(const OnlineSoftmax& softmax) : factor(softmax.factor) {
#pragma unroll
      for (int i = 0; i < 2 * fragments; ++i) {
        m_ref[i / 2][i % 2] = softmax.reference(softmax.m[i / 2][i % 2]);
        sum[i / 2][i % 2] = T(0);
      }
    }

    // S -> P of the keys of fragment j, elements first ... end of the lane's.
    template <int keys>
    CF_DEVICE void take(typename F::C (&S)[fragments][keys], int j, int first, int end) {
#pragma unroll
      for (int x = 0; x < 8 * fragments; ++x) {
        if (x < first || x >= end) continue;
        const int i = x / 8, e = x % 8, half = row_step(e) / 8;
        T& value = S[i][j].x[e];
        value = exp2(value * factor - m_ref[i][half]);
        sum[i][half] += value;                          // of the unrounded P
      }
    }
  };

  // S -> P of all keys; l += rowsum(P).
  template <int keys>
  CF_DEVICE void exponentials(typename F::C (&S)[fragments][keys]) {
    Exponentials e(*this);
#pragma unroll
    for (int j = 0; j < keys; ++j) e.take(S, j, 0, 8 * fragments);
    add_sums(e);
  }
  CF_DEVICE void add_sums(const Exponentials& e) {
#pragma unroll
    for (int i = 0; i < 2 * fragments; ++i) l[i / 2][i % 2] += e.sum[i / 2][i % 2];
  }

  // The largest of a lane's scores in one row; a NaN among them shows up in P.
  template <int keys>
  static CF_DEVICE T lane_max(const typename F::C (&S)[keys], int half) {
    float top = -inf<float>();
#pragma unroll
    for (int j = 0; j < keys; ++j) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (row_step(e) == 8 * half) top = fmaxf(top, rank(S[j].x[e]));
      }
    }
    return from_rank(top, T(0));
  }
  // What scores are compared by. The upper halves of doubles order like floats (infinities, which
  // are NaN there, are passed over): a reference may be 20 bits of the maximum, and comparing
  // floats does not hold up the pipe of the doubles.
  static CF_DEVICE float rank(float x) { return x; }
  static CF_DEVICE float rank(double x) {
    return ptx::bits_to_float(uint32(ptx::double_to_bits(x) >> 32));
  }
  static CF_DEVICE float from_rank(float x, float) { return x; }
  static CF_DEVICE double from_rank(float x, double) {
    const uint64 bits = uint64(ptx::float_to_bits(x)) << 32;
    return x == -inf<float>() ? -inf<double>() : ptx::bits_to_double(bits);
  }
};

}  // namespace cf

// The online softmax of rows whose scores lie in accumulators: `attention/softmax.cuh` in
// registers.
//
// Scores stay q.k here; `scale` and the base of the exponential meet in one factor, which must be
// positive. P = 2^(factor (S - m)) in the wide types: 1 where S is m. In 16-bit types it is
// 2^(factor S - m_ref).
#pragma once

#include "../attention/softmax.cuh"
#include "fragment.cuh"

namespace cf {

// Rows of a warp: `fragments` times 16, of which a lane has two each, g and g + 8. Its l is the sum
// over the columns that it has itself.
template <typename Config, int fragments_>
struct OnlineSoftmax {
  using F = Fragments<Config>;
  using T = typename F::Sum;
  static constexpr int fragments = fragments_;
  static constexpr bool narrow = sizeof(typename Config::element) == 2;
  T m[fragments][2], l[fragments][2];
  T m_ref[fragments][2];   // in narrow types
  T factor, lazy;          // log2(e) scale; how far factor q.k may pass factor m

  CF_DEVICE explicit OnlineSoftmax(const Params& p)
      : factor(ptx::kept(T(p.scale * LOG2_E))),
        lazy(ptx::kept(T(p.lazy * LOG2_E))) {
#pragma unroll
    for (int i = 0; i < 2 * fragments; ++i) {
      m[i / 2][i % 2] = -inf<T>();
      m_ref[i / 2][i % 2] = T(LOWEST);
      l[i / 2][i % 2] = T(0);
    }
  }

  // What is taken off S before the multiplication, in wide types, and after it, in narrow ones.
  CF_DEVICE T before(int i) const { return narrow ? T(0) : reference_of(m[i / 2][i % 2]); }
  CF_DEVICE T after(int i) const {
    return narrow ? T(PowerReference::after(float(m_ref[i / 2][i % 2]))) : T(0);
  }

  // Each lane's largest scores, and whether any of them passes m by more than `lazy`. there:
  // whether there are scores at all.
  template <int keys>
  CF_DEVICE bool find_top(const typename F::C (&S)[fragments][keys], bool there,
                          T (&top)[fragments][2]) const {
    bool passes = false;
#pragma unroll
    for (int i = 0; i < 2 * fragments; ++i) {
      const T x = there ? lane_max(S[i / 2], i % 2) : -inf<T>();
      top[i / 2][i % 2] = x;
      if constexpr (narrow) {
        passes = passes || fmaf(x, factor, -m_ref[i / 2][i % 2]) > lazy;
      } else {
        passes = passes || cf::passes(x, m[i / 2][i % 2], factor, lazy);
      }
    }
    return passes;
  }

  // Each lane's largest scores to the last bit.
  template <int keys>
  static CF_DEVICE void find_exact_top(const typename F::C (&S)[fragments][keys],
                                       T (&top)[fragments][2]) {
#pragma unroll
    for (int i = 0; i < 2 * fragments; ++i) {
      T x = -inf<T>();
#pragma unroll
      for (int e = 0; e < 8 * keys; ++e) {
        const T score = S[i / 2][e / 8].x[e % 8];
        if (row_step(e % 8) == 8 * (i % 2)) x = score > x ? score : x;
      }
      top[i / 2][i % 2] = x;
    }
  }

  // m_new = max(m, rowmax(S)) where that passes m by more than `lazy`; l and acc follow. top: the
  // rows' maxima. Each row decides for itself: calling this is a matter of speed only, as long as
  // it is called where a row passes, and in every tile of rows that are LARGE.
  template <int keys, int columns>
  CF_DEVICE void move_reference(const T (&top)[fragments][2],
                                typename F::C (&S)[fragments][keys],
                                typename F::C (&acc)[fragments][columns]) {
#pragma unroll
    for (int i = 0; i < 2 * fragments; ++i) {
      T& m_row = m[i / 2][i % 2];
      const T highest = top[i / 2][i % 2];
      const T m_new = cf::passes(highest, m_row, factor, lazy) ? highest : m_row;
      const T alpha = alpha_of(m_row, m_new, factor);
      m_row = m_new;
      if constexpr (narrow) keep_reference(i, m_new * factor, S[i / 2]);
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

  // power = factor m of row i, whose part of S is given: S - m where that is not a usual m_ref.
  template <int keys>
  CF_DEVICE void keep_reference(int i, T power, typename F::C (&S)[keys]) {
    const PowerReference reference{float(m[i / 2][i % 2]), float(power)};
    m_ref[i / 2][i % 2] = T(reference.m_ref);
    const T shift = T(reference.shift);
#pragma unroll
    for (int x = 0; x < 8 * keys; ++x) {
      if (row_step(x % 8) == 8 * (i % 2)) S[x / 8].x[x % 8] -= shift;
    }
  }

  // One tile's way from S to P and to l, in as many pieces as suit the products around it.
  struct Exponentials {
    T factor, before[fragments][2], after[fragments][2], sum[fragments][2];

    CF_DEVICE explicit Exponentials(const OnlineSoftmax& softmax) : factor(softmax.factor) {
#pragma unroll
      for (int i = 0; i < 2 * fragments; ++i) {
        before[i / 2][i % 2] = softmax.before(i);
        after[i / 2][i % 2] = softmax.after(i);
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
        if constexpr (narrow) {
          value = exp2(fmaf(value, factor, -after[i][half]));
        } else {
          value = exp2_of(value - before[i][half], factor);
        }
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
  // are NaN there, are passed over): 20 bits of the maximum tell when to look for it, and comparing
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

// From products to P and dS, in the registers of the warps of the fused backward kernel.
#pragma once

#include "exp2.cuh"
#include "walk.cuh"

namespace cf {

// What one warp works on.
template <typename Config>
struct Share {
  using Traits = BackwardSm80Traits<Config>;
  static constexpr int side = Traits::strips * Config::parts;        // warps of a role
  static CF_DEVICE int role() { return Config::roles == 1 ? 0 : 1 - warp_id() / side; }
  static CF_DEVICE int strip() { return warp_id() % Traits::strips * Traits::strip; }   // first key
  static CF_DEVICE int part() { return warp_id() % side / Traits::strips; }
  static constexpr int keys = Traits::strip / 16, rows = Traits::piece / 16;            // fragments
  static constexpr int d = Traits::d_part / 16, d_v = Traits::v_part / 16;
  static constexpr int dq_rows = Config::Br / Traits::warps_m / 16;
  static constexpr int dq_columns = Config::d / Traits::warps_n / 16 / Traits::dq_passes;
  static CF_DEVICE int dq_row() { return warp_id() % Traits::warps_m * dq_rows; }
  static CF_DEVICE int dq_column() {
    return warp_id() / Traits::warps_m * dq_columns * Traits::dq_passes;
  }
};

// In which order tiles [k, ...] are read, so that lanes hit different banks.
template <typename Config>
CF_HOST_DEVICE constexpr Order depth_order() {
  return sizeof(typename Config::element) == 8 ? Order::natural : Order::paired;
}

// S^T [M, N] of fragments = A B over `depth`: K Q^T, or V dO^T.
template <typename Config, int depth, int M, int N, typename ReadA, typename ReadB>
CF_DEVICE void multiply_scores(typename Fragments<Config>::C (&S)[M][N], const ReadA& A,
                               const ReadB& B, int row, int column) {
  using F = Fragments<Config>;
  constexpr int piece = chain_depth<Config>() > 0 ? min(chain_depth<Config>(), depth) : depth;
  static_assert(depth % piece == 0, "head dims must be padded to whole chains");
  // In float64 longer code spills.
  constexpr int unrolled = sizeof(typename F::T) == 8 && piece > 64 ? 4 : piece;
  Sums<Config> sums[M][N];
#pragma unroll 2
  for (int k0 = 0; k0 < depth; k0 += piece) {
#pragma unroll unrolled
    for (int k = 0; k < piece; k += F::depth) {
      decltype(operand<Config>(typename F::A{})) a[M];
#pragma unroll
      for (int i = 0; i < M; ++i) a[i] = operand<Config>(A.load(row + 16 * i, k0 + k));
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const auto b = operand<Config>(B.load(k0 + k, column + 16 * j));
#pragma unroll
        for (int i = 0; i < M; ++i) add_product<Config, true>(sums[i][j], a[i], b);
      }
    }
    add_large<Config>(S, sums, k0 == 0);
  }
  add_small<Config>(S, sums);
}

// acc [M, N] of fragments += A B, with A [M, K] in registers.
template <typename Config, int M, int N, int K, typename OperandA, typename ReadB>
CF_DEVICE void accumulate(typename Fragments<Config>::C (&acc)[M][N], const OperandA (&a)[M][K],
                          const ReadB& B, int row, int column) {
  using F = Fragments<Config>;
  if constexpr (fresh_sums<Config>()) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      Sums<Config> sums[M];
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const auto b = operand<Config>(B.load(row + k * F::depth, column + 16 * j));
#pragma unroll
        for (int i = 0; i < M; ++i) add_product<Config>(sums[i], operand<Config>(a[i][k]), b);
      }
#pragma unroll
      for (int i = 0; i < M; ++i) {
#pragma unroll
        for (int e = 0; e < 8; ++e) acc[i][j].x[e] += sums[i].total(e);
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const auto b = B.load(row + k * F::depth, column + 16 * j);
#pragma unroll
        for (int i = 0; i < M; ++i) mma<Config>(acc[i][j], a[i][k], b);
      }
    }
  }
}

// x = value where a row does not see a key. key0: the strip's first key; ranges: of the rows.
template <typename Config, int M, int N>
CF_DEVICE void hide(typename Fragments<Config>::C (&x)[M][N], const KeyRange* ranges, int key0,
                    accumulator<typename Config::element> value) {
  const int own_key = key0 + row_here();
  ranges += column_here();
#pragma unroll
  for (int j = 0; j < N; ++j) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const KeyRange seen = ranges[16 * j + column_step(e)];
#pragma unroll
      for (int i = 0; i < M; ++i) {
        const int key = own_key + 16 * i + row_step(e);
        if (key < seen.first || key >= seen.end) x[i][j].x[e] = value;
      }
    }
  }
}

// P = exp(scale * qk - lse) in two steps, since hidden scores become -inf between them. The score
// is rounded by itself, so that P is 1 where a key is all there is, however large the score.
template <typename Config>
struct Exponential {
  using A = accumulator<typename Config::element>;
  A scale;

  // A float of shared memory where it is enough: converted from the parameter, it would be so anew
  // in each step.
  CF_DEVICE Exponential(const Params& p, const OwnKeys& own)
      : scale(sizeof(A) == 8 ? A(p.scale) : A(own.scale)) {}
  CF_DEVICE A exponent(A qk, A lse) const { return ptx::multiply(scale, qk) - lse; }
  // 16-bit and TF32 probabilities are rounded far more coarsely than exp2 errs; in float64 that of
  // x in units of powers of 2 is felt only where P is small.
  CF_DEVICE static float power(float x) {
    return Config::precision == 2 ? exp(x) : exp2(x * 1.44269504f);
  }
  CF_DEVICE static double power(double x) { return exp2_of(x, 1.4426950408889634); }
};

// What a lane knows of its four rows of fragments in column j: two pairs of neighbours.
template <typename A>
struct FourRows {
  Pair<A> pair[2];

  // own: of the lane's first row in the fragments of column 0.
  CF_DEVICE FourRows(const A* own, int j) {
    pair[0] = *reinterpret_cast<const Pair<A>*>(own + 16 * j);
    pair[1] = *reinterpret_cast<const Pair<A>*>(own + 16 * j + 8);
  }
  CF_DEVICE A operator[](int e) const { return pair[e / 4].x[e % 2]; }      // element of a fragment
};

// qk -> exponent of P. lse: of the part's rows.
template <typename Config, int M, int N>
CF_DEVICE void find_exponents(typename Fragments<Config>::C (&S)[M][N],
                              const accumulator<typename Config::element>* lse,
                              const Exponential<Config>& exponential) {
  lse += column_here();
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const FourRows<accumulator<typename Config::element>> reference(lse, j);
#pragma unroll
    for (int i = 0; i < M; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        S[i][j].x[e] = exponential.exponent(S[i][j].x[e], reference[e]);
      }
    }
  }
}

// Exponents -> P.
template <typename Config, int M, int N>
CF_DEVICE void exponentiate(typename Fragments<Config>::C (&S)[M][N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
#pragma unroll
    for (int i = 0; i < M; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) S[i][j].x[e] = Exponential<Config>::power(S[i][j].x[e]);
    }
  }
}

// dP -> dS = P * (dP - delta). delta: of the part's rows.
template <typename Config, int M, int N>
CF_DEVICE void differentiate(typename Fragments<Config>::C (&dP)[M][N],
                             const typename Fragments<Config>::C (&P)[M][N],
                             const accumulator<typename Config::element>* delta) {
  delta += column_here();
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const FourRows<accumulator<typename Config::element>> shift(delta, j);
#pragma unroll
    for (int i = 0; i < M; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        dP[i][j].x[e] = P[i][j].x[e] * (dP[i][j].x[e] - shift[e]);
      }
    }
  }
}

// b = 0 in rows (keys) before `first` and from `end` on, of a fragment whose rows start at 0:
// 0 * NaN would be NaN.
template <typename Config, Order order>
CF_DEVICE void forget_keys(typename Fragments<Config>::B& b, int first, int end) {
  const int t = here() % 4;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if constexpr (Fragments<Config>::depth == 16) {
      const int k = 2 * t + e % 2 * 8;
      if (k < first || k >= end) b.x[e] &= 0xFFFF0000;
      if (k + 1 < first || k + 1 >= end) b.x[e] &= 0x0000FFFF;
    } else {
      const int k = order == Order::paired ? 2 * t + e % 2 : t + e % 2 * 4;
      if (k < first || k >= end) b.x[e] = 0;
    }
  }
}

// Writes a fragment [16, 16] of P^T or dS^T, rounded to an operand, to shared memory. own: where
// the lane's first element belongs.
template <typename Config, int pitch>
CF_DEVICE void store_scores(typename Config::element* own,
                            const typename Fragments<Config>::C& c) {
  using T = typename Config::element;
#pragma unroll
  for (int e = 0; e < 8; e += 2) {
    T* const to = own + row_step(e) * pitch + column_step(e);
    if constexpr (sizeof(T) == 2) {
      *reinterpret_cast<uint32*>(to) = ptx::pack<T>(c.x[e], c.x[e + 1]);
    } else {
      to[0] = to_operand<Config>(c.x[e]);
      to[1] = to_operand<Config>(c.x[e + 1]);
    }
  }
}

// P and dS of a strip and a part as operands: in the registers that hold them.
template <typename Config, int M, int N, int K>
CF_DEVICE void make_operands(typename Fragments<Config>::A (&a)[M][K],
                             const typename Fragments<Config>::C (&c)[M][N]) {
#pragma unroll
  for (int i = 0; i < M; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const AccumulatorAsA<Config> operands(c[i][j]);
#pragma unroll
      for (int n = 0; n < operands.count; ++n) a[i][j * operands.count + n] = operands.a[n];
    }
  }
}

// The same from shared memory: rows from `row` on.
template <typename Config, int M, int K, typename ReadA>
CF_DEVICE void load_operands(typename Fragments<Config>::A (&a)[M][K], const ReadA& A, int key,
                             int row) {
  using F = Fragments<Config>;
#pragma unroll
  for (int i = 0; i < M; ++i) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      a[i][k] = A.load(key + 16 * i, row + k * F::depth);
    }
  }
}

}  // namespace cf

// Products of tiles in shared memory, summed in fragments that the warps of a block share out.
//
// One product serves all seven of forward and backward:
//
//     S = Q K^T    acc += P V    dP = dO V^T    dV += P^T dO    dK += dS^T Q    dQ += dS K
//
// K^T, V^T, P^T and dS^T are the tiles as they lie, read by columns. No layout of fragments is
// assumed: which row and column an element belongs to is loaded like a matrix (see `Where`).
#pragma once

#include "../ptx/mma.cuh"
#include "../attention/sums.cuh"
#include "tiles.cuh"

namespace cf {

CF_HOST_DEVICE constexpr int gcd(int a, int b) { return b == 0 ? a : gcd(b, a % b); }

template <typename Config>
using Wmma = ptx::Wmma<typename Config::element>;

// Depth of a chain of scores in the narrow types: their rounding hides the lost bits in other sums,
// but an error of a score is one of lse too.
constexpr int SCORE_DEPTH = 64;

// The same of sums that go on from tile to tile.
template <typename Config>
CF_HOST_DEVICE constexpr int sum_depth() {
  const bool fresh = Fresh<Config>::value || Config::precision == 1;
  return chain_depth<Config>() > 0 || !fresh ? chain_depth<Config>() : SCORE_DEPTH;
}

// A matrix [M, N] in fragments. Warps stand in a grid over the fragments, as many of them below
// each other as divide its rows.
template <typename Config, int M, int N>
struct Accumulators {
  using Element = typename Config::element;
  using C = typename Wmma<Config>::C;
  static constexpr int side = Wmma<Config>::side;
  static constexpr int sums = int(sizeof(C) / sizeof(accumulator<Element>));
  static constexpr int warps_m = gcd(Config::warps, M / side), warps_n = Config::warps / warps_m;
  static constexpr int rows = M / side / warps_m, columns = ceil_div(N / side, warps_n);
  static_assert(M % side == 0 && N % side == 0, "a tile must be whole fragments");

  C x[rows][columns];

  static CF_DEVICE int warp() { return int(threadIdx.x) / 32; }
  // First row and first column of a fragment in the matrix.
  static CF_DEVICE int row(int i) { return (warp() % warps_m + i * warps_m) * side; }
  static CF_DEVICE int column(int j) { return (warp() / warps_m + j * warps_n) * side; }
  // The last column of the grid may stand beside the matrix.
  static CF_DEVICE bool owns(int j) { return N / side % warps_n == 0 || column(j) < N; }

  CF_DEVICE Accumulators() : x{} {}
};

// Row and column of each element that a lane holds of any accumulator fragment.
template <typename Config>
struct Where {
  using T = accumulator<typename Config::element>;
  static constexpr int side = Wmma<Config>::side;
  static constexpr int sums = int(sizeof(typename Wmma<Config>::C) / sizeof(T));
  int index[sums];

  CF_DEVICE int row(int e) const { return index[e] / side; }
  CF_DEVICE int column(int e) const { return index[e] % side; }
};

// Asks the fragments: element (i, j) of a matrix holds its own number. scratch: [side, side] of
// shared memory, which the caller may use again behind the next barrier.
template <typename Config>
CF_DEVICE Where<Config> find_where(accumulator<typename Config::element>* scratch) {
  using T = accumulator<typename Config::element>;
  constexpr int side = Wmma<Config>::side;
  for (int i = int(threadIdx.x); i < side * side; i += 32 * Config::warps) scratch[i] = T(i);
  ptx::sync_block("numbers_written");
  typename Wmma<Config>::C numbers;
  Wmma<Config>::load_c(numbers, scratch, side);
  Where<Config> where;
#pragma unroll
  for (int e = 0; e < where.sums; ++e) where.index[e] = int(numbers.x[e]);
  return where;
}

// A tile in shared memory as an operand. Layout::col: its transpose.
template <Layout layout_, typename T>
struct Operand {
  static constexpr Layout layout = layout_;
  const T* data;
  int pitch;

  CF_DEVICE const T* at(int i, int j) const {
    return layout == Layout::row ? data + i * pitch + j : data + j * pitch + i;
  }
};

// A tile of `width` columns as a product reads it.
template <int width, typename T>
CF_DEVICE Operand<Layout::row, T> as_is(const T* tile) {
  return {tile, pitch<T>(width)};
}
template <int width, typename T>
CF_DEVICE Operand<Layout::col, T> transposed(const T* tile) {
  return {tile, pitch<T>(width)};
}

// The part of float32 operands that TF32 keeps, and the part that it would lose.
template <typename Fragment>
CF_DEVICE void split(const Fragment& x, Fragment& high, Fragment& low) {
#pragma unroll
  for (int e = 0; e < int(sizeof(x.x) / sizeof(x.x[0])); ++e) {
    high.x[e] = round_to_tf32(x.x[e]);
    low.x[e] = tf32_rest(x.x[e], high.x[e]);
  }
}

// large + small += A B over a depth of one chain, of the fragment that starts at (row, column).
template <typename Config, typename OperandA, typename OperandB>
CF_DEVICE void add_chain(typename Wmma<Config>::C& large, typename Wmma<Config>::C& small,
                         OperandA A, OperandB B, int row, int column, int k0, int k_end) {
  using W = Wmma<Config>;
  constexpr Layout la = OperandA::layout, lb = OperandB::layout;
  for (int k = k0; k < k_end; k += W::depth) {
    typename W::A a;
    typename W::B b;
    W::template load_a<la>(a, A.at(row, k), A.pitch);
    W::template load_b<lb>(b, B.at(k, column), B.pitch);
    if constexpr (Config::precision == 2) {
      typename W::A a_high, a_low;
      typename W::B b_high, b_low;
      split(a, a_high, a_low);
      split(b, b_high, b_low);
      W::template mma<la, lb>(small, a_low, b_high);      // a sum of their own: next to the large
      W::template mma<la, lb>(small, a_high, b_low);      // products they would lose digits
      W::template mma<la, lb>(large, a_high, b_high);
    } else {
      W::template mma<la, lb>(large, a, b);
    }
  }
}

// c += A B of the fragment that starts at (row, column), chain by chain; the small sums of 3xTF32,
// next to which nothing is lost, as a whole.
template <int chain, typename Config, typename OperandA, typename OperandB>
CF_DEVICE void add_chains(typename Wmma<Config>::C& c, OperandA A, OperandB B, int row, int column,
                          int k0, int k_end) {
  using C = typename Wmma<Config>::C;
  constexpr int sums = int(sizeof(c.x) / sizeof(c.x[0]));
  C small = {};
#pragma unroll 1
  for (int k = k0; k < k_end; k += chain) {
    C large = {};
    add_chain<Config>(large, small, A, B, row, column, k, min(k + chain, k_end));
#pragma unroll
    for (int e = 0; e < sums; ++e) c.x[e] += large.x[e];
  }
  if constexpr (Config::precision == 2) {
#pragma unroll
    for (int e = 0; e < sums; ++e) c.x[e] += small.x[e];
  }
}

// acc += A B over the depths k0 ... k_end, with A [M, ...] and B [..., N], in chains of a depth; 0:
// in one.
template <int chain, typename Config, int M, int N, typename OperandA, typename OperandB>
CF_DEVICE void add_product(Accumulators<Config, M, N>& acc, OperandA A, OperandB B, int k0,
                           int k_end) {
  using W = Wmma<Config>;
  using Acc = Accumulators<Config, M, N>;
  constexpr Layout la = OperandA::layout, lb = OperandB::layout;
  if constexpr (chain > 0) {
#pragma unroll
    for (int j = 0; j < Acc::columns; ++j) {
      if (!acc.owns(j)) continue;
#pragma unroll
      for (int i = 0; i < Acc::rows; ++i) {
        add_chains<chain, Config>(acc.x[i][j], A, B, acc.row(i), acc.column(j), k0, k_end);
      }
    }
  } else {
#pragma unroll 1
    for (int k = k0; k < k_end; k += W::depth) {
      typename W::A a[Acc::rows];
#pragma unroll
      for (int i = 0; i < Acc::rows; ++i) {
        W::template load_a<la>(a[i], A.at(acc.row(i), k), A.pitch);
      }
#pragma unroll
      for (int j = 0; j < Acc::columns; ++j) {
        if (!acc.owns(j)) continue;
        typename W::B b;
        W::template load_b<lb>(b, B.at(k, acc.column(j)), B.pitch);
#pragma unroll
        for (int i = 0; i < Acc::rows; ++i) W::template mma<la, lb>(acc.x[i][j], a[i], b);
      }
    }
  }
}

// acc += piece, by ordinary sums.
template <typename Config, int M, int N>
CF_DEVICE void add(Accumulators<Config, M, N>& acc, const Accumulators<Config, M, N>& piece) {
  using Acc = Accumulators<Config, M, N>;
#pragma unroll
  for (int i = 0; i < Acc::rows; ++i) {
#pragma unroll
    for (int j = 0; j < Acc::columns; ++j) {
#pragma unroll
      for (int e = 0; e < Acc::sums; ++e) acc.x[i][j].x[e] += piece.x[i][j].x[e];
    }
  }
}

// acc += A B, with A [M, depth] and B [depth, N].
template <int depth, typename Config, int M, int N, typename OperandA, typename OperandB>
CF_DEVICE void multiply(Accumulators<Config, M, N>& acc, OperandA A, OperandB B) {
  static_assert(depth % Wmma<Config>::depth == 0, "a product's depth must be whole fragments");
  add_product<sum_depth<Config>()>(acc, A, B, 0, depth);
}

// tile [M, N] = A B.
template <int depth, int M, int N, typename Config, typename T, typename OperandA,
          typename OperandB>
CF_DEVICE void multiply_into(T* tile, OperandA A, OperandB B) {
  using Acc = Accumulators<Config, M, N>;
  Acc product;
  if constexpr (chain_depth<Config>() > 0 || depth <= SCORE_DEPTH) {
    static_assert(depth % Wmma<Config>::depth == 0, "a product's depth must be whole fragments");
    add_product<chain_depth<Config>()>(product, A, B, 0, depth);
  } else {
#pragma unroll 1
    for (int k = 0; k < depth; k += SCORE_DEPTH) {
      Acc piece;
      add_product<0>(piece, A, B, k, min(k + SCORE_DEPTH, depth));
      add(product, piece);
    }
  }
#pragma unroll
  for (int j = 0; j < Acc::columns; ++j) {
    if (!product.owns(j)) continue;
#pragma unroll
    for (int i = 0; i < Acc::rows; ++i) {
      T* corner = tile + product.row(i) * pitch<T>(N) + product.column(j);
      Wmma<Config>::store_c(corner, product.x[i][j], pitch<T>(N));
    }
  }
}

// acc = diag(alpha) acc.
template <typename Config, int M, int N, typename T>
CF_DEVICE void scale_rows(Accumulators<Config, M, N>& acc, const Where<Config>& where,
                          const T* alpha) {
  using Acc = Accumulators<Config, M, N>;
#pragma unroll
  for (int i = 0; i < Acc::rows; ++i) {
#pragma unroll
    for (int e = 0; e < Acc::sums; ++e) {
      const T factor = alpha[acc.row(i) + where.row(e)];
#pragma unroll
      for (int j = 0; j < Acc::columns; ++j) acc.x[i][j].x[e] *= factor;
    }
  }
}

}  // namespace cf

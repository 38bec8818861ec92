// What the kernels of the backward pass share: tiles, the state of rows, the gradient of scores.
//
// Dao et al., "FlashAttention" (2022), algorithm 4, cut in two: one kernel owns keys and walks the
// queries, the other owns queries and walks the keys. Both compute the scores again, so that every
// gradient has one writer and a fixed order of sums, without atomics and without workspace.
#pragma once

#include "../attention/gradient.cuh"
#include "../attention/schedule.cuh"
#include "store.cuh"

namespace cf {

// Which of the rounded operands P and dS a kernel multiplies with.
enum class Keeps { P_and_dS, dS, none };

template <typename Config, Keeps keeps>
struct GradientTraits {
  using T = typename Config::element;
  using A = accumulator<T>;
  static constexpr int side = ptx::Wmma<T>::side;
  static constexpr int threads = 32 * Config::warps;
  static constexpr bool own = sizeof(T) < sizeof(A);   // otherwise they take the place of S and dP
  static constexpr int narrow_bytes = own ? tile_bytes<T>(Config::Br, Config::Bc) : 0;
  static constexpr int P_bytes = keeps == Keeps::P_and_dS ? narrow_bytes : 0;
  static constexpr int dS_bytes = keeps != Keeps::none ? narrow_bytes : 0;
  static constexpr int common_bytes =
      tile_bytes<T>(Config::Br, Config::d) + tile_bytes<T>(Config::Br, Config::d_v)
      + tile_bytes<T>(Config::Bc, Config::d) + tile_bytes<T>(Config::Bc, Config::d_v)
      + 2 * tile_bytes<A>(Config::Br, Config::Bc) + P_bytes + dS_bytes
      + 2 * Config::Br * int(sizeof(A)) + Config::Br * int(sizeof(KeyRange));
  static_assert(Config::d % 16 == 0 && Config::d_v % 16 == 0, "d and d_v must be multiples of 16");
  static_assert(Config::Br % side == 0, "Br must be a multiple of 16, of 8 in float64");
  static_assert(Config::Bc % side == 0, "Bc must be a multiple of 16, of 8 in float64");
};

// Shared memory of a block.
template <typename Config, Keeps keeps>
struct GradientTiles {
  using Traits = GradientTraits<Config, keeps>;
  using T = typename Config::element;
  using A = accumulator<T>;
  T *Q, *dO;           // [Br, d], [Br, d_v]
  T *K, *V;            // [Bc, d], [Bc, d_v]
  A *S, *dP;           // [Br, Bc]
  T *P, *dS;           // [Br, Bc], in S and dP where both have one type
  A *lse, *delta;      // [Br]; lse is +inf for rows that see no key, so that their P is 0
  KeyRange* ranges;    // [Br]
  unsigned char* rest;

  CF_DEVICE explicit GradientTiles(unsigned char* memory) {
    Carver carver{memory};
    Q = carver.take<T>(tile_bytes<T>(Config::Br, Config::d));
    dO = carver.take<T>(tile_bytes<T>(Config::Br, Config::d_v));
    K = carver.take<T>(tile_bytes<T>(Config::Bc, Config::d));
    V = carver.take<T>(tile_bytes<T>(Config::Bc, Config::d_v));
    S = carver.take<A>(tile_bytes<A>(Config::Br, Config::Bc));
    dP = carver.take<A>(tile_bytes<A>(Config::Br, Config::Bc));
    P = reinterpret_cast<T*>(S);
    dS = reinterpret_cast<T*>(dP);
    if constexpr (Traits::P_bytes > 0) P = carver.take<T>(Traits::P_bytes);
    if constexpr (Traits::dS_bytes > 0) dS = carver.take<T>(Traits::dS_bytes);
    lse = carver.take<A>(Config::Br * int(sizeof(A)));
    delta = carver.take<A>(Config::Br * int(sizeof(A)));
    ranges = carver.take<KeyRange>(Config::Br * int(sizeof(KeyRange)));
    rest = carver.next;
  }
};

// lse, delta and the visible keys of each row.
template <typename Config, Keeps keeps>
CF_DEVICE void load_state(const GradientTiles<Config, keeps>& t, const BackwardParams& p,
                          const Rows& rows) {
  using A = accumulator<typename Config::element>;
  find_ranges<Config>(t.ranges, p, rows);
#pragma unroll 1
  for (int r = int(threadIdx.x); r < Config::Br; r += 32 * Config::warps) {
    A lse = inf<A>(), delta = A(0);
    if (r < rows.rows) {
      const uint64 state = row_state<A>(p, rows, r);
      lse = at<const A>(state);
      delta = at<const A>(state + p.state_rows * int64(sizeof(A)));
    }
    t.lse[r] = lse;
    t.delta[r] = delta;
  }
}

// Q and dO. Rows that see no key are zeros: 0 * NaN must not reach dK.
template <typename Config, Keeps keeps>
CF_DEVICE void load_rows(const GradientTiles<Config, keeps>& t, const BackwardParams& p,
                         const Rows& rows) {
  load_tile<Config, Config::Br, Config::d>(t.Q, query_block(p, p.q, rows, p.d), t.lse);
  load_tile<Config, Config::Br, Config::d_v>(t.dO, query_block(p, p.dout, rows, p.d_v), t.lse);
}

// K and V of one key tile: keys from `begin` on, `keys` in all.
template <typename Config, Keeps keeps>
CF_DEVICE void load_keys(const GradientTiles<Config, keeps>& t, const BackwardParams& p, int64 b,
                         int64 head_k, int64 key0, int begin, int keys) {
  const uint64 k_base = head_address(p.k, b, head_k), v_base = head_address(p.v, b, head_k);
  load_tile<Config, Config::Bc, Config::d>(t.K, key_block(p, p.k, k_base, key0, begin, keys, p.d));
  load_tile<Config, Config::Bc, Config::d_v>(
      t.V, key_block(p, p.v, v_base, key0, begin, keys, p.d_v));
}

// S = Q K^T and dP = dO V^T.
template <typename Config, Keeps keeps>
CF_DEVICE void multiply_scores(const GradientTiles<Config, keeps>& t) {
  multiply_into<Config::d, Config::Br, Config::Bc, Config>(t.S, as_is<Config::d>(t.Q),
                                                           transposed<Config::d>(t.K));
  multiply_into<Config::d_v, Config::Br, Config::Bc, Config>(t.dP, as_is<Config::d_v>(t.dO),
                                                             transposed<Config::d_v>(t.V));
}

// From the products S and dP to P and dS, rounded for the next products. A kernel that does not
// keep P keeps the scores in S, from which it sees the hidden keys.
template <typename Config, Keeps keeps>
CF_DEVICE void gradient_tile(const GradientTiles<Config, keeps>& t, const BackwardParams& p,
                             const Rows& rows, int64 key0) {
  using T = typename Config::element;
  using A = accumulator<T>;
  const Scaling<A> scaling = scaling_of<Config>(p);
  for (int r = Own<Config>::row(); r < Config::Br; r += Own<Config>::row_step) {
    const ScoreRow<A> row = open_gradient_row<Config, A>(p, rows, r, t.ranges[r]);
    const A lse = t.lse[r], delta = t.delta[r];
    const int wide = r * pitch<A>(Config::Bc), narrow = r * pitch<T>(Config::Bc);
    for (int j = Own<Config>::column(); j < Config::Bc; j += Own<Config>::lanes) {
      const Gradient<A> g = gradient_of<Config>(p, row, scaling, t.S[wide + j], t.dP[wide + j],
                                                lse, delta, int(key0) + j);
      if constexpr (keeps == Keeps::P_and_dS) {
        t.P[narrow + j] = to_operand<Config>(g.P);
      } else {
        t.S[wide + j] = g.S;
      }
      t.dS[narrow + j] = to_operand<Config>(g.dU);
    }
  }
}

}  // namespace cf

// Softcap, ALiBi, bias and mask in the registers of the fused backward kernel:
// `attention/scores.cuh`, one after the other over all of a lane's scores, so that its loads are on
// their way together.
#pragma once

#include "scores.cuh"

namespace cf {

// Scores [M, N] of fragments, keys as rows: where a lane has them.
template <typename Config>
struct LaneScores {
  using A = accumulator<typename Config::element>;
  using C = typename Fragments<Config>::C;
  static constexpr int M = Share<Config>::keys, N = Share<Config>::rows;
  const BackwardParams& p;
  const ScoreRow<A>* rows;   // the lane's first, in the fragments of column 0
  int key0;                  // the lane's first

  CF_DEVICE LaneScores(const BackwardParams& p_, const FusedTiles<Config>& t, int stage, int row)
      : p(p_),
        rows(t.rows + stage * Config::Br + row + column_here()),
        key0(int(t.own->key0) + Share<Config>::strip() + row_here()) {}

  // The lane has four rows in the fragments of a column, and 2 M keys, eight apart.
  CF_DEVICE const ScoreRow<A>& row(int j, int r) const {
    return rows[16 * j + r / 2 * 8 + r % 2];
  }
  static CF_DEVICE A& element(C (&S)[M][N], int j, int r, int n) {
    return S[n / 2][j].x[r / 2 * 4 + n % 2 * 2 + r % 2];
  }

  // q.k -> scale q.k behind the softcap, whose derivative is multiplied to dP.
  CF_DEVICE void scale(C (&S)[M][N], C (&dP)[M][N], A factor) const {
    const A cap = A(p.softcap);
#pragma unroll
    for (int x = 0; x < M * N * 8; ++x) {
      A& score = S[x / 8 / N][x / 8 % N].x[x % 8];
      score = ptx::multiply(factor, score);
    }
    if (p.softcap == 0) return;
#pragma unroll
    for (int x = 0; x < M * N * 8; ++x) {
      A& score = S[x / 8 / N][x / 8 % N].x[x % 8];
      const A t = tanh(score / cap);
      score = ptx::multiply(cap, t);
      dP[x / 8 / N][x / 8 % N].x[x % 8] *= A(1) - t * t;
    }
  }

  // The distance is rounded once, as `cf::add_alibi` does from its 64 bits: it is that of the first
  // key, in two parts that are exact together below 2^47, less a small number.
  CF_DEVICE void add_alibi(C (&S)[M][N]) const {
#pragma unroll
    for (int x = 0; x < N * 4; ++x) {
      const ScoreRow<A>& of = row(x / 4, x % 4);
      const int64 distance = of.position - key0;
      const A high = A(distance), low = A(distance - int64(high)), width = of.width;
#pragma unroll
      for (int n = 0; n < 2 * M; ++n) {
        const A from = high + (low - A(8 * n));
        element(S, x / 4, x % 4, n) -= width * (from < A(0) ? -from : from);
      }
    }
  }

  // What an element of bias or mask adds; -inf hides the key even if its score is NaN.
  static CF_DEVICE A added(unsigned char x, bool) { return x != 0 ? A(0) : -inf<A>(); }
  static CF_DEVICE A added(uint16 x, bool half) {
    return half ? widen(half_t{x}) : widen(bfloat16_t{x});
  }
  static CF_DEVICE A added(float x, bool) { return x; }
  static CF_DEVICE A added(double x, bool) { return A(x); }
  // S += an array's elements. start: where its rows begin.
  template <typename X>
  CF_DEVICE void add_array(C (&S)[M][N], const Tensor& t, uint64 ScoreRow<A>::*start) const {
    const bool half = t.kind == FLOAT16;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      A own[4][2 * M];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const ScoreRow<A>& of = row(j, r);
        const uint32 first = uint32(key0 - of.first), count = uint32(of.end - of.first);
        uint64 from = of.*start + key0 * t.c;
#pragma unroll
        for (int n = 0; n < 2 * M; ++n) {               // what no row sees need not exist
          own[r][n] = first + 8 * n < count ? added(at<const X>(from), half) : -inf<A>();
          from += 8 * t.c;
        }
      }
#pragma unroll
      for (int x = 0; x < 4 * 2 * M; ++x) {
        const A add = own[x / (2 * M)][x % (2 * M)];
        A& score = element(S, j, x / (2 * M), x % (2 * M));
        score = add != -inf<A>() ? score + add : add;
      }
    }
  }
  // S -= ln l, which is 0 in all but a few rows: see normaliser.cuh.
  CF_DEVICE void subtract_log_l(C (&S)[M][N], int j) const {
    A log_l[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) log_l[r] = row(j, r).log_l;
    if (log_l[0] == A(0) && log_l[1] == A(0) && log_l[2] == A(0) && log_l[3] == A(0)) return;
#pragma unroll
    for (int x = 0; x < 4 * 2 * M; ++x) {
      element(S, j, x / (2 * M), x % (2 * M)) -= log_l[x / (2 * M)];
    }
  }
  // What comes behind the softcap, but for what ranges hide.
  CF_DEVICE void add_features(C (&S)[M][N]) const {
    if (p.slopes.address != 0) add_alibi(S);
    if (p.bias.address != 0) {
      if (p.bias.kind == FLOAT16 || p.bias.kind == BFLOAT16) {
        add_array<uint16>(S, p.bias, &ScoreRow<A>::bias);
      } else if (sizeof(A) == 4 || p.bias.kind == FLOAT32) {
        add_array<float>(S, p.bias, &ScoreRow<A>::bias);
      } else {
        add_array<double>(S, p.bias, &ScoreRow<A>::bias);
      }
    }
    if (p.mask.address != 0) add_array<unsigned char>(S, p.mask, &ScoreRow<A>::mask);
  }

  static CF_DEVICE void put(uint16& to, A x, bool half) {
    to = half ? narrow<half_t>(float(x)).bits : narrow<bfloat16_t>(float(x)).bits;
  }
  static CF_DEVICE void put(float& to, A x, bool) { to = float(x); }
  static CF_DEVICE void put(double& to, A x, bool) { to = x; }
  // dS to dbias, in rows and keys that exist.
  template <typename X>
  CF_DEVICE void write_as(C (&dS)[M][N], const uint64* lines) const {
    const bool half = p.dbias.kind == FLOAT16;
#pragma unroll
    for (int j = 0; j < N; ++j) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        uint64 to = lines[16 * j + r / 2 * 8 + r % 2];
        if (to == 0) continue;
        to += key0 * p.dbias.c;
#pragma unroll
        for (int n = 0; n < 2 * M; ++n) {
          if (key0 + 8 * n < p.Nk) put(at<X>(to), element(dS, j, r, n), half);
          to += 8 * p.dbias.c;
        }
      }
    }
  }
  CF_DEVICE void write(C (&dS)[M][N], const uint64* lines) const {
    if (p.dbias.kind == FLOAT16 || p.dbias.kind == BFLOAT16) {
      write_as<uint16>(dS, lines);
    } else if (sizeof(A) == 4 || p.dbias.kind == FLOAT32) {
      write_as<float>(dS, lines);
    } else {
      write_as<double>(dS, lines);
    }
  }

  // Which keys of the strip any of the warp's rows sees. first: these are the first of its rows.
  CF_DEVICE static void mark_seen(const C (&S)[M][N], unsigned char* seen, bool first) {
#pragma unroll
    for (int x = 0; x < 2 * M; ++x) {
      uint32 any = 0;
#pragma unroll
      for (int y = 0; y < 8 * N; ++y) {
        const bool own = row_step(y % 8) == 8 * (x % 2);
        if (own && S[x / 2][y / 8].x[y % 8] != -inf<A>()) any = 1;
      }
      any |= __shfl_xor_sync(0xFFFFFFFF, any, 1);
      any |= __shfl_xor_sync(0xFFFFFFFF, any, 2);
      unsigned char& flag = seen[8 * x + row_here()];
      if (here() % 4 == 0) flag = static_cast<unsigned char>(first ? any : any | flag);
    }
  }
};

// b = 0 in rows (keys) that no row of the tile sees, of a fragment whose rows start at 0: 0 * NaN
// would be NaN. seen: [parts, Bc], from that row on.
template <typename Config, Order order>
CF_DEVICE void forget_unseen(typename Fragments<Config>::B& b, const unsigned char* seen) {
  const auto sees = [&](int key) {
    bool any = false;
#pragma unroll
    for (int part = 0; part < Config::parts; ++part) any = any || seen[part * Config::Bc + key];
    return any;
  };
  const int t = here() % 4;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if constexpr (Fragments<Config>::depth == 16) {
      const int k = 2 * t + e % 2 * 8;
      if (!sees(k)) b.x[e] &= 0xFFFF0000;
      if (!sees(k + 1)) b.x[e] &= 0x0000FFFF;
    } else {
      if (!sees(order == Order::paired ? 2 * t + e % 2 : t + e % 2 * 4)) b.x[e] = 0;
    }
  }
}

// dbias = 0 for the block's keys in the tiles of rows before `first` and from `end` on, which see
// none of them.
template <typename Config>
CF_DEVICE_CALLED void clear_dbias(const BackwardParams& p, const OwnKeys& own, int first, int end,
                                  const RowPiece& piece) {
  const int64 b = own.head / p.heads_k, head0 = own.head % p.heads_k * p.group;
  const uint64 base = p.dbias.address + b * p.dbias.b + head0 * p.dbias.h;
  for (int64 row = piece.begin + warp_id(); row < piece.end; row += Config::warps) {
    if (row >= int64(first) * Config::Br && row < int64(end) * Config::Br) continue;
    const uint64 line = base + row % p.group * p.dbias.h + row / p.group * p.dbias.n;
    for (int64 key = own.key0 + lane_id(); key < own.key0 + own.keys; key += 32) {
      store(line + key * p.dbias.c, p.dbias.kind, 0.f);
    }
  }
}

// Zeroes the rows of a tile that see no key by the mask: 0 * NaN must not reach dK and dV. All
// threads meet here if there are any.
template <typename Config>
CF_DEVICE void forget_blind_rows(const FusedTiles<Config>& t, int stage) {
  using T = typename Config::element;
  using A = accumulator<T>;
  using Tiles = FusedTiles<Config>;
  const A* const lse = t.state + stage * 2 * Config::Br;
  const bool blind = int(threadIdx.x) < Config::Br && lse[threadIdx.x % Config::Br] == inf<A>();
  if (!ptx::sync_block_or(blind, "blind_rows_found")) return;
  T* const Q = t.Q + stage * Tiles::q_step;
  T* const dO = t.dO + stage * Tiles::v_step;
#pragma unroll 1
  for (int r = warp_id(); r < Config::Br; r += Config::warps) {
    if (lse[r] != inf<A>()) continue;
#pragma unroll 1
    for (int rest = 0; rest <= BackwardSm80Traits<Config>::rests; rest += Config::Br) {
      for (int c = lane_id(); c < Config::d; c += 32) Q[(r + rest) * Tiles::q_pitch + c] = T{};
      for (int c = lane_id(); c < Config::d_v; c += 32) dO[(r + rest) * Tiles::v_pitch + c] = T{};
    }
  }
  ptx::sync_block("blind_rows_zeroed");
}

}  // namespace cf

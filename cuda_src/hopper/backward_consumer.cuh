// A consumer of the backward kernel: a warpgroup that owns 64 keys.
//
// Scores are computed transposed, keys as rows: P^T and dS^T are then operands of dV += P^T dO and
// dK += dS^T Q in the registers that hold them. dS goes through shared memory once, for
// dQ += dS K, which is added to sums in global memory. What the walk multiplies lies at addresses
// of which the compiler can tell that all lanes have the same: a shuffle would take as long as a
// product.
#pragma once

#include "../ptx/reduce.cuh"
#include "backward_store.cuh"
#include "backward_tiles.cuh"

namespace cf {

template <typename Config>
struct BackwardConsumer {
  using Traits = HopperBackwardTraits<Config>;
  using T = typename Config::element;
  using RowPlace = Place<Traits::stages>;
  static constexpr int Br = Config::Br, Bc = Config::Bc, d = Config::d, d_v = Config::d_v;
  const HopperBackwardParams& p;
  const HopperBackwardTiles<Config>& tiles;
  const int group;                     // which consumer this is
  RowPlace place;                      // of the tile of rows
  int whole_first, whole_end;          // tiles of rows all of which see all of the keys
  uint64 dq_sums;                      // the thread's first, of the next tile to be added
  float S[Br / 2], dP[Br / 2];         // [64, Br]; S becomes P, and dP becomes dS
  uint32 P[Br / 16][4], dS[Br / 16][4];  // [64, Br], as operands
  float dQ[32];                        // [64, 64]
  float dK[d / 2], dV[d_v / 2];        // [64, d], [64, d_v]

  CF_DEVICE BackwardConsumer(const HopperBackwardParams& p_,
                             const HopperBackwardTiles<Config>& tiles_, int group_)
      : p(p_), tiles(tiles_), group(group_) {}

  static CF_DEVICE int lane() { return int(threadIdx.x) % 32; }
  static CF_DEVICE int warp() { return int(threadIdx.x) % 128 / 32; }
  // The first of the thread's two keys, counted from the block's first; the other is 8 behind.
  CF_DEVICE int own_key() const { return 64 * group + 16 * warp() + lane() / 4; }
  // The first of the thread's rows: of each 8 it has this one and the next.
  static CF_DEVICE int own_row() { return 2 * (lane() % 4); }

  // x = A B^T of the consumer's 64 keys and all rows of a tile, in a group of its own.
  template <int depth>
  CF_DEVICE void start_scores(float (&x)[Br / 2], SmemAddress A, SmemAddress B) {
    const ptx::UniformDescriptor keys(A + 64 * group * PANEL_ROW_BYTES, Bc), rows(B, Br);
    ptx::products_begin();
#pragma unroll
    for (int i = 0; i < depth / 16; ++i) {
      const int panel = i / 4, inside = i % 4 * 32;
      ptx::Wgmma<T, Br>::rows(x, keys.at(panel * Bc * PANEL_ROW_BYTES + inside),
                              rows.at(panel * Br * PANEL_ROW_BYTES + inside), i > 0);
    }
    ptx::products_commit();
  }
  // sums += x B over the rows of a tile.
  template <int width>
  CF_DEVICE void start_sums(float (&sums)[width / 2], const uint32 (&x)[Br / 16][4],
                            SmemAddress B) {
    const ptx::UniformDescriptor rows(B, Br);
#pragma unroll
    for (int i = 0; i < Br / 16; ++i) {
      ptx::Wgmma<T, width>::columns(sums, x[i], rows.at(i * 16 * PANEL_ROW_BYTES), 1);
    }
    ptx::products_commit();
  }
  // dQ = dS K over all keys of the block: of half the rows, or half the columns.
  CF_DEVICE void start_queries(SmemAddress dS_tile) {
    const int half = group * Bc * PANEL_ROW_BYTES;
    const ptx::UniformDescriptor scores(dS_tile + (Traits::half_rows ? half : 0), Bc);
    const ptx::UniformDescriptor keys(tiles.K() + (Traits::half_rows ? 0 : half), Bc);
#pragma unroll
    for (int i = 0; i < Bc / 16; ++i) {
      const int bytes = i * 16 * PANEL_ROW_BYTES;
      ptx::multiply_columns(T(), dQ, scores.at(bytes), keys.at(bytes), i > 0);
    }
    ptx::products_commit();
  }

  // S = -inf where a row does not see a key.
  CF_DEVICE void hide() {
    const KeyRange* const ranges = tiles.ranges(group) + own_row();
#pragma unroll
    for (int j = 0; j < Br / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const KeyRange seen = ranges[8 * j + e];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int key = own_key() + 8 * h;
          if (key < seen.first || key >= seen.end) S[4 * j + 2 * h + e] = -inf<float>();
        }
      }
    }
  }

  // Zeroes the rows first ... last - 1 of a tile of `rows`: whatever they hold must not matter, and
  // 0 * NaN is NaN. Each consumer does all of it, so that none has to wait for the others.
  template <int rows, int width>
  static CF_DEVICE void zero_rows(SmemAddress tile, int first, int last) {
    constexpr int chunks = PANEL_ROW_BYTES / 16;
    const int t = int(threadIdx.x) % 128;
#pragma unroll 1
    for (int r = first + t / chunks; r < last; r += 128 / chunks) {
#pragma unroll
      for (int panel = 0; panel < ceil_div(width, PANEL); ++panel) {
        ptx::store_zeros(tile + (panel * rows + r) * PANEL_ROW_BYTES + t % chunks * 16);
      }
    }
  }
  CF_DEVICE void meet() const {
    ptx::fence_async_reads();                           // zeros to who multiplies
    ptx::named_barrier_wait(2 + group, 128);            // all of the consumer's zeros are there
  }
  // Keys that no row sees, if the array has them.
  CF_DEVICE void forget_keys(const KeyWork& w) const {
    if (w.seen_first == 0 && w.seen_end == w.keys) return;
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
      const int first = side == 0 ? 0 : w.seen_end, last = side == 0 ? w.seen_first : w.keys;
      zero_rows<Bc, d>(tiles.K(), first, last);
      zero_rows<Bc, d_v>(tiles.V(), first, last);
    }
    meet();
  }
  // Before the products of a tile of which some row does not see some key: finds who sees what, and
  // zeroes rows that see none of the keys.
  CF_DEVICE void open_some(const KeyWork& w, int tile) const {
    const int begin = w.first - tile * Br, end = w.end - tile * Br;
    const int r = int(threadIdx.x) % 128;
    if (r < Br) {
      const int query = int(uint32(tile * Br + r) / uint32(p.group));
      const bool real = r >= begin && r < end;
      tiles.ranges(group)[r] = {real ? query + w.left - w.key0 : 0,
                                real ? min(query + w.right, w.kv_len) - w.key0 : 0};
    }
    if (begin > 0 || end < Br) {
      tiles.dout().wait(place, "dout_full");
#pragma unroll 1
      for (int side = 0; side < 2; ++side) {
        const int first = side == 0 ? 0 : max(end, 0), last = side == 0 ? begin : Br;
        zero_rows<Br, d>(tiles.Q(place.stage()), first, last);
        zero_rows<Br, d_v>(tiles.dO(place.stage()), first, last);
      }
    }
    meet();
  }

  static CF_DEVICE void round(uint32 (&to)[Br / 16][4], const float (&x)[Br / 2]) {
#pragma unroll
    for (int i = 0; i < Br / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) to[i][j] = ptx::pack<T>(x[8 * i + 2 * j], x[8 * i + 2 * j + 1]);
    }
    ptx::settle(to);
  }

  // q.k -> exponents of P. The score is rounded by itself, so that P is 1 where a key is all there
  // is.
  CF_DEVICE void find_exponents(float scale) {
    const float* const lse = tiles.state(place.stage()) + own_row();
#pragma unroll
    for (int j = 0; j < Br / 8; ++j) {
      const Pair<float> reference = *reinterpret_cast<const Pair<float>*>(lse + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        S[4 * j + i] = ptx::multiply(scale, S[4 * j + i]) - reference.x[i % 2];
      }
    }
  }
  CF_DEVICE void exponentiate() {
#pragma unroll
    for (int i = 0; i < Br / 2; ++i) S[i] = ptx::exp2_approx(S[i] * 1.44269504f);
  }
  // dP -> dS = P (dP - delta).
  CF_DEVICE void differentiate() {
    const float* const delta = tiles.state(place.stage()) + Br + own_row();
#pragma unroll
    for (int j = 0; j < Br / 8; ++j) {
      const Pair<float> shift = *reinterpret_cast<const Pair<float>*>(delta + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i) dP[4 * j + i] = S[4 * j + i] * (dP[4 * j + i] - shift.x[i % 2]);
    }
  }

  // dS to where both consumers' products read it.
  CF_DEVICE void share(SmemAddress tile) const {
    const int key = 64 * group + 16 * warp() + lane() % 16;
    const SmemAddress own = tile + key * PANEL_ROW_BYTES + ((lane() / 16) ^ (key % 8)) * 16;
#pragma unroll
    for (int i = 0; i < Br / 16; ++i) {
      // Chunk 2 i + lane / 16 of 8 rows: the tile lies on a border of 128 bytes.
      ptx::store_matrices((own ^ (i % 4 * 32)) + i / 4 * Bc * PANEL_ROW_BYTES, dS[i]);
    }
  }

  // The thread's part of dQ to the sums, in the fragments of `dq_offset`; the next tile's lie
  // behind them.
  CF_DEVICE void add_queries() {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      ptx::add_to_global(dq_sums + dq_offset<Config>(0, j / 2, j % 2, 0), dQ[4 * j], dQ[4 * j + 1],
                         dQ[4 * j + 2], dQ[4 * j + 3]);
    }
    dq_sums += Br * d * 4;
  }

  // The consumers take turns: while one adds products to dV, dQ and dK, the other has the
  // arithmetic of P and dS. In its turn each hands over dS of a tile and multiplies that of the
  // tile before, of which both parts are there. The products behind the last tile have a turn of
  // their own.
  CF_DEVICE void wait_for_turn() const { ptx::named_barrier_wait(4 + group, 256); }
  CF_DEVICE void pass_turn() const { ptx::named_barrier_arrive(5 - group, 256); }

  // Tile i of rows, counted from the first. What is multiplied before there is a dS is left out.
  CF_DEVICE void step(const KeyWork& w, int first, int i, float scale) {
    const int stage = place.stage(), tile = first + i;
    const bool hides = tile < whole_first || tile >= whole_end;
    tiles.q().wait(place, "q_full");
    if (hides) open_some(w, tile);
    start_scores<d>(S, tiles.K(), tiles.Q(stage));
    tiles.dout().wait(place, "dout_full");
    start_scores<d_v>(dP, tiles.V(), tiles.dO(stage));
    ptx::products_wait<1>();
    ptx::settle(S);
    find_exponents(scale);
    if (hides) hide();                                  // whatever the scale's sign
    exponentiate();
    round(P, S);
    if (Traits::early) {
      ptx::products_begin();
      start_sums<d_v>(dV, P, tiles.dO(stage));
      ptx::products_wait<1>();
    } else {
      ptx::products_wait<0>();
    }
    ptx::settle(dP);
    differentiate();
    round(dS, dP);
    wait_for_turn();
    ptx::products_begin();
    if (!Traits::early) start_sums<d_v>(dV, P, tiles.dO(stage));
    start_queries(tiles.dS(place.before().stage()));
    start_sums<d>(dK, dS, tiles.Q(stage));
    share(tiles.dS(stage));
    ptx::fence_async_reads();                           // dS to the products
    ptx::products_wait<1>();
    ptx::settle(dQ);
    ptx::settle(dV);
    pass_turn();
    tiles.dout().release(place);
    if (i > 0) add_queries();
    // None may run on over the loop's end: ptxas would make each wait for the one before.
    ptx::products_wait<0>();
    ptx::settle(dK);
    tiles.q().release(place);
    ++place.count;
  }

  // dQ of the last tile.
  CF_DEVICE void finish_queries() {
    wait_for_turn();
    ptx::products_begin();
    start_queries(tiles.dS(place.before().stage()));
    ptx::products_wait<0>();
    ptx::settle(dQ);
    if (group == 0) pass_turn();
    add_queries();
  }

  template <int width>
  CF_DEVICE void store(const Tensor& t, const KeyWork& w, int64 columns,
                       const float (&sums)[width / 2], float scale) const {
    store_sums<T, width>(t, w, 64 * group, int(columns), sums, scale,
                         tiles.memory() + 64 * group * (width + 4), 2 + group);
  }

  CF_DEVICE void run() {
    const KeyWork& w = *tiles.work;
    const float scale = ptx::kept(float(p.scale));
#pragma unroll
    for (int i = 0; i < d / 2; ++i) dK[i] = dV[i] = 0.f;
    ptx::settle(dK);
    ptx::settle(dV);
    ptx::barrier_wait(tiles.keys_full(), 0, "keys_full");
    forget_keys(w);
    const int first = ptx::uniform(w.first / Br), end = ptx::uniform(ceil_div(w.end, Br));
    whole_first = ptx::uniform(w.whole_first);
    whole_end = ptx::uniform(w.whole_end);
    dq_sums = w.dq_sums + int64(first) * (Br * d * 4)
              + dq_offset<Config>(warp() + (Traits::half_rows ? 4 * group : 0),
                                  Traits::half_rows ? 0 : 4 * group, 0, lane());
    if (first < end) {
      if (group == 1) pass_turn();                      // the first begins
#pragma unroll 1
      for (int i = 0; i < end - first; ++i) step(w, first, i, scale);
      finish_queries();
    }
    ptx::named_barrier_wait(1, 256);                    // both have done with the tiles
    store<d>(p.dk, w, p.d, dK, scale);
    store<d_v>(p.dv, w, p.d_v, dV, 1.f);
  }
};

}  // namespace cf

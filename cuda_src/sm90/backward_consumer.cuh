// A consumer of the backward kernel: a warpgroup that owns 64 keys. dS goes through shared memory
// once, for dQ += dS K, which is added to sums in global memory.
#pragma once

#include "backward_rows.cuh"
#include "backward_tiles.cuh"

namespace cf {

template <typename Config>
struct BackwardConsumer : BackwardRows<Config, BackwardSm90Tiles<Config>> {
  using Tiles = BackwardSm90Tiles<Config>;
  using Base = BackwardRows<Config, Tiles>;
  using typename Base::T;
  using typename Base::Traits;
  using Base::Bc, Base::Br, Base::d, Base::d_v;
  using Base::end, Base::first, Base::group, Base::p, Base::place, Base::tiles;
  using Base::lane, Base::warp;
  uint64 dq_sums;                      // the thread's first, of the next tile to be added
  typename Base::Scores S, dP;         // S becomes P, and dP becomes dS
  typename Base::Operand P, dS;
  float dQ[32];                        // [64, 64]
  float dK[d / 2], dV[d_v / 2];        // [64, d], [64, d_v]

  CF_DEVICE BackwardConsumer(const BackwardSm90Params& p_, const Tiles& tiles_, int group_)
      : Base(p_, tiles_, group_, 64 * group_) {}

  // dQ = dS K over all keys of the block: of half the rows, or half the columns.
  CF_DEVICE void start_queries(SmemAddress dS_tile) {
    const int half = group * Bc * PANEL_ROW_BYTES;
    const ptx::UniformDescriptor scores(dS_tile + (Traits::half_rows ? half : 0), Bc);
    const ptx::UniformDescriptor keys(tiles.K() + (Traits::half_rows ? 0 : half), Bc);
    this->multiply_keys(dQ, scores, keys);
    ptx::products_commit();
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

  // The thread's part of dQ to the sums; the next tile's lie behind them.
  CF_DEVICE void add_queries() {
    this->add_to_sums(dq_sums, dQ);
    dq_sums += Br * d * 4;
  }

  // The consumers take turns: while one adds products to dV, dQ and dK, the other has the
  // arithmetic of P and dS. In its turn each hands over dS of a tile and multiplies that of the
  // tile before, of which both parts are there. The products behind the last tile have a turn of
  // their own.
  CF_DEVICE void wait_for_turn() const { ptx::named_barrier_wait(4 + group, 256, "turn"); }
  CF_DEVICE void pass_turn() const { ptx::named_barrier_arrive(5 - group, 256); }

  // Tile i of rows, counted from the first. What is multiplied before there is a dS is left out.
  CF_DEVICE void step(const KeyWork& w, int i, float scale) {
    const int stage = place.stage(), tile = first + i;
    const bool hides = this->hides(tile);
    tiles.q().wait(place, "q_full");
    if (hides) this->open_some(w, tile);
    this->template start_scores<d>(S, tiles.K(), tiles.Q(stage));
    tiles.dout().wait(place, "dout_full");
    this->template start_scores<d_v>(dP, tiles.V(), tiles.dO(stage));
    ptx::products_wait<1>();
    ptx::settle(S);
    this->find_exponents(S, scale);
    if (hides) this->hide(S);                           // whatever the scale's sign
    this->exponentiate(S);
    this->round(P, S);
    if (Traits::early) {
      ptx::products_begin();
      this->template start_sums<DV, d_v>(dV, P, tiles.dO(stage));
      ptx::products_wait<1>();
    } else {
      ptx::products_wait<0>();
    }
    ptx::settle(dP);
    this->differentiate(dP, S);
    this->round(dS, dP);
    wait_for_turn();
    ptx::products_begin();
    if (!Traits::early) this->template start_sums<DV, d_v>(dV, P, tiles.dO(stage));
    start_queries(tiles.dS(place.before().stage()));
    this->template start_sums<DK, d>(dK, dS, tiles.Q(stage));
    share(tiles.dS(stage));
    ptx::fence_async_reads("dS_fenced");                // for the products
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
    this->forget_keys(w);
    this->open(w);
    dq_sums = w.dq_sums + int64(first) * (Br * d * 4)
              + dq_offset<Config>(warp() + (Traits::half_rows ? 4 * group : 0),
                                  Traits::half_rows ? 0 : 4 * group, 0, lane());
    if (first < end) {
      const int count = end - first;
      if (group == 1) pass_turn();                      // the first begins
#pragma unroll 1
      for (int i = 0; i < count; ++i) step(w, i, scale);
      finish_queries();
    }
    ptx::named_barrier_wait(1, 256, "tiles_read");      // by both
    if constexpr (wants<Config>(DK)) store<d>(p.dk, w, p.d, dK, scale);
    if constexpr (wants<Config>(DV)) store<d_v>(p.dv, w, p.d_v, dV, 1.f);
  }
};

}  // namespace cf

// The backward kernel for sm_90a and heads wider than 128: dK and dV of 64 keys take the registers
// of two warpgroups. One has S, P and dV, the other dP, dS and dK; each adds half of the columns of
// dQ. P goes from the first to the second in float32, and dS back, a tile later.
//
// Every thread arrives for what it has written or read itself. A lane of each warp would do for it,
// but compute-sanitizer's racecheck does not see that, nor does it see `bar.arrive`.
// Dao, "FlashAttention-2" (2023), algorithm 2; Shah et al., "FlashAttention-3" (2024), section 3.
#pragma once

#include "backward_producer.cuh"
#include "backward_rows.cuh"
#include "backward_wide_tiles.cuh"

namespace cf {

template <typename Config, int width>
struct WideConsumer : BackwardRows<Config, BackwardSm90WideTiles<Config>> {
  using Tiles = BackwardSm90WideTiles<Config>;
  using Base = BackwardRows<Config, Tiles>;
  using typename Base::RowPlace;
  using typename Base::T;
  using typename Base::Traits;
  using Base::Bc, Base::Br;
  using Base::first, Base::group, Base::p, Base::place, Base::tiles;
  using Base::lane, Base::warp;
  static constexpr int panels = Config::d / PANEL;      // of dQ
  uint64 dq_sums;                      // the thread's first, of the next tile to be added
  float dQ[32];                        // [64, 64]
  float sums[width / 2];               // [64, width]: dV or dK

  CF_DEVICE WideConsumer(const BackwardSm90Params& p_, const Tiles& tiles_, int group_)
      : Base(p_, tiles_, group_, 0) {}

  // The panels of dQ that the consumer adds.
  CF_DEVICE int first_panel() const { return group == 0 ? 0 : panels / 2; }
  CF_DEVICE int end_panel() const { return group == 0 ? panels / 2 : panels; }

  CF_DEVICE void begin(const KeyWork& w) {
#pragma unroll
    for (int i = 0; i < width / 2; ++i) sums[i] = 0.f;
    ptx::settle(sums);
    ptx::barrier_wait(tiles.keys_full(), 0, "keys_full");
    this->forget_keys(w);
    this->open(w);
    dq_sums = w.dq_sums + int64(first) * (Br * Config::d * 4)
              + dq_offset<Config>(warp(), 0, 0, lane());
  }
  // The consumer's columns of dQ of a tile to the sums. All products that were started before are
  // through when it returns.
  CF_DEVICE void add_queries(RowPlace at) {
    ptx::barrier_wait(tiles.scores_full(at.stage()), at.parity(), "scores_full");
#pragma unroll 1
    for (int panel = first_panel(); panel < end_panel(); ++panel) {
      const ptx::UniformDescriptor scores(tiles.dS(at.stage()), Bc);
      const ptx::UniformDescriptor keys(tiles.K() + panel * Bc * PANEL_ROW_BYTES, Bc);
      ptx::products_begin();
      this->multiply_keys(dQ, scores, keys);
      ptx::products_commit();
      ptx::products_wait<0>();
      ptx::settle(dQ);
      this->add_to_sums(dq_sums + dq_offset<Config>(0, 4 * panel, 0, 0), dQ);
    }
    ptx::products_wait<0>();                            // also where it has no columns
    dq_sums += Br * Config::d * 4;
  }
  template <int gradient>
  CF_DEVICE void store(const Tensor& t, const KeyWork& w, int columns, float scale) const {
    ptx::named_barrier_arrive(4 + group, 256);
    ptx::named_barrier_wait(5 - group, 256, "tiles_read");  // by the other
    constexpr int most = 64 * (Config::d > Config::d_v ? Config::d + 4 : Config::d_v + 4);
    if constexpr (wants<Config>(gradient)) {
      store_sums<T, width>(t, w, 0, columns, sums, scale, tiles.memory + group * most, 2 + group);
    }
  }
};

// S, P and dV; dQ of the tile before.
template <typename Config>
struct ValuesConsumer : WideConsumer<Config, Config::d_v> {
  using Base = WideConsumer<Config, Config::d_v>;
  using Base::Base;
  using Base::end, Base::first, Base::place, Base::tiles;
  typename Base::Scores S;             // becomes P
  typename Base::Operand P;

  // P as it is to where the other consumer takes it from.
  CF_DEVICE void hand_over() const {
    const Place<1> at = {place.count};
    tiles.probabilities().claim(at, "p_empty");
    float* const to = tiles.P() + int(threadIdx.x) % 128 * 4;
#pragma unroll
    for (int i = 0; i < Base::Br / 8; ++i) {
      *reinterpret_cast<FourSums<float>*>(to + i * 512) = {S[4 * i], S[4 * i + 1], S[4 * i + 2],
                                                           S[4 * i + 3]};
    }
    ptx::barrier_arrive(tiles.probabilities().full(0));
  }

  CF_DEVICE void step(const KeyWork& w, int i, float scale) {
    const int stage = place.stage(), tile = first + i;
    const bool hides = this->hides(tile);
    tiles.q().wait(place, "q_full");
    if (hides) {
      ptx::named_barrier_wait(2, 128, "ranges_read");   // by all warps
      this->open_some(w, tile);
    }
    this->template start_scores<Config::d>(S, tiles.K(), tiles.Q(stage));
    tiles.dout().wait(place, "dout_full");
    ptx::products_wait<0>();
    ptx::settle(S);
    tiles.q().release(place);
    this->find_exponents(S, scale);
    if (hides) this->hide(S);                           // whatever the scale's sign
    this->exponentiate(S);
    hand_over();
    this->round(P, S);
    ptx::products_begin();
    this->template start_sums<DV, Config::d_v>(this->sums, P, tiles.dO(stage));
    if (i > 0) {
      this->add_queries(place.before());
    } else {
      ptx::products_wait<0>();
    }
    ptx::settle(this->sums);
    ptx::barrier_arrive(tiles.dout().empty(stage));     // lse and delta came with dO
    ++place.count;
  }
  CF_DEVICE void run() {
    const KeyWork& w = *tiles.work;
    const float scale = ptx::kept(float(this->p.scale));
    this->begin(w);
#pragma unroll 1
    for (int i = 0; i < end - first; ++i) step(w, i, scale);
    if (first < end) this->add_queries(place.before());
    this->template store<DV>(this->p.dv, w, int(this->p.d_v), 1.f);
  }
};

// dP, dS, dK and dQ.
template <typename Config>
struct KeysConsumer : WideConsumer<Config, Config::d> {
  using Base = WideConsumer<Config, Config::d>;
  using Base::Base;
  using Base::end, Base::first, Base::place, Base::tiles;
  using Base::lane, Base::warp;
  typename Base::Scores P, dP;         // dP becomes dS
  typename Base::Operand dS;

  CF_DEVICE void take_over() {
    const Place<1> at = {place.count};
    tiles.probabilities().wait(at, "p_full");
    const float* const from = tiles.P() + int(threadIdx.x) % 128 * 4;
#pragma unroll
    for (int i = 0; i < Base::Br / 8; ++i) {
      const FourSums<float> x = *reinterpret_cast<const FourSums<float>*>(from + i * 512);
#pragma unroll
      for (int j = 0; j < 4; ++j) P[4 * i + j] = x.x[j];
    }
    ptx::barrier_arrive(tiles.probabilities().empty(0));
  }
  // delta of the thread's rows.
  CF_DEVICE void read_delta(float (&x)[Base::Br / 4]) const {
    const float* const own = tiles.state(place.stage()) + Base::Br + this->own_row();
#pragma unroll
    for (int i = 0; i < Base::Br / 4; i += 2) {
      const Pair<float> two = *reinterpret_cast<const Pair<float>*>(own + 4 * i);
      x[i] = two.x[0];
      x[i + 1] = two.x[1];
    }
  }
  // dP -> dS = P (dP - delta).
  CF_DEVICE void differentiate(const float (&delta)[Base::Br / 4]) {
#pragma unroll
    for (int i = 0; i < Base::Br / 2; ++i) dP[i] = P[i] * (dP[i] - delta[i / 4 * 2 + i % 2]);
  }
  // dS to where both consumers' products read it.
  CF_DEVICE void share(SmemAddress tile) const {
    const int key = 16 * warp() + lane() % 16;
    const SmemAddress own = tile + key * PANEL_ROW_BYTES + ((lane() / 16) ^ (key % 8)) * 16;
#pragma unroll
    for (int i = 0; i < Base::Br / 16; ++i) ptx::store_matrices(own ^ (i * 32), dS[i]);
    ptx::fence_async_reads("dS_fenced");
    ptx::sync_warp("dS_written");                       // by all lanes
    if (lane() == 0) ptx::barrier_arrive(tiles.scores_full(place.stage()));
  }

  CF_DEVICE void step(const KeyWork& w, int i) {
    const int stage = place.stage(), tile = first + i;
    tiles.dout().wait(place, "dout_full");
    tiles.q().wait(place, "q_full");
    if (this->hides(tile)) this->open_some(w, tile);
    this->template start_scores<Config::d_v>(dP, tiles.V(), tiles.dO(stage));
    float delta[Base::Br / 4];
    read_delta(delta);
    take_over();
    ptx::products_wait<0>();
    ptx::settle(dP);
    ptx::barrier_arrive(tiles.dout().empty(stage));     // lse and delta came with dO
    differentiate(delta);
    this->round(dS, dP);
    share(tiles.dS(stage));
    ptx::products_begin();
    this->template start_sums<DK, Config::d>(this->sums, dS, tiles.Q(stage));
    this->add_queries(place);
    ptx::settle(this->sums);
    tiles.q().release(place);
    ++place.count;
  }
  CF_DEVICE void run() {
    const KeyWork& w = *tiles.work;
    this->begin(w);
#pragma unroll 1
    for (int i = 0; i < end - first; ++i) step(w, i);
    this->template store<DK>(this->p.dk, w, int(this->p.d), float(this->p.scale));
  }
};

// Tasks: tiles of keys of a key head, one for each block.
template <typename Config>
CF_DEVICE void backward_sm90_wide(const BackwardSm90Params& p) {
  using Traits = BackwardSm90WideTraits<Config>;
  using Tiles = BackwardSm90WideTiles<Config>;
  CF_DYNAMIC_SHARED(memory);
  const Tiles tiles(memory);
  if (threadIdx.x == 0) {
    *tiles.work = open_key_work<Config>(p, blockIdx.x);
    tiles.init_barriers();
  }
  ptx::sync_block("work_opened");                       // and the barriers are there
  // One branch, with nothing in registers across it: or they cannot change hands.
  if (threadIdx.x < 128) {
    ptx::lower_registers<Traits::producer_registers>();
    if (threadIdx.x == 0) BackwardProducer<Config, Tiles>{p, tiles}.run();
  } else {
    ptx::raise_registers<Traits::consumer_registers>();
    if (ptx::uniform(int(threadIdx.x) / 128) == 1) {
      ValuesConsumer<Config>(p, tiles, 0).run();
    } else {
      KeysConsumer<Config>(p, tiles, 1).run();
    }
  }
}

}  // namespace cf

// Shared memory of the backward kernel for wide heads, and the barriers in it.
#pragma once

#include "backward_work.cuh"
#include "ring.cuh"

namespace cf {

template <typename Config>
struct HopperBackwardWideTraits {
  static constexpr int threads = 32 * Config::warps;
  static constexpr int groups = 2, stages = 2;          // consumers; tiles of rows
  static constexpr int k_bytes = panels_bytes(Config::Bc, Config::d);
  static constexpr int v_bytes = panels_bytes(Config::Bc, Config::d_v);
  static constexpr int q_bytes = panels_bytes(Config::Br, Config::d);
  static constexpr int dout_bytes = panels_bytes(Config::Br, Config::d_v);
  static constexpr int score_bytes = panels_bytes(Config::Bc, Config::Br);
  static constexpr int p_bytes = Config::Bc * Config::Br * 4;
  static constexpr int state_bytes = 2 * Config::Br * 4;
  // Barriers and the block's work take the first 1,024 bytes.
  static constexpr int ranges_bytes = groups * Config::Br * int(sizeof(KeyRange));
  static constexpr int smem_bytes =
      PANEL_ALIGNMENT + k_bytes + v_bytes
      + stages * (q_bytes + dout_bytes + score_bytes + state_bytes) + p_bytes + ranges_bytes;
  // Of a thread, out of the 168 of each that the block is launched with: what is raised in one
  // place must have been lowered in another, or the raise waits for ever.
  static constexpr int producer_registers = 24, consumer_registers = 240;
  static_assert(Config::warps == 12 && Config::Bc == 64 && Config::Br == 64,
                "two consumers have the same 64 keys, and rows of a tile are 64");
  static_assert(producer_registers + groups * consumer_registers
                    <= Config::warps / 4 * (65536 / threads / 8 * 8),
                "more registers than the block is launched with");
};

template <typename Config>
struct HopperBackwardWideTiles {
  using Traits = HopperBackwardWideTraits<Config>;
  using RowRing = Ring<Traits::stages>;
  KeyWork* work;
  SmemAddress barriers;    // behind the work
  SmemAddress tiles;       // K, V, Q [stages], dO [stages], dS [stages], each in panels
  unsigned char* rest;     // P; lse and delta [stages]; ranges [groups]
  float* memory;           // what all of this lies in, from the tiles on

  CF_DEVICE explicit HopperBackwardWideTiles(unsigned char* block)
      : work(reinterpret_cast<KeyWork*>(block)),
        barriers(ptx::smem_address(block) + 128),
        tiles(ptx::smem_address(block) + PANEL_ALIGNMENT),
        rest(block + PANEL_ALIGNMENT + Traits::k_bytes + Traits::v_bytes
             + Traits::stages * (Traits::q_bytes + Traits::dout_bytes + Traits::score_bytes)),
        memory(reinterpret_cast<float*>(block + PANEL_ALIGNMENT)) {
    static_assert(sizeof(KeyWork) <= 128, "the barriers begin behind the work");
  }

  CF_DEVICE SmemAddress K() const { return tiles; }
  CF_DEVICE SmemAddress V() const { return K() + Traits::k_bytes; }
  CF_DEVICE SmemAddress Q(int stage) const {
    return V() + Traits::v_bytes + stage * Traits::q_bytes;
  }
  CF_DEVICE SmemAddress dO(int stage) const {
    return Q(Traits::stages) + stage * Traits::dout_bytes;
  }
  // Transposed: [Bc, Br], keys as rows.
  CF_DEVICE SmemAddress dS(int stage) const {
    return dO(Traits::stages) + stage * Traits::score_bytes;
  }
  // float32 [Br / 8, 128, 4]: what each thread of a consumer has, in its order.
  CF_DEVICE float* P() const { return reinterpret_cast<float*>(rest); }
  // lse [Br] and delta [Br].
  CF_DEVICE float* state(int stage) const {
    return P() + Config::Bc * Config::Br + stage * 2 * Config::Br;
  }
  // The keys that each row of a tile sees, counted from the block's first.
  CF_DEVICE KeyRange* ranges(int group) const {
    return reinterpret_cast<KeyRange*>(state(Traits::stages)) + group * Config::Br;
  }
  CF_DEVICE SmemAddress keys_full() const { return barriers; }
  CF_DEVICE RowRing q() const { return {barriers + 8}; }
  CF_DEVICE RowRing dout() const { return {q().barriers + RowRing::bytes}; }
  // P of a tile is there; the second consumer has it.
  CF_DEVICE Ring<1> probabilities() const { return {dout().barriers + RowRing::bytes}; }
  // dS of a tile is there. Its place is free again when P of the next tile but one is there.
  CF_DEVICE SmemAddress scores_full(int stage) const {
    return probabilities().barriers + Ring<1>::bytes + 8 * stage;
  }
  // One thread, before the block's threads meet.
  CF_DEVICE void init_barriers() const {
    ptx::barrier_init(keys_full(), 1);
    q().init(4 * Traits::groups);
    dout().init(128 * Traits::groups);
    ptx::barrier_init(probabilities().full(0), 128);
    ptx::barrier_init(probabilities().empty(0), 128);
    for (int i = 0; i < Traits::stages; ++i) ptx::barrier_init(scores_full(i), 4);
    ptx::barriers_ready();
  }
};

}  // namespace cf

// Shared memory of the backward kernel for wide heads, and the barriers in it.
#pragma once

#include "backward_shared.cuh"

namespace cf {

template <typename Config>
struct BackwardSm90WideTraits : BackwardSharedTraits<Config> {
  static constexpr int p_bytes = Config::Bc * Config::Br * 4;
  static constexpr int smem_bytes = BackwardSharedTraits<Config>::shared_bytes + p_bytes;
  static_assert(Config::warps == 12 && Config::Bc == 64 && Config::Br == 64,
                "two consumers have the same 64 keys, and rows of a tile are 64");
};

template <typename Config>
struct BackwardSm90WideTiles : BackwardShared<Config, BackwardSm90WideTraits<Config>> {
  using Traits = BackwardSm90WideTraits<Config>;
  using Base = BackwardShared<Config, Traits>;
  using typename Base::RowRing;
  using Base::dout, Base::keys_full, Base::q;
  unsigned char* rest;     // P; lse and delta [stages]; ranges [groups]
  float* memory;           // what all of this lies in, from the tiles on

  CF_DEVICE explicit BackwardSm90WideTiles(unsigned char* block)
      : Base(block),
        rest(block + PANEL_ALIGNMENT + Traits::k_bytes + Traits::v_bytes
             + Traits::stages * (Traits::q_bytes + Traits::dout_bytes + Traits::score_bytes)),
        memory(reinterpret_cast<float*>(block + PANEL_ALIGNMENT)) {}

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

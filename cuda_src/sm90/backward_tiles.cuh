// Shared memory of the backward kernel, and the barriers in it.
#pragma once

#include "backward_shared.cuh"

namespace cf {

template <typename Config>
struct BackwardSm90Traits : BackwardSharedTraits<Config> {
  static constexpr int smem_bytes = BackwardSharedTraits<Config>::shared_bytes;
  // Each consumer has 64 x 64 of the tile of dQ: all rows of half the columns, or all columns of
  // half the rows.
  static constexpr bool half_rows = Config::Br == 128;
  // dV += P^T dO runs beside the arithmetic of dS, where registers allow it.
  static constexpr bool early = Config::Br == 64;
  static_assert(Config::warps == 12 && Config::Bc == 128, "two consumers have 64 keys each");
  static_assert((Config::Br == 64 && Config::d == 128) || (Config::Br == 128 && Config::d == 64),
                "two consumers have 64 x 64 of dQ each");
  static_assert(Config::d_v == Config::d, "d and d_v are padded to the same width");
};

template <typename Config>
struct BackwardSm90Tiles : BackwardShared<Config, BackwardSm90Traits<Config>> {
  using Traits = BackwardSm90Traits<Config>;
  using Base = BackwardShared<Config, Traits>;
  using Base::dout, Base::keys_full, Base::q;
  unsigned char* memory_;

  CF_DEVICE explicit BackwardSm90Tiles(unsigned char* memory) : Base(memory), memory_(memory) {}

  // What the tiles lie in.
  CF_DEVICE float* memory() const { return reinterpret_cast<float*>(memory_ + PANEL_ALIGNMENT); }
  // lse [Br] and delta [Br].
  CF_DEVICE float* state(int stage) const {
    constexpr int start = Traits::smem_bytes - Traits::ranges_bytes
                          - Traits::stages * Traits::state_bytes;
    return reinterpret_cast<float*>(memory_ + start) + stage * 2 * Config::Br;
  }
  // The keys that each row of a tile sees, counted from the block's first.
  CF_DEVICE KeyRange* ranges(int group) const {
    return reinterpret_cast<KeyRange*>(memory_ + Traits::smem_bytes - Traits::ranges_bytes)
           + group * Config::Br;
  }
  // One thread, before the block's threads meet.
  CF_DEVICE void init_barriers() const {
    ptx::barrier_init(keys_full(), 1);
    q().init(4 * Traits::groups);
    dout().init(4 * Traits::groups);
    ptx::barriers_ready();
  }
};

}  // namespace cf

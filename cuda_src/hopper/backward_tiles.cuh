// Shared memory of the backward kernel, and the barriers in it.
#pragma once

#include "backward_work.cuh"
#include "ring.cuh"

namespace cf {

template <typename Config>
struct HopperBackwardTraits {
  static constexpr int threads = 32 * Config::warps;
  static constexpr int groups = 2, stages = 2;          // consumers, of 64 keys each; tiles of rows
  static constexpr int k_bytes = panels_bytes(Config::Bc, Config::d);
  static constexpr int v_bytes = panels_bytes(Config::Bc, Config::d_v);
  static constexpr int q_bytes = panels_bytes(Config::Br, Config::d);
  static constexpr int dout_bytes = panels_bytes(Config::Br, Config::d_v);
  static constexpr int score_bytes = panels_bytes(Config::Bc, Config::Br);
  static constexpr int state_bytes = 2 * Config::Br * 4;
  // Barriers and the block's work take the first 1,024 bytes.
  static constexpr int ranges_bytes = groups * Config::Br * int(sizeof(KeyRange));
  static constexpr int smem_bytes =
      PANEL_ALIGNMENT + k_bytes + v_bytes
      + stages * (q_bytes + dout_bytes + score_bytes + state_bytes) + ranges_bytes;
  // Of a thread, out of the 168 of each that the block is launched with: what is raised in one
  // place must have been lowered in another, or the raise waits for ever.
  static constexpr int producer_registers = 24, consumer_registers = 240;
  // Each consumer has 64 x 64 of the tile of dQ: all rows of half the columns, or all columns of
  // half the rows.
  static constexpr bool half_rows = Config::Br == 128;
  // dV += P^T dO runs beside the arithmetic of dS, where registers allow it.
  static constexpr bool early = Config::Br == 64;
  static_assert(Config::warps == 12 && Config::Bc == 128, "two consumers have 64 keys each");
  static_assert(producer_registers + groups * consumer_registers
                    <= Config::warps / 4 * (65536 / threads / 8 * 8),
                "more registers than the block is launched with");
  static_assert((Config::Br == 64 && Config::d == 128) || (Config::Br == 128 && Config::d == 64),
                "two consumers have 64 x 64 of dQ each");
  static_assert(Config::d_v == Config::d, "d and d_v are padded to the same width");
};

template <typename Config>
struct HopperBackwardTiles {
  using Traits = HopperBackwardTraits<Config>;
  using RowRing = Ring<Traits::stages>;
  KeyWork* work;
  unsigned char* memory_;
  SmemAddress barriers;    // behind the work
  SmemAddress tiles;       // K, V, Q [stages], dO [stages], dS [stages], each in panels

  CF_DEVICE explicit HopperBackwardTiles(unsigned char* memory)
      : work(reinterpret_cast<KeyWork*>(memory)),
        memory_(memory),
        barriers(ptx::smem_address(memory) + 128),
        tiles(ptx::smem_address(memory) + PANEL_ALIGNMENT) {
    static_assert(sizeof(KeyWork) <= 128, "the barriers begin behind the work");
  }

  // What the tiles lie in.
  CF_DEVICE float* memory() const { return reinterpret_cast<float*>(memory_ + PANEL_ALIGNMENT); }
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
  CF_DEVICE SmemAddress keys_full() const { return barriers; }
  CF_DEVICE RowRing q() const { return {barriers + 8}; }
  CF_DEVICE RowRing dout() const { return {q().barriers + RowRing::bytes}; }
  // One thread, before the block's threads meet.
  CF_DEVICE void init_barriers() const {
    ptx::barrier_init(keys_full(), 1);
    q().init(4 * Traits::groups);
    dout().init(4 * Traits::groups);
    ptx::barriers_ready();
  }
};

}  // namespace cf

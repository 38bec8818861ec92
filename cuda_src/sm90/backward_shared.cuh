// Shared memory that the backward kernels for sm_90a have in common, and the barriers of its tiles.
#pragma once

#include "backward_work.cuh"
#include "ring.cuh"

namespace cf {

// Barriers and the block's work take the first 1,024 bytes.
template <typename Config>
struct BackwardSharedTraits {
  static constexpr int threads = 32 * Config::warps;
  static constexpr int groups = 2, stages = 2;          // consumers; tiles of rows
  static constexpr int k_bytes = panels_bytes(Config::Bc, Config::d);
  static constexpr int v_bytes = panels_bytes(Config::Bc, Config::d_v);
  static constexpr int q_bytes = panels_bytes(Config::Br, Config::d);
  static constexpr int dout_bytes = panels_bytes(Config::Br, Config::d_v);
  static constexpr int score_bytes = panels_bytes(Config::Bc, Config::Br);
  static constexpr int state_bytes = 2 * Config::Br * 4;
  static constexpr int ranges_bytes = groups * Config::Br * int(sizeof(KeyRange));
  static constexpr int shared_bytes =
      PANEL_ALIGNMENT + k_bytes + v_bytes
      + stages * (q_bytes + dout_bytes + score_bytes + state_bytes) + ranges_bytes;
  // Of a thread, out of the 168 of each that the block is launched with: what is raised in one
  // place must have been lowered in another, or the raise waits for ever.
  static constexpr int producer_registers = 24, consumer_registers = 240;
  static_assert(producer_registers + groups * consumer_registers
                    <= Config::warps / 4 * (65536 / threads / 8 * 8),
                "more registers than the block is launched with");
};

template <typename Config, typename Traits_>
struct BackwardShared {
  using Traits = Traits_;
  using RowRing = Ring<Traits::stages>;
  KeyWork* work;
  SmemAddress barriers;    // behind the work
  SmemAddress tiles;       // K, V, Q [stages], dO [stages], dS [stages], each in panels

  CF_DEVICE explicit BackwardShared(unsigned char* memory)
      : work(reinterpret_cast<KeyWork*>(memory)),
        barriers(ptx::smem_address(memory) + 128),
        tiles(ptx::smem_address(memory) + PANEL_ALIGNMENT) {
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
  CF_DEVICE SmemAddress keys_full() const { return barriers; }
  CF_DEVICE RowRing q() const { return {barriers + 8}; }
  CF_DEVICE RowRing dout() const { return {q().barriers + RowRing::bytes}; }
};

}  // namespace cf

// SmemAddress memory of the forward kernel, and the barriers in it.
#pragma once

#include "../ptx/wgmma.cuh"
#include "ring.cuh"
#include "work.cuh"

namespace cf {

constexpr int SMEM_MOST = 227 * 1024;     // of a block on sm_90
constexpr int WORKS = 4;                  // one to come, one begun, one to be stored; a power of 2

template <typename Config>
struct ForwardSm90Traits {
  using T = typename Config::element;
  static constexpr int threads = 32 * Config::warps;
  static constexpr int groups = Config::warps / 4 - 1;     // consumers: warpgroups of 64 rows
  static constexpr int q_bytes = panels_bytes(64, Config::d);
  static constexpr int k_bytes = panels_bytes(Config::Bc, Config::d);
  static constexpr int v_bytes = panels_bytes(Config::Bc, Config::d_v);
  // Results of 16 bits leave through shared memory: a place takes a panel of each warp's rows.
  static constexpr bool tiled = !Config::wide && Config::narrow == 0;
  static constexpr int out_panels = tiled ? ceil_div(Config::d_v, PANEL) : 0;
  static constexpr int out_bytes = panels_bytes(Config::Br, PANEL);
  // Works, barriers and seen keys take the first 1,024 bytes. K and V come in four stages each
  // where they fit beside two tiles of Q, which pays where works are short: a new head's keys come
  // from afar. Two tiles of Q where they fit: the next one then comes while this one is in use.
  static constexpr int room = SMEM_MOST - PANEL_ALIGNMENT - (tiled ? out_bytes : 0);
  static constexpr int kv_bytes = k_bytes + v_bytes, all_q_bytes = groups * q_bytes;
  static constexpr int stages = 4 * kv_bytes + 2 * all_q_bytes <= room ? 4 : 2;
  static constexpr int q_stages = stages * kv_bytes + 2 * all_q_bytes <= room ? 2 : 1;
  static constexpr int loaded_bytes = PANEL_ALIGNMENT + stages * kv_bytes + q_stages * all_q_bytes;
  static constexpr int out_places = min(out_panels, (SMEM_MOST - loaded_bytes) / out_bytes);
  static constexpr int smem_bytes = loaded_bytes + out_places * out_bytes;
  // Of a thread, out of the 65,536 that the block is launched with: the sum must not pass them.
  static constexpr int producer_registers = groups == 2 ? 40 : 32;
  static constexpr int consumer_registers = groups == 2 ? 232 : 160;
  // Consumers take turns at the products, so that one's products run beside the other's softmax.
  // With wide accumulators the products outlast the softmax anyway.
  static constexpr bool takes_turns = Config::d_v <= 128;
  // Half a tile of keys, where that is all that a warp sees, takes half the exponentials. Narrow
  // heads gain by it; for wide ones they are not what a step takes, and three consumers have no
  // registers for a second way.
  static constexpr bool halves = groups == 2 && Config::d_v <= 64 && !hides_any<Config>();
  static_assert(Config::Br == 64 * groups && (groups == 2 || groups == 3),
                "Br must be 64 rows for each of 2 or 3 consumers");
  static_assert(Config::Bc % 16 == 0 && Config::d % 16 == 0 && Config::d_v % 16 == 0,
                "Bc, d and d_v must be multiples of 16");
  static_assert(out_places > 0 || !tiled, "no room for results in shared memory");
  static_assert(smem_bytes <= SMEM_MOST, "the tiles do not fit in shared memory");
  static constexpr int barriers_bytes =
      Ring<WORKS>::bytes + 2 * Ring<stages>::bytes + groups * Ring<q_stages>::bytes;
  static_assert(WORKS * int(sizeof(Work)) + barriers_bytes + 64 * groups <= PANEL_ALIGNMENT,
                "works, barriers and seen keys do not fit before the tiles");
};

template <typename Config>
struct ForwardSm90Tiles {
  using Traits = ForwardSm90Traits<Config>;
  using QRing = Ring<Traits::q_stages>;
  using KRing = Ring<Traits::stages>;
  Work* works;             // [WORKS]
  uint32* seen;            // [4 groups, 4]: see SeenColumns
  SmemAddress barriers;         // behind the works
  SmemAddress tiles;            // Q [q_stages][groups], K [stages], V [stages], each in panels,
                                // and a warp's panels of results [4 groups][out_places]

  CF_DEVICE explicit ForwardSm90Tiles(unsigned char* memory)
      : works(reinterpret_cast<Work*>(memory)),
        seen(reinterpret_cast<uint32*>(memory + WORKS * sizeof(Work) + Traits::barriers_bytes)),
        barriers(ptx::smem_address(memory) + WORKS * SmemAddress(sizeof(Work))),
        tiles(ptx::smem_address(memory) + PANEL_ALIGNMENT) {}

  CF_DEVICE SmemAddress Q(int stage, int group) const {
    return tiles + (stage * Traits::groups + group) * Traits::q_bytes;
  }
  CF_DEVICE SmemAddress K(int stage) const {
    return Q(Traits::q_stages, 0) + stage * Traits::k_bytes;
  }
  CF_DEVICE SmemAddress V(int stage) const { return K(Traits::stages) + stage * Traits::v_bytes; }
  CF_DEVICE SmemAddress out(int warp) const {
    return V(Traits::stages) + warp * Traits::out_places * panels_bytes(16, PANEL);
  }
  CF_DEVICE Ring<WORKS> work() const { return {barriers}; }
  CF_DEVICE KRing k() const { return {barriers + Ring<WORKS>::bytes}; }
  CF_DEVICE KRing v() const { return {k().barriers + KRing::bytes}; }
  CF_DEVICE QRing q(int group) const {
    return {v().barriers + KRing::bytes + group * QRing::bytes};
  }
  // One thread, before the block's threads meet.
  CF_DEVICE void init_barriers() const {
    work().init(4 * Traits::groups);
    k().init(4 * Traits::groups);
    v().init(4 * Traits::groups);
    for (int group = 0; group < Traits::groups; ++group) q(group).init(4);
    ptx::barriers_ready();
  }
};

}  // namespace cf

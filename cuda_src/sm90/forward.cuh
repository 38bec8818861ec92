// The forward kernel for sm_90a: one warpgroup whose first thread loads, and two or three that
// compute, on tiles of 64 query rows each. Blocks stay and take one tile after the other.
#pragma once

#include "consumer.cuh"
#include "producer.cuh"

namespace cf {

// One warp: the block's works without keys. Nobody else sees them.
template <typename Config>
CF_DEVICE void store_empty_works(const ForwardSm90Params& p) {
  Turns<Config> turns(p);
  while (turns.next()) {
    Work w;
    turns.open(w);
    if (!w.empty()) continue;
    if constexpr (Config::narrow == 2) {
      store_nothing<Config, uint16>(p, w);
    } else {
      store_nothing<Config, uint32>(p, w);
    }
  }
}

template <typename Config>
CF_DEVICE void forward_sm90(const ForwardSm90Params& p) {
  using Traits = ForwardSm90Traits<Config>;
  CF_DYNAMIC_SHARED(memory);
  const ForwardSm90Tiles<Config> tiles(memory);
  if (threadIdx.x == 0) tiles.init_barriers();
  ptx::sync_block("barriers_ready");
  // One branch, with nothing in registers across it: or they cannot change hands.
  if (threadIdx.x < 128) {
    ptx::lower_registers<Traits::producer_registers>();
    if (threadIdx.x == 0) Producer<Config>{p, tiles}.run();
    if (threadIdx.x / 32 == 1) store_empty_works<Config>(p);
  } else {
    ptx::raise_registers<Traits::consumer_registers>();
    Consumer<Config>(p, tiles, int(threadIdx.x) / 128 - 1).run();
  }
}

}  // namespace cf

// The backward kernel for sm_90a: one warpgroup whose first thread loads, and two that own 64 keys
// each, whose dK and dV they sum up while they walk over the rows that see them.
// Dao, "FlashAttention-2" (2023), algorithm 2; Shah et al., "FlashAttention-3" (2024), section 3.
#pragma once

#include "backward_consumer.cuh"
#include "backward_producer.cuh"

namespace cf {

// Tasks: tiles of keys of a key head, one for each block.
template <typename Config>
CF_DEVICE void backward_sm90(const BackwardSm90Params& p) {
  using Traits = BackwardSm90Traits<Config>;
  CF_DYNAMIC_SHARED(memory);
  const BackwardSm90Tiles<Config> tiles(memory);
  if (threadIdx.x == 0) {
    *tiles.work = open_key_work<Config>(p, blockIdx.x);
    tiles.init_barriers();
  }
  ptx::sync_block("work_opened");                       // and the barriers are there
  // One branch, with nothing in registers across it: or they cannot change hands.
  if (threadIdx.x < 128) {
    ptx::lower_registers<Traits::producer_registers>();
    if (threadIdx.x == 0) BackwardProducer<Config, BackwardSm90Tiles<Config>>{p, tiles}.run();
  } else {
    ptx::raise_registers<Traits::consumer_registers>();
    BackwardConsumer<Config>(p, tiles, ptx::uniform(int(threadIdx.x) / 128 - 1)).run();
  }
}

}  // namespace cf

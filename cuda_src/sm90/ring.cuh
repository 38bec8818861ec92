// Tiles that the producer fills and the consumers release, in a ring.
#pragma once

#include "../ptx/hopper.cuh"

namespace cf {

// Where a count of tiles stands in a ring of `stages`, and the parity of its pass through it.
template <int stages>
struct Place {
  static_assert((stages & (stages - 1)) == 0, "a ring has a power of 2 of stages");
  uint32 count = 0;

  CF_DEVICE int stage() const { return int(count % stages); }
  CF_DEVICE uint32 parity() const { return count / stages % 2; }
  CF_DEVICE Place before() const { return {count - 1}; }
};

// The barriers of a ring: for each stage, a tile has come; for each stage, all have done with it.
template <int stages>
struct Ring {
  SmemAddress barriers;
  static constexpr int bytes = 2 * stages * 8;

  CF_DEVICE SmemAddress full(int stage) const { return barriers + 8 * stage; }
  CF_DEVICE SmemAddress empty(int stage) const { return barriers + 8 * (stages + stage); }
  CF_DEVICE void init(int releases) const {
    for (int i = 0; i < stages; ++i) {
      ptx::barrier_init(full(i), 1);
      ptx::barrier_init(empty(i), releases);
    }
  }
  // The producer waits until a tile may be overwritten. A barrier that has completed no phase
  // counts as having completed one of parity 1.
  CF_DEVICE void claim(Place<stages> place, const char* name) const {
    ptx::barrier_wait(empty(place.stage()), place.parity() ^ 1, name);
  }
  // Whether a tile is there; the same in all lanes, which the compiler sees.
  CF_DEVICE bool has(Place<stages> place) const {
    return !__any_sync(0xFFFFFFFF, !ptx::barrier_test(full(place.stage()), place.parity()));
  }
  CF_DEVICE void wait(Place<stages> place, const char* name) const {
    ptx::barrier_wait(full(place.stage()), place.parity(), name);
  }
  // One lane of each warp: the warp has done with the tile.
  CF_DEVICE void release(Place<stages> place) const {
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(empty(place.stage()));
  }
};

}  // namespace cf

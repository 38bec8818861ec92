// What two warps may do with 16 bytes of shared memory for each thread, mostly racing: a unit to
// test the race detector with. The numbers are those of tests/test_cuda_on_cpu_races.py.
#pragma once

#include "ptx/hopper.cuh"
#include "ptx/shared.cuh"

namespace cf {

struct RaceParams {
  uint64 number, from;             // from: 16 bytes for each thread
};

struct Part {
  uint32* memory;
  const RaceParams& p;
  int me = int(threadIdx.x);

  CF_DEVICE bool first_warp() const { return me < 32; }
  CF_DEVICE uint32* of(int thread) const { return memory + 4 * thread; }
  CF_DEVICE void write() const { *of(me) = uint32(me); }
  CF_DEVICE void read(int thread) const { volatile uint32 x = *of(thread); }
  CF_DEVICE void load_rows(int thread) const {
    uint32 x[4];
    ptx::load_matrices(x, ptx::Shared(of(thread)));
  }
  CF_DEVICE void copy() const {
    ptx::copy_16_bytes(ptx::Shared(of(me)), p.from + 16 * me, true);
    ptx::close_copies();
  }
  CF_DEVICE SmemAddress barrier() const { return ptx::smem_address(of(64)); }
};

// With the other warp, or with the next lane.
CF_DEVICE void exchange_words(const Part& part) {
  const int other = part.me ^ 32, next = part.me ^ 1;
  part.write();
  switch (part.p.number) {
    case 0: part.read(other); break;
    case 1: ptx::sync_block("block"); part.read(other); break;
    case 2: ptx::sync_warp("warp"); part.read(other); break;
    case 3: part.read(next); break;
    case 4: ptx::sync_warp("warp"); part.read(next); break;
    case 5: __shfl_xor_sync(0xFFFFFFFF, other, 1); part.read(next); break;
    case 6: ptx::named_barrier_wait(1, 64, "both warps"); part.read(other); break;
    case 7: ptx::named_barrier_wait(1 + part.me / 32, 32, "a warp"); part.read(other); break;
    case 8: ptx::sync_block("block"); part.load_rows(other); part.write(); break;
    case 9: ptx::sync_block("block"); part.load_rows(part.me); part.write(); break;
  }
}

CF_DEVICE void copy_words(const Part& part) {
  const int other = part.me ^ 32;
  part.copy();
  switch (part.p.number) {
    case 10: ptx::wait_for_copies<0>("copied"); ptx::sync_block("block"); part.read(other); break;
    case 11: ptx::wait_for_copies<0>("copied"); part.read(other); break;
    case 12: ptx::sync_block("block"); part.load_rows(other); break;
    case 13: part.read(part.me); break;
  }
}

// From the first warp to the second.
CF_DEVICE void hand_over(const Part& part) {
  const bool gives = part.first_warp();
  if (part.me == 0) ptx::barrier_init(part.barrier(), 32);
  ptx::sync_block("block");
  const auto give = [&](const auto& arrive) { part.write(); arrive(); };
  const auto take = [&](const auto& wait) { wait(); part.read(part.me ^ 32); };
  const auto arrive = [&] { ptx::barrier_arrive(part.barrier()); };
  const auto wait = [&] { ptx::barrier_wait(part.barrier(), 0, "handed over"); };
  const auto arrive_numbered = [&] { ptx::named_barrier_arrive(1, 64); };
  const auto wait_numbered = [&] { ptx::named_barrier_wait(1, 64, "met"); };
  switch (part.p.number) {
    case 14: gives ? give(arrive) : take(wait); break;
    case 15: gives ? give(arrive) : take([] {}); break;
    case 16: if (gives) arrive(); gives ? part.write() : take(wait); break;
    case 17: gives ? give(arrive_numbered) : take(wait_numbered); break;
    case 18: gives ? give(wait_numbered) : take(arrive_numbered); break;
  }
}

CF_DEVICE void races_of_two_warps(const RaceParams& p) {
  CF_DYNAMIC_SHARED(memory);
  const Part part = {reinterpret_cast<uint32*>(memory), p};
  if (p.number < 10) {
    exchange_words(part);
  } else if (p.number < 14) {
    copy_words(part);
  } else {
    hand_over(part);
  }
}

}  // namespace cf

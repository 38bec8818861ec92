// What fibers and twins tell the race detector of races.cpp; nothing where CF_RACES is not defined.
//
// The compiler reports the plain accesses of kernels. What twins read and write in the place of an
// instruction they report themselves, where and when the instruction does it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

#ifdef CF_RACES
#define CF_REPORT(declaration) declaration;
#else
#define CF_REPORT(declaration) inline declaration {}
#endif
// What stands for an instruction is part of the code that has it: its place is the caller's.
#define CF_INSTRUCTION inline __attribute__((always_inline))

namespace races {

// How far in each fiber's past something lies; an empty one lies behind everything.
using Clock = std::vector<uint32_t>;

// A block starts, of so many threads; *current is the fiber that runs.
CF_REPORT(void begin_block(const void* shared, size_t bytes, unsigned threads,
                           const unsigned* current))
// The memory is shared no longer.
CF_REPORT(void end_block())

// The current fiber's past becomes part of `into`; its future does not.
CF_REPORT(void release(Clock& into))
CF_REPORT(void acquire(const Clock& from))
// All that is released in `clock` lies in the past of those who wait; it starts anew.
CF_REPORT(void pass(Clock& clock, const std::vector<unsigned>& waiting))
// These fibers have met. by_shuffle: by an instruction that keeps the lanes of a warp in step but
// promises nothing about memory.
CF_REPORT(void meet(const std::vector<unsigned>& fibers, bool by_shuffle))
// Phase number `phase` of a barrier is complete.
CF_REPORT(void complete(Clock& coming, Clock& done, unsigned barrier, unsigned phase))

CF_REPORT(void read(const void* address, size_t bytes))
CF_REPORT(void write(const void* address, size_t bytes))
// By the async proxy, on behalf of an instruction at `code`: tensor cores that read shared memory.
// A thread's writes are there for it once the thread has fenced them.
CF_REPORT(void read_async(const void* address, size_t bytes, uintptr_t code))
CF_REPORT(void fence_async())
// A copy starts: nobody may touch the bytes until it has landed. It lands in the thread that waits,
// or in a phase of a barrier.
CF_REPORT(void start_copy(const void* address, size_t bytes))
CF_REPORT(void land_copy(const void* address, size_t bytes))
CF_REPORT(void land_copy_at(const void* address, size_t bytes, unsigned barrier, unsigned phase))

// Where this was called.
CF_REPORT(void note_place(uintptr_t& code))

// While there is one, accesses are not looked at.
CF_REPORT(void look_away(int by))
struct Unseen {
  Unseen() { look_away(1); }
  ~Unseen() { look_away(-1); }
};

}  // namespace races

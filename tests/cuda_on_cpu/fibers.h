// The part of CUDA C++ that the kernels use, for a C++ compiler: the threads of a block are fibers
// of one system thread, blocks run one after the other.
//
// A fiber runs until it waits at a barrier, a shuffle or a product of its warp; which of those
// that can go on comes next is drawn at random. An order that no barrier forbids so comes up sooner
// or later, and a result that depends on it differs: that is the race check. A barrier can be
// left out by its name. Shared memory starts as any byte, 0xFF for NaN.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "races.h"

#define __global__
#define __device__
#define __shared__
#define __host__
#define __forceinline__ CF_INSTRUCTION
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define CF_DYNAMIC_SHARED(name) unsigned char* name = fibers::block->shared.get()
#define threadIdx (fibers::Index{fibers::current})
#define blockIdx (fibers::Index{fibers::block->index})
#define gridDim (fibers::Index{fibers::block->grid})

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fibers {

constexpr unsigned WARP = 32;
constexpr size_t STACK = 64 << 10;
constexpr size_t SLOT = 64;               // bytes that a lane can hand over at one meeting

struct Index {
  unsigned x;
};

// A copy that has been started: 16 bytes, or zeros if there is nothing.
struct Copy {
  unsigned char* to;
  unsigned long long from;
  bool there;

  void land() const {
    races::land_copy(to, 16);
    const races::Unseen unseen;
    if (there) {
      memcpy(to, reinterpret_cast<const void*>(from), 16);
    } else {
      memset(to, 0, 16);
    }
  }
};

// A barrier in shared memory: it counts arrivals and bytes, and completes phase after phase.
struct PhaseBarrier {
  int arrivals = 0;                        // that complete a phase
  int missing = 0;                         // of the current phase
  long long bytes = 0;                     // that copies still owe to it
  unsigned number = 0;                     // of the block's barriers
  unsigned phases = 0;                     // completed so far
  std::vector<unsigned> waiting;
  races::Clock coming, done;               // of the current phase; of those that are complete
};

// A numbered barrier of a block, to which threads come to wait or only to be counted.
struct NamedBarrier {
  unsigned count = 0;
  std::vector<unsigned> waiting;
  bool yes = false, any = false;           // a vote that goes on; the outcome of the last one
  races::Clock coming;
};

struct Fiber {
  jmp_buf state;
  ucontext_t start;
  std::unique_ptr<char[]> stack{new char[STACK]};
  bool started = false;
  std::vector<std::vector<Copy>> copies;   // in groups; the last one is still open
  std::vector<std::vector<std::function<void()>>> products;   // likewise
  std::vector<std::vector<std::function<void()>>> stores;     // likewise: copies to global memory
  unsigned votes = 0;                      // how many it has taken part in
};

// Where fibers meet: all of a block, or of a warp.
struct Meeting {
  std::vector<unsigned> waiting;
};

struct Warp {
  Meeting meeting;
  unsigned parity[WARP] = {};              // which half of `slots` a lane fills next
  alignas(64) unsigned char slots[2][WARP][SLOT];
};

// Shared memory begins on a border of 1,024 bytes.
inline unsigned char* allocate_shared(size_t bytes) {
  return new (std::align_val_t(1024)) unsigned char[bytes];
}
inline void release_shared(unsigned char* memory) {
  ::operator delete[](memory, std::align_val_t(1024));
}

// The name of a barrier, wait or fence, and the line of the sources that has it.
struct Name {
  const char *text, *file;
  int line;

  Name(const char* text_, const char* file_ = __builtin_FILE(), int line_ = __builtin_LINE())
      : text(text_), file(file_), line(line_) {}
  // Of a ring's barrier, for which any part of a kernel may wait.
  static Name of_ring(const char* text) { return Name(text, "", 0); }
};

struct Block {
  unsigned index = 0, grid = 1, threads = 0;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<unsigned> ready;             // fibers that can go on
  Meeting all;
  unsigned alive = 0;
  unsigned yes[2] = {};                    // the last votes that somebody said yes in
  std::map<unsigned long long, PhaseBarrier> barriers;   // by address
  std::map<int, NamedBarrier> named;
  std::vector<std::function<void()>> flights;            // copies that land sooner or later
  std::unique_ptr<unsigned char[], void (*)(unsigned char*)> shared{nullptr, release_shared};
  std::function<void()> kernel;
  jmp_buf scheduler;
  uint64_t random = 0;
  unsigned favourite = 0;                  // the warp whose fibers are preferred
  std::string skip;                        // the name of a barrier to leave out
  // The barriers that were reached: name and place.
  std::map<std::string, std::pair<std::string, int>> seen;
  std::string doubled;                     // a name that several of them have
};

inline Block* block = nullptr;
inline unsigned current = 0;

// A number below n.
unsigned draw(unsigned n);

// Back to the scheduler; returns when it is this fiber's turn again.
void wait();

// Waits until `count` fibers are here.
void meet(Meeting& meeting, unsigned count, bool by_shuffle = false);

// Lets those go on who wait in `waiting`.
inline void wake(std::vector<unsigned>& waiting) {
  block->ready.insert(block->ready.end(), waiting.begin(), waiting.end());
  waiting.clear();
}

inline unsigned lane() { return current % WARP; }
inline Warp& warp() { return block->warps[current / WARP]; }

// Whether the barrier, wait or fence of this name is to be left out; keeps account of them. Two
// places with one name would be left out together, and each could hide that the other is not
// needed.
bool left_out(const Name& name);

// Every lane shows a value to its warp; returns where all 32 lie, until the warp's next but one
// exchange.
template <typename T>
unsigned char (*exchange(const T& value))[SLOT] {
  static_assert(sizeof(T) <= SLOT, "a slot is too small");
  const unsigned half = warp().parity[lane()];
  warp().parity[lane()] = 1 - half;
  memcpy(warp().slots[half][lane()], &value, sizeof value);
  meet(warp().meeting, WARP, true);
  return warp().slots[half];
}

template <typename T>
T shown(unsigned char (*slots)[SLOT], unsigned from) {
  T value;
  memcpy(&value, slots[from], sizeof value);
  return value;
}

// Runs the kernel over a grid of blocks; returns 0, 1 after a deadlock, 2 after a wild address, 4
// if barriers at two places have one name.
int launch(std::function<void()> kernel, unsigned grid, unsigned threads, size_t shared_bytes,
           uint64_t seed, const char* skip, int fill);

}  // namespace fibers

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return fibers::shown<T>(fibers::exchange(value), fibers::lane() ^ unsigned(mask));
}

template <typename T>
T __shfl_sync(unsigned, T value, int from) {
  return fibers::shown<T>(fibers::exchange(value), unsigned(from));
}

inline bool __any_sync(unsigned, bool value) {
  unsigned char (*slots)[fibers::SLOT] = fibers::exchange(value);
  bool any = false;
  for (unsigned from = 0; from < fibers::WARP; ++from) {
    any = any || fibers::shown<bool>(slots, from);
  }
  return any;
}

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
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <map>
#include <memory>
#include <new>
#include <set>
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

inline unsigned draw(unsigned n) {
  block->random = block->random * 6364136223846793005u + 1442695040888963407u;
  return unsigned((block->random >> 33) % n);
}

// Back to the scheduler; returns when it is this fiber's turn again.
__attribute__((noinline)) inline void wait() {
  if (!_setjmp(block->fibers[current].state)) _longjmp(block->scheduler, 1);
}

// Waits until `count` fibers are here.
inline void meet(Meeting& meeting, unsigned count, bool by_shuffle = false) {
  meeting.waiting.push_back(current);
  if (meeting.waiting.size() < count) return wait();
  races::meet(meeting.waiting, by_shuffle);
  block->ready.insert(block->ready.end(), meeting.waiting.begin(), meeting.waiting.end());
  meeting.waiting.clear();
  wait();
}

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
inline bool left_out(const Name& name) {
  const std::pair<std::string, int> place(name.file, name.line);
  if (block->seen.try_emplace(name.text, place).first->second != place) block->doubled = name.text;
  return name.text == block->skip;
}

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

inline void entry() {
  block->kernel();
  --block->alive;
  block->fibers[current].started = false;
  _longjmp(block->scheduler, 1);
}

inline void resume(Fiber& fiber) {
  if (fiber.started) _longjmp(fiber.state, 1);
  fiber.started = true;
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = fiber.stack.get();
  fiber.start.uc_stack.ss_size = STACK;
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, entry, 0);
  setcontext(&fiber.start);
}

// One of the fibers that can go on. For a while most come from one warp, so that warps get far
// ahead of each other: drawn evenly they would keep step.
inline unsigned pick_fiber(Block& b) {
  if (draw(64) == 0) b.favourite = draw(b.threads / WARP);
  unsigned pick = draw(unsigned(b.ready.size()));
  for (int i = 0; i < 8 && b.ready[pick] / WARP != b.favourite; ++i) {
    pick = draw(unsigned(b.ready.size()));
  }
  return pick;
}

// One of the copies that are under way ends.
inline void land_one(Block& b) {
  const unsigned pick = draw(unsigned(b.flights.size()));
  const std::function<void()> land = b.flights[pick];
  b.flights.erase(b.flights.begin() + pick);
  land();
}

// Runs one block; false if its threads wait for each other for ever.
__attribute__((noinline)) inline bool run_block(Block& b) {
  block = &b;
  b.alive = b.threads;
  b.all.waiting.clear();
  b.yes[0] = b.yes[1] = 0;
  b.ready.clear();
  for (Warp& w : b.warps) w.meeting.waiting.clear();
  b.barriers.clear();
  b.named.clear();
  b.flights.clear();
  for (unsigned i = 0; i < b.threads; ++i) b.ready.push_back(i);
  while (b.alive != 0) {
    if (!b.flights.empty() && (b.ready.empty() || draw(1024) == 0)) land_one(b);
    if (b.ready.empty()) {
      if (b.flights.empty()) return false;
      continue;
    }
    const unsigned pick = pick_fiber(b);
    current = b.ready[pick];
    b.ready[pick] = b.ready.back();
    b.ready.pop_back();
    if (!_setjmp(b.scheduler)) resume(b.fibers[current]);
  }
  return true;
}

inline sigjmp_buf crash;
inline void on_crash(int) { siglongjmp(crash, 1); }

// Runs the kernel over a grid of blocks; returns 0, 1 after a deadlock, 2 after a wild address, 4
// if barriers at two places have one name. seen: the names of the barriers; or that one.
inline int launch(std::function<void()> kernel, unsigned grid, unsigned threads,
                  size_t shared_bytes, uint64_t seed, const char* skip, int fill,
                  std::set<std::string>& seen) {
  Block b;
  b.grid = grid;
  b.threads = threads;
  b.kernel = std::move(kernel);
  b.fibers = std::vector<Fiber>(threads);
  b.warps = std::vector<Warp>(threads / WARP);
  b.random = seed;
  b.skip = skip;
  struct sigaction before, ours = {};
  ours.sa_handler = on_crash;
  sigaction(SIGSEGV, &ours, &before);
  volatile bool finished = true, crashed = sigsetjmp(crash, 1) != 0;
  for (b.index = 0; b.index < grid && finished && !crashed; ++b.index) {
    // An array of its own, of exactly this size, so that AddressSanitizer sees every byte too many.
    b.shared.reset(allocate_shared(shared_bytes));
    memset(b.shared.get(), fill, shared_bytes);
    races::begin_block(b.shared.get(), shared_bytes, threads, &current);
    for (Fiber& fiber : b.fibers) {
      fiber.started = false;
      fiber.votes = 0;
      fiber.copies.assign(1, {});
      fiber.products.assign(1, {});
      fiber.stores.assign(1, {});
    }
    finished = run_block(b);
  }
  races::end_block();
  sigaction(SIGSEGV, &before, nullptr);
  seen.clear();
  if (!b.doubled.empty()) {
    seen.insert(b.doubled);
    return 4;
  }
  for (const auto& [name, place] : b.seen) seen.insert(name);
  return crashed ? 2 : finished ? 0 : 1;
}

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

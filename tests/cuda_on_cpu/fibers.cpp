// How fibers take turns, and a launch of them. Compiled once for all units.
#include "fibers.h"

#include <signal.h>

#include <set>

namespace fibers {

unsigned draw(unsigned n) {
  block->random = block->random * 6364136223846793005u + 1442695040888963407u;
  return unsigned((block->random >> 33) % n);
}

void wait() {
  if (!_setjmp(block->fibers[current].state)) _longjmp(block->scheduler, 1);
}

void meet(Meeting& meeting, unsigned count, bool by_shuffle) {
  meeting.waiting.push_back(current);
  if (meeting.waiting.size() < count) return wait();
  races::meet(meeting.waiting, by_shuffle);
  block->ready.insert(block->ready.end(), meeting.waiting.begin(), meeting.waiting.end());
  meeting.waiting.clear();
  wait();
}

bool left_out(const Name& name) {
  const std::pair<std::string, int> place(name.file, name.line);
  if (block->seen.try_emplace(name.text, place).first->second != place) block->doubled = name.text;
  return name.text == block->skip;
}

static void entry() {
  block->kernel();
  --block->alive;
  block->fibers[current].started = false;
  _longjmp(block->scheduler, 1);
}

static void resume(Fiber& fiber) {
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
static unsigned pick_fiber(Block& b) {
  if (draw(64) == 0) b.favourite = draw(b.threads / WARP);
  unsigned pick = draw(unsigned(b.ready.size()));
  for (int i = 0; i < 8 && b.ready[pick] / WARP != b.favourite; ++i) {
    pick = draw(unsigned(b.ready.size()));
  }
  return pick;
}

// One of the copies that are under way ends.
static void land_one(Block& b) {
  const unsigned pick = draw(unsigned(b.flights.size()));
  const std::function<void()> land = b.flights[pick];
  b.flights.erase(b.flights.begin() + pick);
  land();
}

// Runs one block; false if its threads wait for each other for ever.
static bool run_block(Block& b) {
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

static sigjmp_buf crash;
static void on_crash(int) { siglongjmp(crash, 1); }

static std::set<std::string> seen;         // in the last launch: barriers, or the doubled one

int launch(std::function<void()> kernel, unsigned grid, unsigned threads, size_t shared_bytes,
           uint64_t seed, const char* skip, int fill) {
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

// The names of the barriers that the last run reached, one a line.
EXPORT const char* barriers() {
  static std::string text;
  text.clear();
  for (const std::string& name : seen) text += name + "\n";
  return text.c_str();
}

}  // namespace fibers

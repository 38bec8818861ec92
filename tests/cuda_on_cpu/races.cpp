// A race detector for the shared memory of a block, in the place of the run-time library that
// `-fsanitize=thread` expects: the compiler calls it before each access.
//
// Each byte knows its last write and the reads since; each fiber knows how far in every other's
// past it lies. Two accesses race if one is a write and neither lies in the past of the other, in
// whatever order they come. Flanagan, Freund, "FastTrack" (2009).
#include "races.h"

#include <dlfcn.h>
#include <stdio.h>

#include <algorithm>
#include <map>
#include <string>
#include <tuple>

#define HOOK extern "C"
#define EXPORT extern "C" __attribute__((visibility("default")))
#define CALLER uintptr_t(__builtin_return_address(0))

namespace {

constexpr unsigned WARP = 32, BARRIERS = 64;   // that copies report to
constexpr unsigned NOBODY = ~0u;

struct Access {
  unsigned who = NOBODY;        // a fiber; behind them, barriers whose phase brought a copy
  uint32_t when = 0;
  uintptr_t code = 0;
};

struct Byte {
  Access writer;
  bool coming = false;          // a copy is on its way
  std::vector<Access> readers;
};

enum Kind { READ_AFTER_WRITE, WRITE_AFTER_READ, WRITE_AFTER_WRITE, IN_FLIGHT, NO_FENCE };
constexpr const char* NAMES[] = {"read after write", "write after read", "write after write",
                                 "use of a copy under way", "write without a fence"};

struct Race {
  size_t offset;
  unsigned first, second, block;
};

uintptr_t base = 0;
size_t size = 0;
unsigned threads = 0, blocks = 0;
const unsigned* running = nullptr;
int unseen = 0;
bool strict = false;
std::vector<Byte> shadow;
std::vector<races::Clock> clocks;           // of fibers
std::vector<uint32_t> fenced;               // when each fiber last fenced its writes
std::map<std::tuple<uintptr_t, uintptr_t, Kind, bool>, Race> found;

unsigned current() { return *running; }
races::Clock& clock_of(unsigned fiber) { return clocks[fiber]; }
void tick(unsigned fiber) { ++clocks[fiber][fiber]; }

void raise(races::Clock& to, const races::Clock& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

bool before(const Access& access, const races::Clock& clock) {
  return access.who == NOBODY || access.when <= clock[access.who];
}

void report(size_t offset, const Access& first, const Access& second, Kind kind) {
  const bool same_warp = first.who < threads && first.who / WARP == second.who / WARP;
  found.try_emplace({first.code, second.code, kind, same_warp},
                    Race{offset, first.who, second.who, blocks - 1});
}

void read_byte(Byte& byte, size_t offset, const Access& now, const races::Clock& clock) {
  if (!byte.readers.empty()) {
    const Access& last = byte.readers.back();
    if (last.who == now.who && last.when == now.when) return;
  }
  if (byte.coming) {
    report(offset, byte.writer, now, IN_FLIGHT);
  } else if (!before(byte.writer, clock)) {
    report(offset, byte.writer, now, READ_AFTER_WRITE);
  }
  // Whoever comes after this read comes after those in its past.
  auto& readers = byte.readers;
  readers.erase(std::remove_if(readers.begin(), readers.end(),
                               [&](const Access& x) { return before(x, clock); }), readers.end());
  readers.push_back(now);
}

void write_byte(Byte& byte, size_t offset, const Access& now, const races::Clock& clock) {
  if (byte.coming) {
    report(offset, byte.writer, now, IN_FLIGHT);
  } else if (!before(byte.writer, clock)) {
    report(offset, byte.writer, now, WRITE_AFTER_WRITE);
  }
  for (const Access& reader : byte.readers) {
    if (!before(reader, clock)) report(offset, reader, now, WRITE_AFTER_READ);
  }
  byte.readers.clear();
  byte.writer = now;
  byte.coming = false;
}

// use(byte, offset, access, clock) of each byte of shared memory among those at an address.
template <typename Use>
inline void each(const void* address, size_t bytes, uintptr_t code, const Use& use) {
  const size_t offset = uintptr_t(address) - base;
  if (offset >= size || unseen != 0) return;
  const races::Clock& clock = clock_of(current());
  const Access now = {current(), clock[current()], code};
  for (size_t i = offset; i < std::min(offset + bytes, size); ++i) use(shadow[i], i, now, clock);
}

void note_read(const void* address, size_t bytes, uintptr_t code) {
  each(address, bytes, code, read_byte);
}
void note_write(const void* address, size_t bytes, uintptr_t code) {
  each(address, bytes, code, write_byte);
}

}  // namespace

namespace races {

void begin_block(const void* shared, size_t bytes, unsigned count, const unsigned* current_) {
  base = uintptr_t(shared);
  size = bytes;
  threads = count;
  running = current_;
  unseen = 0;
  ++blocks;
  shadow.assign(bytes, {});
  fenced.assign(threads, 0);
  clocks.assign(threads, Clock(threads + BARRIERS));
  for (unsigned i = 0; i < threads; ++i) tick(i);
}

void end_block() { size = 0; }

void release(Clock& into) {
  raise(into, clock_of(current()));
  tick(current());
}
void acquire(const Clock& from) { raise(clock_of(current()), from); }

void pass(Clock& clock, const std::vector<unsigned>& waiting) {
  for (unsigned fiber : waiting) raise(clock_of(fiber), clock);
  clock.clear();
}

void meet(const std::vector<unsigned>& fibers, bool by_shuffle) {
  if (by_shuffle && strict) return;
  Clock all;
  for (unsigned fiber : fibers) raise(all, clock_of(fiber));
  for (unsigned fiber : fibers) {
    clock_of(fiber) = all;
    tick(fiber);
  }
}

void complete(Clock& coming, Clock& done, unsigned barrier, unsigned phase) {
  raise(done, coming);
  if (done.size() < threads + BARRIERS) done.resize(threads + BARRIERS);
  done[threads + barrier] = phase;
  coming.clear();
}

void read(const void* address, size_t bytes) { note_read(address, bytes, CALLER); }
void write(const void* address, size_t bytes) { note_write(address, bytes, CALLER); }

void note_place(uintptr_t& code) { code = CALLER; }

void read_async(const void* address, size_t bytes, uintptr_t code) {
  each(address, bytes, code, [](Byte& byte, size_t offset, const Access& now, const Clock& clock) {
    const Access& writer = byte.writer;
    const bool of_thread = writer.who < threads && !byte.coming && before(writer, clock);
    if (of_thread && writer.when > fenced[writer.who]) {
      report(offset, writer, now, NO_FENCE);
    }
    read_byte(byte, offset, now, clock);
  });
}
void fence_async() {
  fenced[current()] = clock_of(current())[current()];
  tick(current());
}

void start_copy(const void* address, size_t bytes) {
  const uintptr_t code = CALLER;
  each(address, bytes, code, [](Byte& byte, size_t offset, const Access& now, const Clock& clock) {
    write_byte(byte, offset, now, clock);
    byte.coming = true;
  });
}
void land_copy(const void* address, size_t bytes) {
  each(address, bytes, 0, [](Byte& byte, size_t, const Access& now, const Clock&) {
    byte.writer = {now.who, now.when, byte.writer.code};
    byte.coming = false;
  });
}
void land_copy_at(const void* address, size_t bytes, unsigned barrier, unsigned phase) {
  each(address, bytes, 0, [=](Byte& byte, size_t, const Access&, const Clock&) {
    byte.writer = {threads + barrier, phase, byte.writer.code};
    byte.coming = false;
  });
}

void look_away(int by) { unseen += by; }

}  // namespace races

// From here on lanes of a warp are in order only where __syncwarp or a barrier says so, if `yes`;
// what was found is forgotten.
EXPORT void watch_races(int yes) {
  strict = yes != 0;
  blocks = 0;
  found.clear();
}

// A race a line: kind, whether one warp did both, offset, who came first and second, block, and
// where in the library the two calls came from.
EXPORT const char* races_found() {
  static std::string text;
  Dl_info here;
  dladdr(reinterpret_cast<void*>(&races_found), &here);
  text.clear();
  for (const auto& [key, race] : found) {
    const auto& [first, second, kind, same_warp] = key;
    const uintptr_t start = uintptr_t(here.dli_fbase) + 1;     // within the call, not behind it
    char line[256];
    snprintf(line, sizeof line, "%s;%d;%zu;%u;%u;%u;%zx;%zx\n", NAMES[kind], int(same_warp),
             race.offset, race.first, race.second, race.block, size_t(first - start),
             size_t(second - start));
    text += line;
  }
  return text.c_str();
}

#define ACCESSES(bytes)                                                                         \
  HOOK void __tsan_read##bytes(void* x) { note_read(x, bytes, CALLER); }                        \
  HOOK void __tsan_write##bytes(void* x) { note_write(x, bytes, CALLER); }                      \
  HOOK void __tsan_volatile_read##bytes(void* x) { note_read(x, bytes, CALLER); }               \
  HOOK void __tsan_volatile_write##bytes(void* x) { note_write(x, bytes, CALLER); }             \
  HOOK void __tsan_unaligned_read##bytes(void* x) { note_read(x, bytes, CALLER); }              \
  HOOK void __tsan_unaligned_write##bytes(void* x) { note_write(x, bytes, CALLER); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
HOOK void __tsan_read_range(void* x, size_t bytes) { note_read(x, bytes, CALLER); }
HOOK void __tsan_write_range(void* x, size_t bytes) { note_write(x, bytes, CALLER); }
HOOK void __tsan_vptr_update(void*, void*) {}
HOOK void __tsan_vptr_read(void*) {}
HOOK void __tsan_func_entry(void*) {}
HOOK void __tsan_func_exit() {}
HOOK void __tsan_init() {}
// Of the guards of static objects.
HOOK uint8_t __tsan_atomic8_load(const volatile uint8_t* x, int) { return *x; }

// What cuda_src/ptx/*.cuh does with instructions, in C++ on fibers.
//
// Fragments have the layouts that PTX documents for mma.sync. A copy wipes its target out when it
// starts and lands when its thread waits for it, so that neither a barrier before it nor the wait
// after it can be left out unseen.
#pragma once

namespace cf::ptx {

inline int opaque(int x) { return x; }
template <typename T>
inline void keep_in_memory(T&) {}

struct Shared {
  unsigned char* place;

  explicit Shared(const void* pointer) : place((unsigned char*)pointer) {}
  Shared operator+(int bytes) const { return Shared(place + bytes); }
  Shared kept() const { return *this; }
};

// An element of one of four matrices, which lie where the lanes say.
using Slots = unsigned char (*)[fibers::SLOT];
inline uint32 matrix_element(Slots slots, int matrix, int row, int column) {
  const races::Unseen unseen;              // a lane has read the row that it names
  uint16 x;
  memcpy(&x, fibers::shown<unsigned char*>(slots, 8 * matrix + row) + 2 * column, sizeof x);
  return x;
}

CF_INSTRUCTION void load_matrices(uint32 (&x)[4], Shared row) {
  races::read(row.place, 16);
  const Slots slots = fibers::exchange(row.place);
  const int g = fibers::lane() / 4, t = fibers::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    x[i] = matrix_element(slots, i, g, 2 * t) | matrix_element(slots, i, g, 2 * t + 1) << 16;
  }
}
CF_INSTRUCTION void load_matrices_transposed(uint32 (&x)[4], Shared row) {
  races::read(row.place, 16);
  const Slots slots = fibers::exchange(row.place);
  const int g = fibers::lane() / 4, t = fibers::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    x[i] = matrix_element(slots, i, 2 * t, g) | matrix_element(slots, i, 2 * t + 1, g) << 16;
  }
}

// orders: accesses before it come before those behind it.
inline void count_in(fibers::NamedBarrier& barrier, int threads, bool orders) {
  if (orders) races::release(barrier.coming);
  if (++barrier.count < unsigned(threads)) return;
  barrier.count = 0;
  races::pass(barrier.coming, barrier.waiting);
  fibers::wake(barrier.waiting);
}
inline void named_barrier_arrive(int id, int threads) {
  count_in(fibers::block->named[id], threads, id > 0);
}
inline void count_in_and_wait(int id, int threads) {
  fibers::NamedBarrier& barrier = fibers::block->named[id];
  barrier.waiting.push_back(fibers::current);
  count_in(barrier, threads, id > 0);
  fibers::wait();
}
inline void named_barrier_wait(int id, int threads, fibers::Name name) {
  if (fibers::left_out(name)) return named_barrier_arrive(id, threads);
  count_in_and_wait(id, threads);
}

CF_INSTRUCTION void copy_16_bytes(Shared to, uint64 from, bool there) {
  races::start_copy(to.place, 16);
  const races::Unseen unseen;
  memset(to.place, 0xFF, 16);
  fibers::block->fibers[fibers::current].copies.back().push_back({to.place, from, there});
}
inline void close_copies() { fibers::block->fibers[fibers::current].copies.emplace_back(); }

template <int open>
void wait_for_copies(fibers::Name name) {
  if (fibers::left_out(name)) return;
  auto& copies = fibers::block->fibers[fibers::current].copies;
  while (copies.size() > open + 1) {        // the last group is the one that is being filled
    for (const fibers::Copy& copy : copies.front()) copy.land();
    copies.erase(copies.begin());
  }
}

inline uint16 narrowed(half_t, float x) { return float_to_half(x); }
inline uint16 narrowed(bfloat16_t, float x) { return float_to_bfloat16(x); }

template <typename T>
uint32 pack(float low, float high) {
  return narrowed(T{}, low) | uint32(narrowed(T{}, high)) << 16;
}

inline float exp2_approx(float x) { return ::exp2f(x); }
inline float reciprocal_approx(float x) { return 1 / x; }

// c += a b, with elements of T where the lanes of a fragment have them.
template <typename T, typename Word, typename Sum>
void mma(T, Sum (&c)[8], const Word (&a)[4], const Word (&b)[4]) {
  constexpr int depth = sizeof(T) == 2 ? 16 : 8, count = int(4 * sizeof(Word) / sizeof(T));
  struct Both {
    T a[count], b[count];
  } both;
  memcpy(both.a, a, sizeof both.a);
  memcpy(both.b, b, sizeof both.b);
  const Slots slots = fibers::exchange(both);
  Sum full_a[16][depth], full_b[depth][16];
  for (int from = 0; from < 32; ++from) {
    const Both other = fibers::shown<Both>(slots, from);
    const int g = from / 4, t = from % 4;
    for (int e = 0; e < count; ++e) {
      const int word = count == 8 ? e / 2 : e;
      const int low = count == 8 ? 2 * t + e % 2 : t, far = depth / 2;
      full_a[g + 8 * (word % 2)][low + far * (word / 2)] = product_value(other.a[e]);
      full_b[low + far * (word % 2)][g + 8 * (word / 2)] = product_value(other.b[e]);
    }
  }
  const int g = fibers::lane() / 4, t = fibers::lane() % 4;
  for (int e = 0; e < 8; ++e) {
    c[e] = add_products<T, depth>(c[e], [&](int k) {
      return double(full_a[g + 8 * (e / 2 % 2)][k])
             * double(full_b[k][2 * t + e % 2 + 8 * (e / 4)]);
    });
  }
}

template <typename Sum>
void add_to_global(uint64 address, Sum a, Sum b, Sum c, Sum d) {
  const Sum given[4] = {a, b, c, d};
  const int step = sizeof(Sum) == 8 ? 32 : 1;
  for (int i = 0; i < 4; ++i) reinterpret_cast<Sum*>(address)[i * step] += given[i];
}
template <typename Sum>
void add_to_global(uint64 address, Sum x) {
  *reinterpret_cast<Sum*>(address) += x;
}

}  // namespace cf::ptx

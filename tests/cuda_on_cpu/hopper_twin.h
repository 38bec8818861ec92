// What cuda_src/ptx/hopper.cuh and wgmma.cuh do with instructions, in C++ on fibers.
//
// A copy by the TMA unit wipes its target out when it starts and lands at any time before its
// barrier lets anyone pass. A product computes when it is waited for, from what shared memory and
// registers hold then, which is the latest time that a GPU may read them.
#pragma once

namespace cf::ptx {

inline unsigned char* smem(SmemAddress address) { return (unsigned char*)address; }

inline fibers::PhaseBarrier& phase_barrier(SmemAddress address) {
  return fibers::block->barriers[address];
}
inline void complete_phase(fibers::PhaseBarrier& barrier) {
  if (barrier.missing != 0 || barrier.bytes != 0) return;
  ++barrier.phases;
  races::complete(barrier.coming, barrier.done, barrier.number, barrier.phases);
  barrier.missing = barrier.arrivals;
  fibers::wake(barrier.waiting);
}

inline void barrier_init(SmemAddress barrier, int arrivals) {
  const unsigned number = unsigned(fibers::block->barriers.size());
  phase_barrier(barrier) = {arrivals, arrivals, 0, number};
}
inline void barriers_ready() {}
inline void barrier_arrive(SmemAddress barrier) {
  races::release(phase_barrier(barrier).coming);
  --phase_barrier(barrier).missing;
  complete_phase(phase_barrier(barrier));
}
inline void barrier_expect(SmemAddress barrier, uint32 bytes) {
  phase_barrier(barrier).bytes += bytes;
  barrier_arrive(barrier);
}
inline bool barrier_try(SmemAddress barrier, uint32 parity) {
  const bool passes = phase_barrier(barrier).phases % 2 != parity;
  if (passes) races::acquire(phase_barrier(barrier).done);
  return passes;
}
inline bool barrier_test(SmemAddress barrier, uint32 parity) {
  return barrier_try(barrier, parity);
}
inline void barrier_wait(SmemAddress barrier, uint32 parity, const char* name) {
  if (fibers::left_out(fibers::Name::of_ring(name))) return;
  while (!barrier_try(barrier, parity)) {
    phase_barrier(barrier).waiting.push_back(fibers::current);
    fibers::wait();
  }
}

// A tensor map here: address, four extents, three strides in bytes, the box, in this order. Row r
// of the box that begins at the coordinates:
struct Box {
  const uint64* x;
  int64 at[4];

  Box(const uint64 (&map)[16], int c0, int c1, int c2, int c3, int64 r)
      : x(map), at{c0, c1 + r % int64(x[9]), c2 + r / int64(x[9]) % int64(x[10]),
                   c3 + r / int64(x[9] * x[10])} {}
  // Whether column c of it lies in the array, and where.
  bool has(int64 c) const {
    bool inside = at[0] + c >= 0 && at[0] + c < int64(x[1]);
    for (int i = 1; i < 4; ++i) inside = inside && at[i] >= 0 && at[i] < int64(x[1 + i]);
    return inside;
  }
  uint64 address(int64 c) const {
    return x[0] + 2 * (at[0] + c) + at[1] * x[5] + at[2] * x[6] + at[3] * x[7];
  }
};
// Where element c of row r lies in its 128 bytes.
inline int64 place_in_row(int64 r, int64 c) { return ((c / 8) ^ (r % 8)) * 16 + c % 8 * 2; }

CF_INSTRUCTION void load_box(SmemAddress to, const TensorMap& map, SmemAddress full, int c0, int c1,
                             int c2, int c3) {
  uint64 x[16];
  memcpy(x, &map, sizeof x);
  const int64 rows = int64(x[9] * x[10] * x[11]);
  races::start_copy(smem(to), rows * 128);
  const races::Unseen unseen;
  memset(smem(to), 0xFF, rows * 128);
  fibers::block->flights.push_back([=] {
    races::land_copy_at(smem(to), rows * 128, phase_barrier(full).number,
                        phase_barrier(full).phases + 1);
    const races::Unseen unseen;
    for (int64 r = 0; r < rows; ++r) {
      const Box box(x, c0, c1, c2, c3, r);
      for (int64 c = 0; c < 64; ++c) {
        uint16 element = 0;
        if (box.has(c)) memcpy(&element, (const void*)box.address(c), 2);
        memcpy(smem(to) + r * 128 + place_in_row(r, c), &element, 2);
      }
    }
    phase_barrier(full).bytes -= rows * 128;
    complete_phase(phase_barrier(full));
  });
}

// It reads shared memory when it starts or when that is waited for. If nobody waits, it never does.
// Like an H200 it leaves out whole 16 bytes only: one element inside brings seven more with it.
CF_INSTRUCTION void store_box(const TensorMap& map, SmemAddress from, int c0, int c1, int c2,
                              int c3) {
  uint64 x[16];
  memcpy(x, &map, sizeof x);
  const int64 rows = int64(x[9] * x[10] * x[11]);
  uintptr_t code = 0;
  races::note_place(code);
  races::read_async(smem(from), rows * 128, code);
  std::vector<unsigned char> early;
  if (fibers::draw(2)) early.assign(smem(from), smem(from) + rows * 128);
  auto store = [=] {
    races::read_async(smem(from), rows * 128, code);
    const races::Unseen unseen;
    for (int64 r = 0; r < rows; ++r) {
      const Box box(x, c0, c1, c2, c3, r);
      const unsigned char* row = (early.empty() ? smem(from) : early.data()) + r * 128;
      for (int64 c = 0; c < 64; ++c) {
        if (box.has(c / 8 * 8)) memcpy((void*)box.address(c), row + place_in_row(r, c), 2);
      }
    }
  };
  fibers::block->fibers[fibers::current].stores.back().push_back(store);
}
inline void stores_commit() { fibers::block->fibers[fibers::current].stores.emplace_back(); }
template <int pending>
void stores_read(fibers::Name name) {
  if (fibers::left_out(name)) return;
  auto& stores = fibers::block->fibers[fibers::current].stores;
  while (stores.size() > pending + 1) {
    for (auto& store : stores.front()) store();
    stores.erase(stores.begin());
  }
}

CF_INSTRUCTION void store_matrices(SmemAddress to, const uint32 (&x)[4]) {
  struct Lane {
    SmemAddress to;
    uint32 x[4];
  } mine = {to, {x[0], x[1], x[2], x[3]}};
  unsigned char(*slots)[fibers::SLOT] = fibers::exchange(mine);
  for (int m = 0; m < 4; ++m) {
    const unsigned from = 8 * m + fibers::lane() / 4;
    unsigned char* word = smem(fibers::shown<Lane>(slots, from).to) + fibers::lane() % 4 * 4;
    races::write(word, 4);
    const races::Unseen unseen;
    memcpy(word, &x[m], 4);
  }
}

inline void fetch_box(const TensorMap&, int, int, int, int) {}

CF_INSTRUCTION void store_zeros(SmemAddress to) {
  races::write(smem(to), 16);
  const races::Unseen unseen;
  memset(smem(to), 0, 16);
}
inline void fence_async_reads(fibers::Name name) {
  if (!fibers::left_out(name)) races::fence_async();
}

template <int registers>
void raise_registers() {}
template <int registers>
void lower_registers() {}

inline bool named_barrier_any(int id, int threads, bool yes, fibers::Name name) {
  fibers::NamedBarrier& barrier = fibers::block->named[id];
  barrier.yes |= yes;
  if (barrier.count + 1 == unsigned(threads)) {
    barrier.any = barrier.yes;
    barrier.yes = false;
  }
  named_barrier_wait(id, threads, name);
  return barrier.any;
}

template <typename X>
X uniform(X x) {
  return x;
}
inline void require_zero(uint32 x) {
  if (x != 0) fibers::wait();
}
inline uint32 sign_of(float x) { return x < 0; }

// A matrix in shared memory, and how many bytes into it a product begins.
struct Operand {
  SmemAddress tile;
  int rows, bytes;

  // Element (row, k) where the 16 elements summed over lie in a row.
  template <typename T>
  float by_rows(int row, int k) const {
    const int inside = bytes % PANEL_ROW_BYTES + 2 * k;
    return element<T>(bytes / PANEL_ROW_BYTES * PANEL_ROW_BYTES, row, inside);
  }
  // Element (k, column) where they lie in a column.
  template <typename T>
  float by_columns(int k, int column) const {
    const int row = bytes / PANEL_ROW_BYTES + k;
    return element<T>(column / PANEL * rows * PANEL_ROW_BYTES, row, column % PANEL * 2);
  }
  const unsigned char* place(int start, int row, int inside) const {
    return smem(tile) + start + row * PANEL_ROW_BYTES + ((inside / 16) ^ (row % 8)) * 16
           + inside % 16;
  }
  template <typename T>
  float element(int start, int row, int inside) const {
    const races::Unseen unseen;            // `report_rows` and `report_columns` tell of it
    T x;
    memcpy(&x, place(start, row, inside), sizeof x);
    return product_value(x);
  }

  // What a product reads of it, once a warp: 16 elements of each row, or the columns of 16 rows.
  void report_rows(int first, int count, uintptr_t code) const {
    if (fibers::lane() != 0) return;
    for (int row = first; row < first + count; ++row) {
      for (int part = 0; part < 32; part += 16) {
        races::read_async(place(bytes / PANEL_ROW_BYTES * PANEL_ROW_BYTES, row,
                                bytes % PANEL_ROW_BYTES + part), 16, code);
      }
    }
  }
  void report_columns(int columns, uintptr_t code) const {
    if (fibers::lane() != 0) return;
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < columns; column += 8) {
        races::read_async(place(column / PANEL * rows * PANEL_ROW_BYTES,
                                bytes / PANEL_ROW_BYTES + k, column % PANEL * 2), 16, code);
      }
    }
  }
};
struct Descriptor {
  SmemAddress tile;
  int rows;

  Descriptor(SmemAddress tile_, int rows_) : tile(tile_), rows(rows_) {}
  Operand at(int bytes) const { return {tile, rows, bytes}; }
};

using UniformDescriptor = Descriptor;

inline auto& products() { return fibers::block->fibers[fibers::current].products; }
// The warps of a warpgroup start the same products.
inline void products_begin() {
  count_in_and_wait(-1 - int(fibers::current) / 128, 128);
}
inline void products_commit() { products().emplace_back(); }
template <int pending>
void products_wait() {
  while (products().size() > pending + 1) {
    for (auto& product : products().front()) product();
    products().erase(products().begin());
  }
  fibers::meet(fibers::warp().meeting, fibers::WARP);   // a warp's lanes wait together
}
template <typename T, int n>
void settle(T (&)[n]) {}
template <typename T, int n, int m>
void settle(T (&)[n][m]) {}

template <typename T, int N>
struct Wgmma {
  using Sums = float[N / 2];
  static int row(int i) {
    const int t = int(fibers::current) % 128;
    return t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8;
  }
  static int column(int i) { return i / 4 * 8 + int(fibers::current) % 4 * 2 + i % 2; }
  // The sums are nobody's until they are waited for.
  static void lose(Sums& d) {
    for (float& x : d) x = bits_to_float(0x7FFFFFFF);
  }

  // A product reads from when it starts to when it is waited for: it is reported at both ends.
  static void report_rows(Operand a, Operand b, uintptr_t code) {
    a.report_rows(int(fibers::current) % 128 / 32 * 16, 16, code);
    b.report_rows(0, N, code);
  }

  static CF_INSTRUCTION void rows(Sums& d, Operand a, Operand b, int sum) {
    if (!sum) lose(d);
    uintptr_t code = 0;
    races::note_place(code);
    report_rows(a, b, code);
    products().back().push_back([&d, a, b, sum, code] {
      report_rows(a, b, code);
      for (int i = 0; i < N / 2; ++i) {
        float x = sum ? d[i] : 0;
        for (int k = 0; k < 16; ++k) {
          x += a.by_rows<T>(row(i), k) * b.by_rows<T>(column(i), k);
        }
        d[i] = x;
      }
    });
  }
  // Zeros may be multiplied with a tile that has not come: a kernel that does so forgets the sums,
  // or has NaN in its results.
  static bool zeros(const uint32 (&a)[4]) { return (a[0] | a[1] | a[2] | a[3]) == 0; }
  static CF_INSTRUCTION void columns(Sums& d, const uint32 (&a)[4], Operand b, int sum) {
    if (!sum) lose(d);
    uintptr_t code = 0;
    races::note_place(code);
    if (!zeros(a)) b.report_columns(N, code);
    products().back().push_back([&d, &a, b, sum, code] {
      struct Words {
        uint32 word[4];
      } mine;
      memcpy(mine.word, a, sizeof mine);
      unsigned char(*slots)[fibers::SLOT] = fibers::exchange(mine);
      bool all_zeros = true;
      for (unsigned from = 0; from < fibers::WARP; ++from) {
        all_zeros = all_zeros && zeros(fibers::shown<Words>(slots, from).word);
      }
      if (!all_zeros) b.report_columns(N, code);
      float A[2][16];
      for (int t = 0; t < 4; ++t) {
        const Words other = fibers::shown<Words>(slots, fibers::lane() / 4 * 4 + t);
        T x[8];
        memcpy(x, other.word, sizeof x);
        for (int j = 0; j < 8; ++j) A[j / 2 % 2][2 * t + j % 2 + j / 4 * 8] = product_value(x[j]);
      }
      for (int i = 0; i < N / 2; ++i) {
        float x = sum ? d[i] : 0;
        for (int k = 0; k < 16; ++k) x += A[i / 2 % 2][k] * b.by_columns<T>(k, column(i));
        d[i] = x;
      }
    });
  }
};

// d [64, 64] += a b, both by columns.
template <typename T>
CF_INSTRUCTION void multiply_columns(T, float (&d)[32], Operand a, Operand b, int sum) {
  using W = Wgmma<T, 64>;
  if (!sum) W::lose(d);
  uintptr_t code = 0;
  races::note_place(code);
  a.report_columns(64, code);
  b.report_columns(64, code);
  products().back().push_back([&d, a, b, sum, code] {
    a.report_columns(64, code);
    b.report_columns(64, code);
    for (int i = 0; i < 32; ++i) {
      float x = sum ? d[i] : 0;
      for (int k = 0; k < 16; ++k) {
        x += a.template by_columns<T>(k, W::row(i)) * b.template by_columns<T>(k, W::column(i));
      }
      d[i] = x;
    }
  });
}

CF_INSTRUCTION void load_bytes(SmemAddress to, uint64 from, uint32 bytes, SmemAddress full) {
  races::start_copy(smem(to), bytes);
  const races::Unseen unseen;
  memset(smem(to), 0xFF, bytes);
  fibers::block->flights.push_back([=] {
    races::land_copy_at(smem(to), bytes, phase_barrier(full).number,
                        phase_barrier(full).phases + 1);
    const races::Unseen unseen;
    memcpy(smem(to), (const void*)from, bytes);
    phase_barrier(full).bytes -= bytes;
    complete_phase(phase_barrier(full));
  });
}

}  // namespace cf::ptx

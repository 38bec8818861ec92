// Fragments in registers whose layout is known: loads from tiles in shared memory, products, and
// the way from an accumulator to the operand of the next product. ptx/mma.cuh has the layouts.
#pragma once

#include "../attention/sums.cuh"
#include "../convert.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/shared.cuh"
#include "../view/accumulators.cuh"

namespace cf {

template <typename T>
struct WordOf {
  using type = uint32;
};
template <>
struct WordOf<double> {
  using type = double;
};

CF_DEVICE uint32 to_word(float x) { return ptx::float_to_bits(x); }
CF_DEVICE double to_word(double x) { return x; }

// A [16, depth], B [depth, 16] and C [16, 16] of a warp.
template <typename Config>
struct Fragments {
  using T = typename Config::element;
  using Word = typename WordOf<T>::type;
  using Sum = accumulator<T>;
  static constexpr int side = 16, depth = sizeof(T) == 2 ? 16 : 8;
  struct A { Word x[4]; };
  struct B { Word x[4]; };
  struct C { Sum x[8]; };
};

// Which rows of a tile [k, ...] a lane reads for its two depths, in the types of 32 and 64 bits.
// paired: rows 2 t and 2 t + 1, which are the columns that it has of an accumulator; the other
// operand then comes from one (`to_operands`), or from a tile [k, ...] in the same order.
// natural: rows t and t + 4, as operands have that are read along k. In 16-bit types both are one.
enum class Order { natural, paired };

// Elements from one row of a tile to the next. Rows keep their 16-byte borders, and the lanes of a
// load hit different banks: rows read along k, or a tile [k, ...] in its paired order. They differ
// in float64 alone.
template <typename T>
CF_HOST_DEVICE constexpr int rows_pitch(int columns) {
  return columns + (sizeof(T) == 2 ? 8 : 4);
}
template <typename T>
CF_HOST_DEVICE constexpr int depth_pitch(int columns) {
  return columns + 16 / int(sizeof(T));
}

// Where a lane's loads of a tile [rows, columns] start, in elements.
template <typename T, int pitch>
struct LaneStart {
  // Of plain loads: row g, column t; or, along k in the other direction, row t (2 t), column g.
  static CF_DEVICE int across(int lane) { return lane / 4 * pitch + lane % 4; }
  static CF_DEVICE int along(int rows, int lane) { return lane % 4 * rows * pitch + lane / 4; }
  // Of four 8 x 8 matrices, numbered down the columns first, or along the rows.
  static CF_DEVICE int matrices(bool down, int lane) {
    const int low = lane / 8 % 2, high = lane / 16;
    return (lane % 8 + 8 * (down ? low : high)) * pitch + (down ? high : low) * 16 / int(sizeof(T));
  }
};

// What 3xTF32 makes of elements: the part that TF32 keeps, and the rest.
template <typename Words>
struct Parts {
  Words high, low;
};

// The first part is rounded, so that the rest may have either sign: the product of two rests, which
// nobody computes, and what the instruction cuts off a rest do not add up then.
CF_DEVICE void split(uint32 x, uint32& high, uint32& low) {
  high = round_to_tf32(x);
  low = tf32_rest(x, high);
}

// A loaded operand as a product takes it: in 3xTF32 in two parts, otherwise as it is.
template <typename Config, typename Fragment>
CF_DEVICE auto operand(const Fragment& x) {
  if constexpr (Config::precision == 2) {
    Parts<Fragment> parts;
#pragma unroll
    for (int e = 0; e < 4; ++e) split(x.x[e], parts.high.x[e], parts.low.x[e]);
    return parts;
  } else {
    return x;
  }
}
template <typename Config, typename Fragment>
CF_DEVICE const Parts<Fragment>& operand(const Parts<Fragment>& x) {
  return x;
}

// What a reader finds at (i, j), and the rests `down` and `across` from there if there are any.
template <int rests, typename Reader>
CF_DEVICE auto load_parts(const Reader& reader, int i, int j, int down, int across) {
  const auto high = reader.load_part(i, j);
  if constexpr (rests > 0) {
    return Parts<decltype(reader.load_part(i, j))>{high, reader.load_part(i + down, j + across)};
  } else {
    return high;
  }
}

// A tile in shared memory as fragments of A. Layout::row: the tile is [m, k]; Layout::col: [k, m].
// rests: rows from the tile to a second one, which has the rests of its elements; 0: there is none.
template <typename Config, Layout layout, int pitch, Order order = Order::paired, int rests = 0>
struct ReaderA {
  using F = Fragments<Config>;
  using T = typename F::T;
  using Start = LaneStart<T, pitch>;
  static constexpr bool row = layout == Layout::row;
  static constexpr bool matrices = sizeof(T) == 2 || (sizeof(T) == 4 && row);
  static constexpr int pairs = order == Order::paired ? 2 : 1;
  static constexpr int step = row || order == Order::natural ? 4 : 1;    // between the two depths
  const T* tile;
  ptx::Shared place;

  CF_DEVICE explicit ReaderA(const T* t, int lane = lane_id())
      : tile(t + (row ? Start::across(lane) : Start::along(pairs, lane))),
        place(ptx::Shared(t) + Start::matrices(row, lane) * int(sizeof(T))) {}

  // The fragment whose corner is element (i, k) of A, in two parts if they are there.
  CF_DEVICE auto load(int i, int k) const {
    return load_parts<rests>(*this, i, k, row ? rests : 0, row ? 0 : rests);
  }
  CF_DEVICE typename F::A load_part(int i, int k) const {
    typename F::A a;
    const int corner = row ? i * pitch + k : k * pitch + i;
    if constexpr (matrices && row) {
      ptx::load_matrices(a.x, place + corner * int(sizeof(T)));
    } else if constexpr (matrices) {
      ptx::load_matrices_transposed(a.x, place + corner * int(sizeof(T)));
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int m = e % 2 * 8, depth = e / 2 * step;
        a.x[e] = to_word(tile[corner + (row ? m * pitch + depth : depth * pitch + m)]);
      }
    }
    return a;
  }
  // The same in the paired order, of a tile [m, k] of 32 or 64 bits: as an accumulator has it.
  CF_DEVICE typename F::A load_pairs(int i, int k) const {
    static_assert(row && sizeof(T) > 2, "such tiles alone have two orders");
    typename F::A a;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const T* const own = tile + (i + 8 * e) * pitch + k + lane_id() % 4;
      const Pair<T> pair = *reinterpret_cast<const Pair<T>*>(own);
      a.x[e] = to_word(pair.x[0]);
      a.x[e + 2] = to_word(pair.x[1]);
    }
    return a;
  }
};

// The same as fragments of B. Layout::row: the tile is [k, n]; Layout::col: [n, k].
template <typename Config, Layout layout, int pitch, Order order = Order::paired, int rests = 0>
struct ReaderB {
  using F = Fragments<Config>;
  using T = typename F::T;
  using Start = LaneStart<T, pitch>;
  static constexpr bool row = layout == Layout::row;
  static constexpr bool matrices = sizeof(T) == 2 || (sizeof(T) == 4 && !row);
  static constexpr int pairs = order == Order::paired ? 2 : 1;
  static constexpr int step = !row || order == Order::natural ? 4 : 1;
  const T* tile;
  ptx::Shared place;

  CF_DEVICE explicit ReaderB(const T* t, int lane = lane_id())
      : tile(t + (row ? Start::along(pairs, lane) : Start::across(lane))),
        place(ptx::Shared(t) + Start::matrices(row, lane) * int(sizeof(T))) {}

  // The fragment whose corner is element (k, j) of B, in two parts if they are there.
  CF_DEVICE auto load(int k, int j) const {
    return load_parts<rests>(*this, k, j, row ? rests : 0, row ? 0 : rests);
  }
  CF_DEVICE typename F::B load_part(int k, int j) const {
    typename F::B b;
    const int corner = row ? k * pitch + j : j * pitch + k;
    if constexpr (matrices && !row) {
      ptx::load_matrices(b.x, place + corner * int(sizeof(T)));
    } else if constexpr (matrices) {
      ptx::load_matrices_transposed(b.x, place + corner * int(sizeof(T)));
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int n = e / 2 * 8, depth = e % 2 * step;
        b.x[e] = to_word(tile[corner + (row ? depth * pitch + n : n * pitch + depth)]);
      }
    }
    return b;
  }
};

// c += a b.
template <typename Config>
CF_DEVICE void mma(typename Fragments<Config>::C& c, const typename Fragments<Config>::A& a,
                   const typename Fragments<Config>::B& b) {
  ptx::mma(typename Config::element{}, c.x, a.x, b.x);
}

// A sum of products. 3xTF32 has a sum of its own for the small ones, which would lose digits next
// to the large; in the other kinds `small` is never touched.
template <typename Config>
struct Sums {
  typename Fragments<Config>::C large, small;

  CF_DEVICE Sums() : large{}, small{} {}
  CF_DEVICE accumulator<typename Config::element> total(int e) const {
    return Config::precision == 2 ? large.x[e] + small.x[e] : large.x[e];
  }
};

// sums += a b, of operands made by `operand`. transposed: a is the second matrix of the product
// whose transpose this is; its sums are the same to the bit.
template <typename Config, bool transposed = false, typename OperandA, typename OperandB>
CF_DEVICE void add_product(Sums<Config>& sums, const OperandA& a, const OperandB& b) {
  if constexpr (Config::precision == 2 && transposed) {
    mma<Config>(sums.small, a.high, b.low);
    mma<Config>(sums.small, a.low, b.high);
    mma<Config>(sums.large, a.high, b.high);
  } else if constexpr (Config::precision == 2) {
    mma<Config>(sums.small, a.low, b.high);
    mma<Config>(sums.small, a.high, b.low);
    mma<Config>(sums.large, a.high, b.high);
  } else {
    mma<Config>(sums.large, a, b);
  }
}

// total += large sums, by ordinary additions, and those start anew; total = them if they are the
// first. The small ones go on: what the tensor cores cut off them is nothing beside the large.
template <typename Config, int M, int N>
CF_DEVICE void add_large(typename Fragments<Config>::C (&total)[M][N], Sums<Config> (&sums)[M][N],
                         bool first) {
#pragma unroll
  for (int i = 0; i < M; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const auto x = sums[i][j].large.x[e];
        total[i][j].x[e] = first ? x : total[i][j].x[e] + x;
        sums[i][j].large.x[e] = 0;
      }
    }
  }
}

// total += small sums, once all products are there.
template <typename Config, int M, int N>
CF_DEVICE void add_small(typename Fragments<Config>::C (&total)[M][N],
                         const Sums<Config> (&sums)[M][N]) {
  if constexpr (Config::precision == 2) {
#pragma unroll
    for (int i = 0; i < M; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
#pragma unroll
        for (int e = 0; e < 8; ++e) total[i][j].x[e] += sums[i][j].small.x[e];
      }
    }
  }
}

// Rows of the tile that holds the rests of another's elements, for 3xTF32, where a block splits
// operands once and not each warp for itself. 0: there is none.
template <typename Config>
CF_HOST_DEVICE constexpr int rest_rows(int rows) {
  return Config::precision == 2 ? rows : 0;
}

// Whether sums over many tiles must be made of the sums of single tiles by ordinary additions.
// Tensor cores drop bits of float32 sums, all to one side: at N = 16384 a running sum over mean-1
// values is no better than plain TF32. In float64 the shorter chains halve the rounding error. The
// 16-bit types hide both.
template <typename Config>
CF_HOST_DEVICE constexpr bool fresh_sums() {
  return sizeof(typename Config::element) > 2 || Fresh<Config>::value;
}

// An accumulator as operands A: one of a depth of 16, or two of 8 in the paired order. Rounds to
// the type of operands; P and dS are meant, which are finite or make the result NaN by other ways.
template <typename Config>
struct AccumulatorAsA {
  using F = Fragments<Config>;
  static constexpr int count = 16 / F::depth;
  typename F::A a[count];

  CF_DEVICE explicit AccumulatorAsA(const typename F::C& c) {
    if constexpr (count == 1) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        a[0].x[e] = ptx::pack<typename F::T>(c.x[2 * e], c.x[2 * e + 1]);
      }
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) a[e / 4].x[e % 2 * 2 + e / 2 % 2] = word(c.x[e]);
    }
  }
  // Half a unit of TF32's last place more: the instruction cuts the rest off.
  static CF_DEVICE uint32 word(float x) {
    return ptx::float_to_bits(x) + (Config::precision == 1 ? 0x1000 : 0);
  }
  static CF_DEVICE double word(double x) { return x; }
};

}  // namespace cf

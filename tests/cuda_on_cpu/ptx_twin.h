// What cuda_src/ptx.cuh does with instructions, in C++ on fibers; mma_twin.h has the rest.
//
// A fragment's elements lie in other lanes than on any GPU: CUDA leaves that open, and a kernel
// that took a layout for granted fails here. A product waits for the whole warp once; loads and
// stores do not wait at all, so that a barrier missing between the two is noticed.
#pragma once

namespace cf {
using SmemAddress = uint64;
}

namespace cf::ptx {

inline SmemAddress smem_address(const void* pointer) { return SmemAddress(pointer); }

inline void sync_block(fibers::Name name) {
  if (!fibers::left_out(name)) fibers::meet(fibers::block->all, fibers::block->alive);
}
inline void sync_warp(fibers::Name name) {
  if (!fibers::left_out(name)) fibers::meet(fibers::warp().meeting, fibers::WARP);
}
inline bool sync_block_or(bool yes, fibers::Name name) {
  const unsigned turn = ++fibers::block->fibers[fibers::current].votes;
  if (yes) fibers::block->yes[turn % 2] = turn;
  sync_block(name);
  return fibers::block->yes[turn % 2] == turn;
}

inline uint32 float_to_bits(float x) {
  uint32 y;
  memcpy(&y, &x, sizeof y);
  return y;
}
inline float bits_to_float(uint32 x) {
  float y;
  memcpy(&y, &x, sizeof y);
  return y;
}

inline uint64 double_to_bits(double x) {
  uint64 y;
  memcpy(&y, &x, sizeof y);
  return y;
}
inline double bits_to_double(uint64 x) {
  double y;
  memcpy(&y, &x, sizeof y);
  return y;
}

inline uint32 tf32_word(uint32 x) { return (x & 0x7FFFFFFF) < 0x7F7FF000 ? x + 0x1000 : x; }

inline float kept(float x) { return x; }
inline double kept(double x) { return x; }

inline float multiply(float a, float b) { return a * b; }
inline double multiply(double a, double b) { return a * b; }

inline float half_to_float(uint16 x) {
  const uint32 size = x & 0x7FFF, sign = uint32(x & 0x8000) << 16;
  const uint32 bits = float_to_bits(bits_to_float(size << 13) * 0x1p112f);
  return bits_to_float(sign | (size >= 0x7C00 ? bits | 0x7F800000 : bits));
}

inline uint16 float_to_half(float x) {
  const uint32 bits = float_to_bits(x), size = bits & 0x7FFFFFFF, sign = bits >> 16 & 0x8000;
  // Below 2^-14 the spacing of halves is fixed: adding 0.5 rounds at that spacing.
  const uint32 small = float_to_bits(bits_to_float(size) + 0.5f) - 0x3F000000;
  const uint32 normal = (size + 0xC8000FFF + (size >> 13 & 1)) >> 13;
  const uint32 huge = size <= 0x7F800000 ? 0x7C00 : 0x7E00;
  return uint16(sign | (size >= 0x477FF000 ? huge : size < 0x38800000 ? small : normal));
}

inline uint16 float_to_bfloat16(float x) {
  const uint32 bits = float_to_bits(x);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return uint16(bits >> 16 | 0x40);
  return uint16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Which element of a matrix of `size` elements lane `lane` holds as its e-th: a bijection, another
// one for every `turn`.
inline int element_of(int size, int turn, int lane, int e) {
  return (e * 32 + (lane * 7 + e * 5 + turn) % 32) % size;
}

constexpr int TURN_A = 3, TURN_B = 11, TURN_C = 22;

// The value of an operand in a product.
inline float product_value(half_t x) { return half_to_float(x.bits); }
inline float product_value(bfloat16_t x) { return bits_to_float(uint32(x.bits) << 16); }
inline float product_value(float x) { return bits_to_float(float_to_bits(x) & 0xFFFFE000); }
inline double product_value(double x) { return x; }

// A sum without what float32 does not hold.
inline float cut(double sum) {
  const float near = float(sum);
  const bool beyond = near - near == 0 && (sum < 0 ? near < sum : near > sum);
  return beyond ? bits_to_float(float_to_bits(near) - 1) : near;
}

// c + the sum of products(k) over a depth, as tensor cores add in float32: a few products at a time
// (4 of TF32, 8 of 16-bit types on Ampere), of which nothing counts that is more than 25 bits below
// the largest, and of the sum no more than float32 holds.
template <typename T, int depth, typename Products>
accumulator<T> add_products(accumulator<T> c, const Products& products) {
  constexpr int together = 16 / int(sizeof(T));
  for (int k0 = 0; k0 < depth; k0 += together) {
    double x[together + 1] = {c}, sum = 0, largest = 0x1p-126;
    for (int k = 0; k < together; ++k) x[k + 1] = products(k0 + k);
    for (double one : x) {
      sum += one;
      largest = __builtin_fabs(one) > largest ? __builtin_fabs(one) : largest;
    }
    if (sizeof(T) < 8 && sum - sum == 0) {      // infinities and NaN are themselves
      const double unit = 0x1p-24 * bits_to_double(double_to_bits(largest) >> 52 << 52);
      const double per_unit = 1 / unit;
      sum = 0;
      for (double one : x) sum += double(int64(one * per_unit)) * unit;
    }
    if constexpr (sizeof(T) == 8) c = sum;
    else c = cut(sum);
  }
  return c;
}

// `words`: what a lane holds of an operand, in units of Word; the rest is there but unused.
template <typename T, typename Word, int words, int side_, int depth_>
struct WmmaTwin {
  static constexpr int side = side_, depth = depth_;
  static constexpr int operands = side * depth / 32, sums = side * side / 32;
  using Sum = accumulator<T>;
  struct A { Word x[words]; };
  struct B { Word x[words]; };
  struct C { Sum x[sums]; };

  template <Layout layout>
  static void load_a(A& a, const T* p, int pitch) {
    constexpr bool row = layout == Layout::row;
    load(a.x, TURN_A, depth, p, row ? pitch : 1, row ? 1 : pitch);
  }
  template <Layout layout>
  static void load_b(B& b, const T* p, int pitch) {
    constexpr bool row = layout == Layout::row;
    load(b.x, TURN_B, side, p, row ? pitch : 1, row ? 1 : pitch);
  }
  static void load(Word* x, int turn, int columns, const T* p, int row_step, int column_step) {
    T mine[operands];
    for (int e = 0; e < operands; ++e) {
      const int i = element_of(side * depth, turn, fibers::lane(), e);
      mine[e] = p[i / columns * row_step + i % columns * column_step];
    }
    memcpy(x, mine, sizeof mine);
  }

  static void load_c(C& c, const Sum* p, int pitch) {
    for (int e = 0; e < sums; ++e) {
      const int i = element_of(side * side, TURN_C, fibers::lane(), e);
      c.x[e] = p[i / side * pitch + i % side];
    }
  }
  static void store_c(Sum* p, const C& c, int pitch) {
    for (int e = 0; e < sums; ++e) {
      const int i = element_of(side * side, TURN_C, fibers::lane(), e);
      p[i / side * pitch + i % side] = c.x[e];
    }
  }

  template <Layout, Layout>
  static void mma(C& c, const A& a, const B& b) {
    struct Both {
      T a[operands], b[operands];
    } both;
    memcpy(both.a, a.x, sizeof both.a);
    memcpy(both.b, b.x, sizeof both.b);
    unsigned char(*slots)[fibers::SLOT] = fibers::exchange(both);
    Sum full_a[side * depth], full_b[depth * side];
    for (int from = 0; from < 32; ++from) {
      const Both other = fibers::shown<Both>(slots, from);
      for (int e = 0; e < operands; ++e) {
        full_a[element_of(side * depth, TURN_A, from, e)] = product_value(other.a[e]);
        full_b[element_of(side * depth, TURN_B, from, e)] = product_value(other.b[e]);
      }
    }
    for (int e = 0; e < sums; ++e) {
      const int i = element_of(side * side, TURN_C, fibers::lane(), e);
      c.x[e] = add_products<T, depth>(c.x[e], [&](int k) {
        return double(full_a[i / side * depth + k]) * double(full_b[k * side + i % side]);
      });
    }
  }
};

template <typename T>
struct Wmma;
template <>
struct Wmma<half_t> : WmmaTwin<half_t, uint32, 8, 16, 16> {};
template <>
struct Wmma<bfloat16_t> : WmmaTwin<bfloat16_t, uint32, 4, 16, 16> {};
template <>
struct Wmma<float> : WmmaTwin<float, uint32, 4, 16, 8> {};
template <>
struct Wmma<double> : WmmaTwin<double, double, 1, 8, 4> {};

}  // namespace cf::ptx

#include "mma_twin.h"
#define CF_HOPPER_TWIN "hopper_twin.h"

// Every instruction that C++ has no word for: conversions, and the fragments of wmma. All inline
// assembly of this folder is here.
//
// A host that runs kernels on a CPU names a twin of this file in CF_PTX_TWIN. The twin may give the
// elements of a fragment to any lanes: no kernel assumes a layout.
#pragma once

#include "base.cuh"

namespace cf {

// Where element (i, j) of a matrix lies: row * pitch + column, or column * pitch + row.
enum class Layout { row, col };

}  // namespace cf

#ifdef CF_PTX_TWIN
#include CF_PTX_TWIN
#else

namespace cf {

// An address in the block's shared memory.
using SmemAddress = uint32;

}  // namespace cf

namespace cf::ptx {

// Where the threads of the block or of the warp meet. Each barrier, wait and fence has a name, by
// which tests leave it out; the machine code knows nothing of it. A kernel has one of each name,
// but for the barriers of a ring, whose name is the ring's wherever it is waited for.
CF_DEVICE void sync_block(const char*) { __syncthreads(); }
CF_DEVICE void sync_warp(const char*) { __syncwarp(); }
// Whether any thread of the block says yes.
CF_DEVICE bool sync_block_or(bool yes, const char*) { return __syncthreads_or(yes); }

CF_DEVICE float half_to_float(uint16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

CF_DEVICE uint16 float_to_half(float x) {
  uint16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

CF_DEVICE uint16 float_to_bfloat16(float x) {
  uint16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

CF_DEVICE float bits_to_float(uint32 x) { return __uint_as_float(x); }
CF_DEVICE uint32 float_to_bits(float x) { return __float_as_uint(x); }
CF_DEVICE double bits_to_double(uint64 x) { return __longlong_as_double(int64(x)); }
CF_DEVICE uint64 double_to_bits(double x) { return uint64(__double_as_longlong(x)); }

// The bits of a float32 as a product in TF32 takes them, which cuts off the last 13: with half a
// unit of the place before those, rounded to nearest. Not where that would make infinity of a
// finite number, which 0 * inf turns into NaN.
CF_DEVICE uint32 tf32_word(uint32 x) {
  uint32 y;
  asm("{ .reg .pred below; .reg .f32 size; mov.b32 size, %1; abs.f32 size, size;\n"
      "setp.lt.f32 below, size, 0f7F7FF000; mov.b32 %0, %1;\n"
      "@below add.u32 %0, %0, 0x1000; }"
      : "=&r"(y)
      : "r"(x));
  return y;
}

// a * b as a number of its own: never fused with an addition that follows.
CF_DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
CF_DEVICE double multiply(double a, double b) { return __dmul_rn(a, b); }

// x, kept from here on: the compiler cannot save a register by computing it anew where it is used.
CF_DEVICE float kept(float x) {
  asm volatile("" : "+f"(x));
  return x;
}
CF_DEVICE double kept(double x) {
  asm volatile("" : "+d"(x));
  return x;
}

// low and high rounded to nearest even, in one word.
template <typename T>
CF_DEVICE uint32 pack(float low, float high);
template <>
CF_DEVICE uint32 pack<half_t>(float low, float high) {
  uint32 x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
template <>
CF_DEVICE uint32 pack<bfloat16_t>(float low, float high) {
  uint32 x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}

// 2^x to 2 units in the last place; results below 2^-126 are 0.
CF_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to a unit in the last place.
CF_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A pointer into shared memory as the address that instructions take.
CF_DEVICE SmemAddress smem_address(const void* pointer) {
  return SmemAddress(__cvta_generic_to_shared(pointer));
}

// One warp's product of fragments: c (M x N) += a (M x K) b (K x N). Pointers lie in shared memory,
// aligned to 32 bytes; a pitch (in elements) is a multiple of 16 bytes.
template <typename T>
struct Wmma;

#define CF_WORDS4(x) "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
#define CF_WORDS8(x) CF_WORDS4(x), "=r"(x[4]), "=r"(x[5]), "=r"(x[6]), "=r"(x[7])
#define CF_SUMS8(mode, x)                                                                       \
  mode(x[0]), mode(x[1]), mode(x[2]), mode(x[3]), mode(x[4]), mode(x[5]), mode(x[6]), mode(x[7])
#define CF_LIST4 "{%0, %1, %2, %3}"
#define CF_LIST8 "{%0, %1, %2, %3, %4, %5, %6, %7}"

#define CF_LOAD4(x, which, layout, type)                                                        \
  asm volatile("wmma.load." which ".sync.aligned." layout "." type " " CF_LIST4 ", [%4], %5;"   \
               : CF_WORDS4(x)                                                                   \
               : "r"(smem_address(p)), "r"(pitch)                                             \
               : "memory")
#define CF_LOAD8(x, which, layout, type)                                                        \
  asm volatile("wmma.load." which ".sync.aligned." layout "." type " " CF_LIST8 ", [%8], %9;"   \
               : CF_WORDS8(x)                                                                   \
               : "r"(smem_address(p)), "r"(pitch)                                             \
               : "memory")
#define CF_LOAD1(x, which, layout, type)                                                        \
  asm volatile("wmma.load." which ".sync.aligned." layout "." type " {%0}, [%1], %2;"           \
               : "=d"(x[0])                                                                     \
               : "r"(smem_address(p)), "r"(pitch)                                             \
               : "memory")

// load_a and load_b of a kind: CF_LOADS(CF_LOAD4, element, "m16n16k16.shared.bf16").
#define CF_LOADS(load, T, type)                                                                 \
  template <Layout layout>                                                                      \
  static CF_DEVICE void load_a(A& a, const T* p, int pitch) {                                   \
    if constexpr (layout == Layout::row) {                                                      \
      load(a.x, "a", "row", type);                                                              \
    } else {                                                                                    \
      load(a.x, "a", "col", type);                                                              \
    }                                                                                           \
  }                                                                                             \
  template <Layout layout>                                                                      \
  static CF_DEVICE void load_b(B& b, const T* p, int pitch) {                                   \
    if constexpr (layout == Layout::row) {                                                      \
      load(b.x, "b", "row", type);                                                              \
    } else {                                                                                    \
      load(b.x, "b", "col", type);                                                              \
    }                                                                                           \
  }

// load_c and store_c (rows of `pitch` elements), and mma, which picks the instruction by layout.
#define CF_FLOAT_SUMS(shape, types)                                                             \
  static CF_DEVICE void load_c(C& c, const float* p, int pitch) {                               \
    asm volatile("wmma.load.c.sync.aligned.row." shape ".shared.f32 " CF_LIST8 ", [%8], %9;"    \
                 : CF_SUMS8("=f", c.x)                                                          \
                 : "r"(smem_address(p)), "r"(pitch)                                           \
                 : "memory");                                                                   \
  }                                                                                             \
  static CF_DEVICE void store_c(float* p, const C& c, int pitch) {                              \
    asm volatile("wmma.store.d.sync.aligned.row." shape ".shared.f32 [%8], " CF_LIST8 ", %9;"   \
                 :                                                                              \
                 : CF_SUMS8("f", c.x), "r"(smem_address(p)), "r"(pitch)                       \
                 : "memory");                                                                   \
  }                                                                                             \
  CF_MMA_BY_LAYOUT(shape, types)

#define CF_MMA_BY_LAYOUT(shape, types)                                                          \
  template <Layout la, Layout lb>                                                               \
  static CF_DEVICE void mma(C& c, const A& a, const B& b) {                                     \
    if constexpr (la == Layout::row && lb == Layout::row) {                                     \
      CF_MMA("row.row." shape "." types);                                                       \
    } else if constexpr (la == Layout::row) {                                                   \
      CF_MMA("row.col." shape "." types);                                                       \
    } else if constexpr (lb == Layout::row) {                                                   \
      CF_MMA("col.row." shape "." types);                                                       \
    } else {                                                                                    \
      CF_MMA("col.col." shape "." types);                                                       \
    }                                                                                           \
  }

// float16. Its operands have eight registers, half of which repeat the other half.
template <>
struct Wmma<half_t> {
  static constexpr int side = 16, depth = 16;  // M = N = side, K = depth
  struct A { uint32 x[8]; };
  struct B { uint32 x[8]; };
  struct C { float x[8]; };
  CF_LOADS(CF_LOAD8, half_t, "m16n16k16.shared.f16")
#define CF_MMA(form)                                                                            \
  asm("wmma.mma.sync.aligned." form " " CF_LIST8                                                \
      ", {%8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19, %20, %21, %22, %23}, "    \
      CF_LIST8 ";"                                                                              \
      : CF_SUMS8("+f", c.x)                                                                     \
      : CF_SUMS8("r", a.x), CF_SUMS8("r", b.x))
  CF_FLOAT_SUMS("m16n16k16", "f32.f32")
#undef CF_MMA
};

#define CF_MMA(form)                                                                            \
  asm("wmma.mma.sync.aligned." form " " CF_LIST8                                                \
      ", {%8, %9, %10, %11}, {%12, %13, %14, %15}, " CF_LIST8 ";"                               \
      : CF_SUMS8("+f", c.x)                                                                     \
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]),           \
        "r"(b.x[2]), "r"(b.x[3]))

template <>
struct Wmma<bfloat16_t> {
  static constexpr int side = 16, depth = 16;
  struct A { uint32 x[4]; };
  struct B { uint32 x[4]; };
  struct C { float x[8]; };
  CF_LOADS(CF_LOAD4, bfloat16_t, "m16n16k16.shared.bf16")
  CF_FLOAT_SUMS("m16n16k16", "f32.bf16.bf16.f32")
};
#undef CF_MMA

template <>
struct Wmma<double> {
  static constexpr int side = 8, depth = 4;
  struct A { double x[1]; };
  struct B { double x[1]; };
  struct C { double x[2]; };
  CF_LOADS(CF_LOAD1, double, "m8n8k4.shared.f64")
  static CF_DEVICE void load_c(C& c, const double* p, int pitch) {
    asm volatile("wmma.load.c.sync.aligned.row.m8n8k4.shared.f64 {%0, %1}, [%2], %3;"
                 : "=d"(c.x[0]), "=d"(c.x[1])
                 : "r"(smem_address(p)), "r"(pitch)
                 : "memory");
  }
  static CF_DEVICE void store_c(double* p, const C& c, int pitch) {
    asm volatile("wmma.store.d.sync.aligned.row.m8n8k4.shared.f64 [%2], {%0, %1}, %3;"
                 :
                 : "d"(c.x[0]), "d"(c.x[1]), "r"(smem_address(p)), "r"(pitch)
                 : "memory");
  }
#define CF_MMA(form)                                                                            \
  asm("wmma.mma.sync.aligned." form " {%0, %1}, {%2}, {%3}, {%0, %1};"                          \
      : "+d"(c.x[0]), "+d"(c.x[1])                                                              \
      : "d"(a.x[0]), "d"(b.x[0]))
  CF_MMA_BY_LAYOUT("m8n8k4", "f64.f64.f64.f64")
#undef CF_MMA
};

#undef CF_WORDS4
#undef CF_WORDS8
#undef CF_SUMS8
#undef CF_LIST4
#undef CF_LIST8
#undef CF_LOAD1
#undef CF_LOAD4
#undef CF_LOAD8
#undef CF_LOADS
#undef CF_FLOAT_SUMS
#undef CF_MMA_BY_LAYOUT

}  // namespace cf::ptx

#endif

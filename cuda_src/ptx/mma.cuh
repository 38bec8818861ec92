// Products of fragments in registers, with the layouts that PTX documents for mma.sync.
//
// All kinds have 16 x 16 sums and operands of four registers, of a depth of 16 in the 16-bit types
// and of 8 in the others. With lane = 4 g + t:
//
//     A 16-bit   word i, half s: row g + 8 (i % 2), k = 2 t + s + 8 (i / 2)
//     A wider    element i:      row g + 8 (i % 2), k = t + 4 (i / 2)
//     B 16-bit   word i, half s: k = 2 t + s + 8 (i % 2), column g + 8 (i / 2)
//     B wider    element i:      k = t + 4 (i % 2), column g + 8 (i / 2)
//     C          element i:      row g + 8 (i / 2 % 2), column 2 t + i % 2 + 8 (i / 4)
#pragma once

#include "../ptx.cuh"

#ifndef CF_PTX_TWIN

namespace cf::ptx {

// The two m16n8 halves of a product, side by side: the second finds A in the operand cache.
#define CF_MMA_SYNC(form, sum, word)                                                            \
  asm("mma.sync.aligned." form " {%0, %1, %2, %3}, {%8, %9, %10, %11}, {%12, %13}, "            \
      "{%0, %1, %2, %3};\n"                                                                     \
      "mma.sync.aligned." form " {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%14, %15}, "            \
      "{%4, %5, %6, %7};"                                                                       \
      : sum(c[0]), sum(c[1]), sum(c[2]), sum(c[3]), sum(c[4]), sum(c[5]), sum(c[6]), sum(c[7])  \
      : word(a[0]), word(a[1]), word(a[2]), word(a[3]), word(b[0]), word(b[1]), word(b[2]),     \
        word(b[3]))

// c += a b by mma.sync.
CF_DEVICE void mma(half_t, float (&c)[8], const uint32 (&a)[4], const uint32 (&b)[4]) {
  CF_MMA_SYNC("m16n8k16.row.col.f32.f16.f16.f32", "+f", "r");
}
CF_DEVICE void mma(bfloat16_t, float (&c)[8], const uint32 (&a)[4], const uint32 (&b)[4]) {
  CF_MMA_SYNC("m16n8k16.row.col.f32.bf16.bf16.f32", "+f", "r");
}
// TF32: of the bits of float32 the instruction cuts off the last 13.
CF_DEVICE void mma(float, float (&c)[8], const uint32 (&a)[4], const uint32 (&b)[4]) {
  CF_MMA_SYNC("m16n8k8.row.col.f32.tf32.tf32.f32", "+f", "r");
}
CF_DEVICE void mma(double, double (&c)[8], const double (&a)[4], const double (&b)[4]) {
#if __CUDA_ARCH__ >= 900
  CF_MMA_SYNC("m16n8k8.row.col.f64.f64.f64.f64", "+d", "d");
#else
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = i % 2, column = i / 2 % 2, k = i / 4;
    double& c0 = c[4 * column + 2 * row];
    double& c1 = c[4 * column + 2 * row + 1];
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+d"(c0), "+d"(c1)
        : "d"(a[2 * k + row]), "d"(b[2 * column + k]));
  }
#endif
}
#undef CF_MMA_SYNC

// The fragments of wmma/product.cuh in TF32. wmma.mma sums 4 products at a time where mma.sync sums
// 8, and the scores of all kernels must be the same to the bit (see attention/sums.cuh).
template <>
struct Wmma<float> {
  static constexpr int side = 16, depth = 8;
  struct A { uint32 x[4]; };
  struct B { uint32 x[4]; };
  struct C { float x[8]; };

  static CF_DEVICE int g() { return int(threadIdx.x) % 32 / 4; }
  static CF_DEVICE int t() { return int(threadIdx.x) % 4; }

  template <Layout layout>
  static CF_DEVICE void load_a(A& a, const float* p, int pitch) {
    const int row = layout == Layout::row ? pitch : 1, column = layout == Layout::row ? 1 : pitch;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a.x[i] = float_to_bits(p[(g() + 8 * (i % 2)) * row + (t() + 4 * (i / 2)) * column]);
    }
  }
  template <Layout layout>
  static CF_DEVICE void load_b(B& b, const float* p, int pitch) {
    const int row = layout == Layout::row ? pitch : 1, column = layout == Layout::row ? 1 : pitch;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      b.x[i] = float_to_bits(p[(t() + 4 * (i % 2)) * row + (g() + 8 * (i / 2)) * column]);
    }
  }
  static CF_DEVICE int place(int i, int pitch) {
    return (g() + 8 * (i / 2 % 2)) * pitch + 2 * t() + i % 2 + 8 * (i / 4);
  }
  static CF_DEVICE void load_c(C& c, const float* p, int pitch) {
#pragma unroll
    for (int i = 0; i < 8; ++i) c.x[i] = p[place(i, pitch)];
  }
  static CF_DEVICE void store_c(float* p, const C& c, int pitch) {
#pragma unroll
    for (int i = 0; i < 8; ++i) p[place(i, pitch)] = c.x[i];
  }
  template <Layout, Layout>
  static CF_DEVICE void mma(C& c, const A& a, const B& b) {
    ptx::mma(0.f, c.x, a.x, b.x);
  }
};

}  // namespace cf::ptx

#endif

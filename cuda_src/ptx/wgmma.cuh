// Products by a warpgroup: d (64 x N, float32) += a (64 x 16) b (16 x N), 16-bit elements.
//
// Thread t of the warpgroup holds d[4 j + i] = D[16 (t / 32) + t % 32 / 4 + 8 (i / 2)]
// [8 j + 2 (t % 4) + i % 2], and of an A in registers four words of two elements each, laid out as
// the accumulators of two neighbouring j.
//
// The products run beside the code that follows, until `products_wait`. ptxas orders them by the
// registers that they name: it must see that nothing touches these in between, or it makes every
// product wait for the one before. Hence accumulators are arrays with constant indices, and
// `settle` marks where they change hands.
#pragma once

#include "hopper.cuh"

#ifndef CF_PTX_TWIN

namespace cf::ptx {

// A matrix in shared memory as wgmma takes it. In units of 16 bytes: bits 0-13 address, 16-29
// leading and 32-45 stride byte offset; bits 62-63: 1, the places described above.
//
// By rows (A = Q, B = K: the 16 elements summed over lie in a row) the stride is eight rows and the
// leading offset is not read. By columns (B = V: they lie in a column) the leading offset leads to
// the next panel.
struct Descriptor {
  uint32 low;

  // Of a tile whose panels have `rows` rows. All lanes have the same; shown to the compiler by a
  // shuffle, it keeps what follows in the registers of the warp, from which wgmma reads.
  CF_DEVICE Descriptor(SmemAddress tile, int rows)
      : low(__shfl_sync(0xFFFFFFFF, (tile & 0x3FFFF) >> 4
                                        | uint32(rows * PANEL_ROW_BYTES >> 4) << 16, 0)) {}
  // `bytes` further on. Addresses stay below 2^18, so the sum does not leave its field.
  CF_DEVICE uint64 at(int bytes) const {
    constexpr uint32 high = 8 * PANEL_ROW_BYTES >> 4 | 1u << 30;
    return uint64(high) << 32 | (low + uint32(bytes >> 4));
  }
};

CF_DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
CF_DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `pending` groups, the latest ones, still run.
template <int pending>
CF_DEVICE void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(pending) : "memory");
}

// Nothing, at a place where these registers belong to the program and not to a running product.
template <int n>
CF_DEVICE void settle(float (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int n>
CF_DEVICE void settle(uint32 (&x)[n][4]) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(x[i][j])::"memory");
  }
}

// `rows`: A and B by rows, both in shared memory: Q K^T. `columns`: A in registers, B by columns:
// P V. With sum = 0 the accumulators' values before are not read.
template <typename T, int N>
struct Wgmma;

// Eight accumulators as text and as operands.
#define CF_NUMBERS8(a, b, c, d, e, f, g, h)                                                     \
  "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define CF_L1 CF_NUMBERS8(0, 1, 2, 3, 4, 5, 6, 7)
#define CF_L2 CF_L1 ", " CF_NUMBERS8(8, 9, 10, 11, 12, 13, 14, 15)
#define CF_L3 CF_L2 ", " CF_NUMBERS8(16, 17, 18, 19, 20, 21, 22, 23)
#define CF_L4 CF_L3 ", " CF_NUMBERS8(24, 25, 26, 27, 28, 29, 30, 31)
#define CF_L5 CF_L4 ", " CF_NUMBERS8(32, 33, 34, 35, 36, 37, 38, 39)
#define CF_L6 CF_L5 ", " CF_NUMBERS8(40, 41, 42, 43, 44, 45, 46, 47)
#define CF_L7 CF_L6 ", " CF_NUMBERS8(48, 49, 50, 51, 52, 53, 54, 55)
#define CF_L8 CF_L7 ", " CF_NUMBERS8(56, 57, 58, 59, 60, 61, 62, 63)
#define CF_L9 CF_L8 ", " CF_NUMBERS8(64, 65, 66, 67, 68, 69, 70, 71)
#define CF_L10 CF_L9 ", " CF_NUMBERS8(72, 73, 74, 75, 76, 77, 78, 79)
#define CF_L11 CF_L10 ", " CF_NUMBERS8(80, 81, 82, 83, 84, 85, 86, 87)
#define CF_L12 CF_L11 ", " CF_NUMBERS8(88, 89, 90, 91, 92, 93, 94, 95)
#define CF_L13 CF_L12 ", " CF_NUMBERS8(96, 97, 98, 99, 100, 101, 102, 103)
#define CF_L14 CF_L13 ", " CF_NUMBERS8(104, 105, 106, 107, 108, 109, 110, 111)
#define CF_L15 CF_L14 ", " CF_NUMBERS8(112, 113, 114, 115, 116, 117, 118, 119)
#define CF_L16 CF_L15 ", " CF_NUMBERS8(120, 121, 122, 123, 124, 125, 126, 127)
#define CF_OPERANDS8(i)                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),   \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define CF_A1 CF_OPERANDS8(0)
#define CF_A2 CF_A1, CF_OPERANDS8(8)
#define CF_A3 CF_A2, CF_OPERANDS8(16)
#define CF_A4 CF_A3, CF_OPERANDS8(24)
#define CF_A5 CF_A4, CF_OPERANDS8(32)
#define CF_A6 CF_A5, CF_OPERANDS8(40)
#define CF_A7 CF_A6, CF_OPERANDS8(48)
#define CF_A8 CF_A7, CF_OPERANDS8(56)
#define CF_A9 CF_A8, CF_OPERANDS8(64)
#define CF_A10 CF_A9, CF_OPERANDS8(72)
#define CF_A11 CF_A10, CF_OPERANDS8(80)
#define CF_A12 CF_A11, CF_OPERANDS8(88)
#define CF_A13 CF_A12, CF_OPERANDS8(96)
#define CF_A14 CF_A13, CF_OPERANDS8(104)
#define CF_A15 CF_A14, CF_OPERANDS8(112)
#define CF_A16 CF_A15, CF_OPERANDS8(120)

// The operands behind the N / 2 accumulators have the numbers o0 ... o5.
#define CF_WGMMA(T, type, N, list, sums, o0, o1, o2, o3, o4, o5)                                \
  template <>                                                                                   \
  struct Wgmma<T, N> {                                                                          \
    static CF_DEVICE void rows(float (&d)[N / 2], uint64 a, uint64 b, int sum) {                \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o2 ", 0;\n"                            \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type              \
                   " {" list "}, %" #o0 ", %" #o1 ", p, 1, 1, 0, 0;\n}"                         \
                   : sums                                                                       \
                   : "l"(a), "l"(b), "r"(sum));                                                 \
    }                                                                                           \
    static CF_DEVICE void columns(float (&d)[N / 2], const uint32 (&a)[4], uint64 b, int sum) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o5 ", 0;\n"                            \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type              \
                   " {" list "}, {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4               \
                   ", p, 1, 1, 1;\n}"                                                           \
                   : sums                                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(sum));             \
    }                                                                                           \
  };

#define CF_WGMMA_ALL(T, type)                                                                   \
  CF_WGMMA(T, type, 16, CF_L1, CF_A1, 8, 9, 10, 11, 12, 13)                                     \
  CF_WGMMA(T, type, 32, CF_L2, CF_A2, 16, 17, 18, 19, 20, 21)                                   \
  CF_WGMMA(T, type, 48, CF_L3, CF_A3, 24, 25, 26, 27, 28, 29)                                   \
  CF_WGMMA(T, type, 64, CF_L4, CF_A4, 32, 33, 34, 35, 36, 37)                                   \
  CF_WGMMA(T, type, 80, CF_L5, CF_A5, 40, 41, 42, 43, 44, 45)                                   \
  CF_WGMMA(T, type, 96, CF_L6, CF_A6, 48, 49, 50, 51, 52, 53)                                   \
  CF_WGMMA(T, type, 112, CF_L7, CF_A7, 56, 57, 58, 59, 60, 61)                                  \
  CF_WGMMA(T, type, 128, CF_L8, CF_A8, 64, 65, 66, 67, 68, 69)                                 \
  CF_WGMMA(T, type, 144, CF_L9, CF_A9, 72, 73, 74, 75, 76, 77)                                  \
  CF_WGMMA(T, type, 160, CF_L10, CF_A10, 80, 81, 82, 83, 84, 85)                                \
  CF_WGMMA(T, type, 176, CF_L11, CF_A11, 88, 89, 90, 91, 92, 93)                                \
  CF_WGMMA(T, type, 192, CF_L12, CF_A12, 96, 97, 98, 99, 100, 101)                              \
  CF_WGMMA(T, type, 208, CF_L13, CF_A13, 104, 105, 106, 107, 108, 109)                          \
  CF_WGMMA(T, type, 224, CF_L14, CF_A14, 112, 113, 114, 115, 116, 117)                          \
  CF_WGMMA(T, type, 240, CF_L15, CF_A15, 120, 121, 122, 123, 124, 125)                          \
  CF_WGMMA(T, type, 256, CF_L16, CF_A16, 128, 129, 130, 131, 132, 133)

CF_WGMMA_ALL(bfloat16_t, "bf16")
CF_WGMMA_ALL(half_t, "f16")

#undef CF_WGMMA
#undef CF_WGMMA_ALL
#undef CF_NUMBERS8
#undef CF_OPERANDS8
#undef CF_L1
#undef CF_L2
#undef CF_L3
#undef CF_L4
#undef CF_L5
#undef CF_L6
#undef CF_L7
#undef CF_L8
#undef CF_L9
#undef CF_L10
#undef CF_L11
#undef CF_L12
#undef CF_L13
#undef CF_L14
#undef CF_L15
#undef CF_L16
#undef CF_A1
#undef CF_A2
#undef CF_A3
#undef CF_A4
#undef CF_A5
#undef CF_A6
#undef CF_A7
#undef CF_A8
#undef CF_A9
#undef CF_A10
#undef CF_A11
#undef CF_A12
#undef CF_A13
#undef CF_A14
#undef CF_A15
#undef CF_A16

}  // namespace cf::ptx

#endif

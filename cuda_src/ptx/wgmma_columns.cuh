// The product of two matrices in shared memory that are both read by columns, and copies of plain
// memory: what the backward kernel needs beside ptx/wgmma.cuh.
#pragma once

#include "wgmma.cuh"

#ifndef CF_PTX_TWIN

namespace cf::ptx {

#define CF_NUMBERS8(a, b, c, d, e, f, g, h)                                                     \
  "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define CF_SUMS8(i)                                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),   \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define CF_WGMMA_COLUMNS(T, type)                                                               \
  CF_DEVICE void multiply_columns(T, float (&d)[32], uint64 a, uint64 b, int sum) {             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                   \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {"               \
                 CF_NUMBERS8(0, 1, 2, 3, 4, 5, 6, 7) ", "                                       \
                 CF_NUMBERS8(8, 9, 10, 11, 12, 13, 14, 15) ", "                                 \
                 CF_NUMBERS8(16, 17, 18, 19, 20, 21, 22, 23) ", "                               \
                 CF_NUMBERS8(24, 25, 26, 27, 28, 29, 30, 31)                                    \
                 "}, %32, %33, p, 1, 1, 1, 1;\n}"                                               \
                 : CF_SUMS8(0), CF_SUMS8(8), CF_SUMS8(16), CF_SUMS8(24)                         \
                 : "l"(a), "l"(b), "r"(sum));                                                   \
  }

// d [64, 64] += a b, where a [64, 16] and b [16, 64] lie with their 16 elements summed over in
// columns: dQ += dS K, of dS and K by keys.
CF_WGMMA_COLUMNS(bfloat16_t, "bf16")
CF_WGMMA_COLUMNS(half_t, "f16")
#undef CF_NUMBERS8
#undef CF_SUMS8
#undef CF_WGMMA_COLUMNS

// `Descriptor` of a tile of which the compiler can tell that all lanes have the same: its shuffle
// would take longer than a product.
struct UniformDescriptor {
  uint32 low;

  CF_DEVICE UniformDescriptor(SmemAddress tile, int rows)
      : low(tile >> 4 | uint32(rows * PANEL_ROW_BYTES >> 4) << 16) {}
  CF_DEVICE uint64 at(int bytes) const {
    constexpr uint32 high = 8 * PANEL_ROW_BYTES >> 4 | 1u << 30;
    return uint64(high) << 32 | (low + uint32(bytes >> 4));
  }
};

// Copies `bytes`, a multiple of 16, on borders of 16, of plain memory; `full` counts them.
CF_DEVICE void load_bytes(SmemAddress to, uint64 from, uint32 bytes, SmemAddress full) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];"
               :
               : "r"(to), "l"(from), "r"(bytes), "r"(full)
               : "memory");
}

}  // namespace cf::ptx

#endif

// Additions to global memory that many blocks make to the same sums.
#pragma once

#include "../ptx.cuh"

#ifndef CF_PTX_TWIN

namespace cf::ptx {

// Adds four sums of a lane in global memory: to neighbours in float32, aligned to 16 bytes; in
// float64, which is added one by one, to every 32nd, so that those of a warp are neighbours.
CF_DEVICE void add_to_global(uint64 address, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(address), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
#else
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;\n\t"
               "red.relaxed.gpu.global.add.f32 [%0 + 4], %2;\n\t"
               "red.relaxed.gpu.global.add.f32 [%0 + 8], %3;\n\t"
               "red.relaxed.gpu.global.add.f32 [%0 + 12], %4;"
               :
               : "l"(address), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
#endif
}
CF_DEVICE void add_to_global(uint64 address, double a, double b, double c, double d) {
  asm volatile("red.relaxed.gpu.global.add.f64 [%0], %1;\n\t"
               "red.relaxed.gpu.global.add.f64 [%0 + 256], %2;\n\t"
               "red.relaxed.gpu.global.add.f64 [%0 + 512], %3;\n\t"
               "red.relaxed.gpu.global.add.f64 [%0 + 768], %4;"
               :
               : "l"(address), "d"(a), "d"(b), "d"(c), "d"(d)
               : "memory");
}

// The same of one sum.
CF_DEVICE void add_to_global(uint64 address, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" : : "l"(address), "f"(x) : "memory");
}
CF_DEVICE void add_to_global(uint64 address, double x) {
  asm volatile("red.relaxed.gpu.global.add.f64 [%0], %1;" : : "l"(address), "d"(x) : "memory");
}

}  // namespace cf::ptx

#endif

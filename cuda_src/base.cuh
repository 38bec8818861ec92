// The few definitions that every kernel needs. No NVIDIA header is included here or anywhere else
// in this folder: a CuPy installed from wheels ships some of them only in part, and without them
// the same text also compiles with a C++ compiler on a machine without CUDA.
#pragma once

#ifdef __CUDACC__
#define CF_HOST_DEVICE __host__ __device__
#else
#define CF_HOST_DEVICE
#endif

namespace cf {

// NVRTC has no <cstdint>. Lengths and indices within one sequence are 32-bit; whatever addresses
// an array is int64, because four dimensions pass 2^31 elements long before one of them does.
using int32 = int;
using int64 = long long;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

static_assert(sizeof(int32) == 4 && sizeof(uint32) == 4, "int32 must have 4 bytes");
static_assert(sizeof(int64) == 8 && sizeof(uint64) == 8, "int64 must have 8 bytes");
static_assert(sizeof(uint16) == 2, "uint16 must have 2 bytes");

// The infinity of the accumulator's type: inf<float>(), inf<double>(). NVRTC knows neither INFINITY
// nor the builtin, and for a C++ compiler 1 / 0 is no constant.
template <typename T>
CF_HOST_DEVICE constexpr T inf() {
#ifdef __CUDACC_RTC__
  return static_cast<T>(1.f / 0.f);
#else
  return static_cast<T>(__builtin_huge_valf());
#endif
}

// The number of tiles of size b that cover a elements. a >= 0 and b > 0.
template <typename T>
CF_HOST_DEVICE constexpr T ceil_div(T a, T b) {
  // Not (a + b - 1) / b, which overflows for a near the type's maximum.
  return a / b + (a % b != 0);
}

}  // namespace cf

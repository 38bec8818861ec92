// The few definitions that every kernel needs. No NVIDIA header is included here or anywhere else
// in this folder: a CuPy installed from wheels ships some of them only in part, and without them
// the same text also compiles with a C++ compiler on a machine without CUDA.
#pragma once

#ifdef __CUDACC__
#define CF_HOST_DEVICE __host__ __device__
#define CF_DEVICE __device__ __forceinline__
#define CF_DEVICE_CALLED __device__ __noinline__
#else
#define CF_HOST_DEVICE
#define CF_DEVICE inline
#define CF_DEVICE_CALLED inline
#endif

// The block's dynamic shared memory as an array of bytes. A host that runs kernels on a CPU has its
// own definition. The tiles of wgmma begin on borders of 1,024 bytes.
#ifndef CF_DYNAMIC_SHARED
#define CF_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
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

template <typename T>
CF_HOST_DEVICE constexpr T min(T a, T b) {
  return b < a ? b : a;
}

template <typename T>
CF_HOST_DEVICE constexpr T max(T a, T b) {
  return a < b ? b : a;
}

// Elements of 16 bits as they lie in memory. Arithmetic on them happens in float32.
struct half_t {
  uint16 bits;
};
struct bfloat16_t {
  uint16 bits;
};

// The type of sums and statistics over elements of a type: accumulator<half_t>.
template <typename T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <typename T>
using accumulator = typename AccumulatorOf<T>::type;

}  // namespace cf

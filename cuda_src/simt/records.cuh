// Tiles in shared memory as the threads of these kernels read them: all the same element at once,
// 16 bytes at a time. What belongs to one key or row stands side by side, as its record.
#pragma once

#include "../attention/sequence.cuh"
#include "../memory.cuh"

namespace cf {

// 16 bytes of elements, which are loaded as one.
template <typename T>
struct alignas(16) Piece {
  static constexpr int elements = 16 / int(sizeof(T));
  T x[elements];
};

// x = n neighbours of a tile, from a border of 16 bytes on.
template <int n, typename T>
CF_DEVICE void load_pieces(T (&x)[n], const T* from) {
  constexpr int each = Piece<T>::elements;
  static_assert(n % each == 0, "records must be loaded in whole pieces of 16 bytes");
#pragma unroll
  for (int i = 0; i < n; i += each) {
    const Piece<T> piece = *reinterpret_cast<const Piece<T>*>(from + i);
#pragma unroll
    for (int j = 0; j < each; ++j) x[i + j] = piece.x[j];
  }
}

// The columns of a row; zeros if there is none.
template <int columns, typename T>
CF_DEVICE void load_row(T* x, uint64 row, bool there) {
#pragma unroll
  for (int c = 0; c < columns; ++c) {
    x[c] = there ? at<const T>(row + c * int(sizeof(T))) : T(0);
  }
}

// q.k, in the same order in every kernel. A chain of 8 is no long sum.
template <int columns, typename T>
CF_DEVICE T dot(const T* a, const T* b) {
  T sum = a[0] * b[0];
#pragma unroll
  for (int c = 1; c < columns; ++c) sum = fma(a[c], b[c], sum);
  return sum;
}

// Sum of n numbers, n a power of 2, by halves.
template <int n, typename T>
CF_DEVICE T sum_of(const T (&x)[n]) {
  static_assert((n & (n - 1)) == 0, "n must be a power of 2");
  T part[n];
#pragma unroll
  for (int i = 0; i < n; ++i) part[i] = x[i];
#pragma unroll
  for (int half = n / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) part[i] += part[i + half];
  }
  return part[0];
}

// The threads of a block.
template <typename Config>
CF_HOST_DEVICE constexpr int block_threads() {
  return 32 * Config::warps;
}

// A thread's i-th row or key of those that its block owns.
template <typename Config>
CF_DEVICE int owned(int i) {
  return int(threadIdx.x) + i * block_threads<Config>();
}

}  // namespace cf

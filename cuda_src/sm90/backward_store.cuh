// dK and dV to memory.
#pragma once

#include "backward_work.cuh"

namespace cf {

// Eight sums of a row of dk or dv, from column c on. whole: the row is made of 16-byte pieces of
// the type of the operands.
template <typename T>
CF_DEVICE void store_eight(const Tensor& t, uint64 row, int c, int columns, bool whole,
                           const float* sums) {
  if (!whole) {
#pragma unroll 1
    for (int i = c; i < min(c + 8, columns); i += 2, sums += 2) {
      store_pair(t, row + i * t.c, columns - i, sums[0], sums[1]);
    }
  } else if (c < columns) {
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < 4; ++i) chunk.word[i] = ptx::pack<T>(sums[2 * i], sums[2 * i + 1]);
    at<Chunk>(row + 2 * c) = chunk;
  }
}

// sums * scale of a consumer's keys, as wgmma leaves them, to dk or dv by way of `tile`, which has
// [64, width + 4] floats for it. All threads of the consumer, which meet at `barrier`.
template <typename T, int width>
CF_DEVICE void store_sums(const Tensor& t, const KeyWork& w, int first_key, int columns,
                          const float (&sums)[width / 2], float scale, float* tile, int barrier) {
  constexpr int pitch = width + 4, eights = width / 8;
  const int thread = int(threadIdx.x) % 128, lane = thread % 32;
  float* const own = tile + (thread / 32 * 16 + lane / 4) * pitch + 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < width / 2; i += 2) {
    *reinterpret_cast<Pair<float>*>(own + i / 2 % 2 * 8 * pitch + i / 4 * 8) = {
        sums[i] * scale, sums[i + 1] * scale};
  }
  ptx::named_barrier_wait(barrier, 128, "sums_written");  // by all of the consumer
  const uint64 base = head_address(t, w.b, w.head_k) + (w.key0 + first_key) * t.n;
  const bool whole = in_pieces(t, sizeof(T), columns, 16);
#pragma unroll 2
  for (int i = thread; i < 64 * eights; i += 128) {
    const int key = i / eights, c = i % eights * 8;
    if (key >= w.keys - first_key) break;
    store_eight<T>(t, base + key * t.n, c, columns, whole, tile + key * pitch + c);
  }
  ptx::named_barrier_wait(barrier, 128, "sums_read");
}

}  // namespace cf

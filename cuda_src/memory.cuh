// Pieces of memory: shared memory cut into arrays, and rows of arrays loaded and stored in pieces
// as wide as their alignment allows.
#pragma once

#include "convert.cuh"

namespace cf {

// Cuts arrays out of the block's shared memory, one after the other.
struct Carver {
  unsigned char* next;

  template <typename T>
  CF_DEVICE T* take(int bytes) {
    T* piece = reinterpret_cast<T*>(next);
    next += bytes;
    return piece;
  }
};

// Two elements that are loaded or stored as one.
template <typename T>
struct alignas(2 * sizeof(T)) Pair {
  T x[2];
};

// 16 bytes of a tile's row.
struct alignas(16) Chunk {
  uint32 word[4];
};
struct alignas(8) HalfChunk {
  uint32 word[2];
};

// The i-th 16-bit element of a chunk that holds 0 there.
CF_DEVICE void set_element(Chunk& chunk, int i, uint16 bits) {
  chunk.word[i / 2] |= uint32(bits) << 16 * (i % 2);
}

// The first `bytes` of a chunk, loaded in pieces of `vector_bytes`; zeros beyond.
CF_DEVICE Chunk load_chunk(uint64 address, int bytes, int vector_bytes) {
  Chunk chunk = {};
  if (vector_bytes == 16) {
    chunk = at<const Chunk>(address);
  } else if (vector_bytes == 8) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (8 * i < bytes) {
        const HalfChunk half = at<const HalfChunk>(address + 8 * i);
        chunk.word[2 * i] = half.word[0];
        chunk.word[2 * i + 1] = half.word[1];
      }
    }
  } else if (vector_bytes == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (4 * i < bytes) chunk.word[i] = at<const uint32>(address + 4 * i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (2 * i < bytes) set_element(chunk, i, at<const uint16>(address + 2 * i));
    }
  }
  return chunk;
}

// The same of float32 memory, rounded to 16-bit elements.
template <typename T>
CF_DEVICE Chunk load_narrowed(uint64 address, int elements) {
  Chunk chunk = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < elements) {
      set_element(chunk, i, narrow<T>(at<const float>(address + 4 * i)).bits);
    }
  }
  return chunk;
}

// Whether all rows of an array are whole pieces of so many bytes.
CF_DEVICE bool in_pieces(const Tensor& t, int64 size, int columns, int bytes) {
  return t.c == size && ((t.address | t.b | t.h | t.n | columns * size) & (bytes - 1)) == 0;
}

// Writes two neighbours of a row as far as `columns` goes, in one piece where they lie so.
template <typename A>
CF_DEVICE void store_pair(const Tensor& t, uint64 address, int columns, A x, A y) {
  const bool both = columns > 1 && (address & uint64(2 * t.c - 1)) == 0;
  if (both && t.c == 2) {
    at<uint32>(address) = t.kind == FLOAT16 ? ptx::pack<half_t>(float(x), float(y))
                                            : ptx::pack<bfloat16_t>(float(x), float(y));
  } else if (both && t.c == 4 && t.kind == FLOAT32) {
    at<HalfChunk>(address) = {ptx::float_to_bits(float(x)), ptx::float_to_bits(float(y))};
  } else {
    if (columns > 0) store(address, t.kind, x);
    if (columns > 1) store(address + t.c, t.kind, y);
  }
}

}  // namespace cf

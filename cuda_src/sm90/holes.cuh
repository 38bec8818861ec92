// Bias and mask of the forward kernel: scores that come from arrays, and keys hidden anywhere.
#pragma once

#include "softmax.cuh"

namespace cf {

// What a thread's two rows have in an array [batch, heads_q, Nq, Nk]: where its first column lies,
// and how many keys there are from that on, none in a row that is not real.
struct OwnScores {
  uint64 row[2];
  int keys[2];
  int64 c;                 // bytes from key to key

  CF_DEVICE OwnScores(const Tensor& t, const Work& w, int pack, int r, int column0) : c(t.c) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int own = r + 8 * i;
      const int64 head = w.head_of(own, pack), query = w.query(own, pack);
      row[i] = t.address + w.b * t.b + head * t.h + query * t.n + column0 * t.c;
      keys[i] = own < w.rows ? w.kv_len - column0 : 0;
    }
  }
  static CF_DEVICE int column(int i) { return i / 4 * 8 + i % 2; }    // of an accumulator
  CF_DEVICE bool has(int i) const { return column(i) < keys[row_of(i)]; }
  template <typename X>
  CF_DEVICE X load(int i) const {
    return at<const X>(row[row_of(i)] + column(i) * c);
  }
};

// Loads of a thread that are on their way together. Tiles of fewer than 128 keys go with wide
// accumulators, which leave few registers.
template <int n>
constexpr int LOADS = n < 64 ? 8 : 16;

// S += bias; -inf hides the key even if its score is NaN.
template <typename X, int n>
CF_DEVICE void add_bias(float (&S)[n], const OwnScores& own) {
#pragma unroll
  for (int start = 0; start < n; start += LOADS<n>) {
    float x[LOADS<n>];
#pragma unroll
    for (int j = 0; j < LOADS<n> && start + j < n; ++j) {
      x[j] = own.has(start + j) ? float(widen(own.load<X>(start + j))) : 0.f;
    }
#pragma unroll
    for (int j = 0; j < LOADS<n> && start + j < n; ++j) {
      S[start + j] = x[j] != -inf<float>() ? S[start + j] + x[j] : x[j];
    }
  }
}

// S = -inf where the boolean mask is False.
template <int n>
CF_DEVICE void hide_by_mask(float (&S)[n], const OwnScores& own) {
#pragma unroll
  for (int start = 0; start < n; start += LOADS<n>) {
    bool seen[LOADS<n>];
#pragma unroll
    for (int j = 0; j < LOADS<n> && start + j < n; ++j) {
      seen[j] = !own.has(start + j) || own.load<unsigned char>(start + j) != 0;
    }
#pragma unroll
    for (int j = 0; j < LOADS<n> && start + j < n; ++j) {
      if (!seen[j]) S[start + j] = -inf<float>();
    }
  }
}

// Bias and mask of the rows r and r + 8 of a tile; column0: the key of the thread's first column.
template <int n>
CF_DEVICE void read_scores(float (&S)[n], const ForwardSm90Params& p, const Work& w, int r,
                           int column0) {
  if (p.bias.address != 0) {
    const OwnScores own(p.bias, w, p.pack, r, column0);
    if (p.bias.kind == FLOAT16) {
      add_bias<half_t>(S, own);
    } else if (p.bias.kind == BFLOAT16) {
      add_bias<bfloat16_t>(S, own);
    } else if (p.bias.kind == FLOAT32) {
      add_bias<float>(S, own);
    } else {
      add_bias<double>(S, own);
    }
  }
  if (p.mask.address != 0) hide_by_mask(S, OwnScores(p.mask, w, p.pack, r, column0));
}

// Which of the thread's columns any row of the warp sees, a bit each, as in `columns_before`.
template <int n>
CF_DEVICE uint32 seen_columns(const float (&S)[n], const Work& w, int r) {
  static_assert(n <= 64, "a word holds 32 columns");
  uint32 seen = 0;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (S[i] != -inf<float>() && r + 8 * row_of(i) < w.rows) seen |= 1u << (i / 4 * 2 + i % 2);
  }
  for (int step = 4; step < 32; step *= 2) seen |= __shfl_xor_sync(0xFFFFFFFF, seen, step);
  return seen;
}

// The columns that any warp sees. words: [warps, 4], one of each thread of a quad.
template <int warps>
struct SeenColumns {
  uint32 word[4] = {};

  CF_DEVICE explicit SeenColumns(const uint32* words) {
    for (int warp = 0; warp < warps; ++warp) {
      const Chunk one = *reinterpret_cast<const Chunk*>(words + 4 * warp);
#pragma unroll
      for (int t = 0; t < 4; ++t) word[t] |= one.word[t];
    }
  }
  CF_DEVICE bool has(int key) const {
    const int t = key % 8 / 2;                          // a select: registers have no index
    const uint32 own = t < 2 ? (t == 0 ? word[0] : word[1]) : (t == 2 ? word[2] : word[3]);
    return (own >> (key / 8 * 2 + key % 2) & 1) != 0;
  }
};

}  // namespace cf

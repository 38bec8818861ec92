// The online softmax on accumulators of wgmma: a thread holds a part of two rows.
#pragma once

#include "../attention/softmax.cuh"
#include "work.cuh"

namespace cf {


// Element i of the accumulators belongs to row i / 2 % 2 of the thread's two.
CF_HOST_DEVICE constexpr int row_of(int i) { return i / 2 % 2; }

// m and l of the thread's two rows.
//
// unit * m is rounded, and unit * S - m_ref by one multiply-add is not: the largest P is 2 to the
// power of that rounding error, which is nothing up to LARGE, and anything for scores of 1e11. Rows
// beyond, and rows that have seen no key, have the lowest number for m_ref: it brings them to the
// place where references move in every step, where S - m is taken first.
struct RowState {
  float m[2];              // in units of S
  float m_ref[2];          // the reference as a power of 2, if it is usual
  float l[2];              // this thread's part of the sum

  CF_DEVICE RowState() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      m[r] = -inf<float>();
      m_ref[r] = LOWEST;
      l[r] = 0.f;
    }
  }
};


// The largest of the thread's S in each row, in four chains a row: one would wait for itself.
// half: only the first half of the columns counts.
template <int n>
CF_DEVICE void row_maxima(const float (&S)[n], bool half, float (&m)[2]) {
  float chain[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) chain[i] = S[i];
#pragma unroll
  for (int i = 8; i < n / 2; ++i) chain[i % 8] = fmaxf(chain[i % 8], S[i]);
  if (!half) {
#pragma unroll
    for (int i = n / 2; i < n; ++i) chain[i % 8] = fmaxf(chain[i % 8], S[i]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    m[r] = fmaxf(fmaxf(chain[2 * r], chain[2 * r + 1]), fmaxf(chain[2 * r + 4], chain[2 * r + 5]));
  }
}

// Moves the reference of a row whose maximum in this step is `top` if that passes it; returns by
// what to scale l and acc. shift: what to take off S beforehand; m_ref: what to take off after it.
CF_DEVICE float move_reference(RowState& state, int r, float top, float lazy,
                               const ForwardSm90Params& p, float& shift, float& m_ref) {
  const float m = state.m[r];
  const bool empty = m == -inf<float>();
  const bool move = empty ? top != m : (top - m) * p.unit > lazy;
  const float m_new = move ? top : m, power = m_new * p.unit;
  const bool usual = fabsf(power) < LARGE;
  state.m[r] = m_new;
  state.m_ref[r] = usual ? power : LOWEST;
  shift = usual || m_new == -inf<float>() ? 0.f : m_new;
  m_ref = usual ? power : 0.f;
  return empty || !move ? 1.f : ptx::exp2_approx((m - m_new) * p.unit);
}

// S -> P in place, and the sums of a thread's part of each row of the unrounded P. half: P is 0 in
// the second half of the columns.
template <int n>
CF_DEVICE void exponentials(float (&S)[n], bool half, const float (&m_ref)[2], float unit,
                            float (&sum)[2]) {
  float part[8] = {};
#pragma unroll
  for (int start = 0; start < n; start += n / 2) {
    if (start > 0 && half) {
#pragma unroll
      for (int i = start; i < n; ++i) S[i] = 0.f;
    } else {
#pragma unroll
      for (int i = start; i < start + n / 2; ++i) {
        S[i] = ptx::exp2_approx(fmaf(S[i], unit, -m_ref[row_of(i)]));
        part[i % 8] += S[i];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] = (part[2 * r] + part[2 * r + 1]) + (part[2 * r + 4] + part[2 * r + 5]);
  }
}

// S -> P in place; l moves on. Returns whether the warp has to scale its accumulators by alpha: the
// reference of a row moves only when the row's maximum passes it by the lazy threshold. The four
// threads of a row look at the whole row only if that may be so. first: there is nothing to scale,
// and alpha stays what it is. half: the warp sees nothing of the second half of the columns.
template <int n>
CF_DEVICE bool softmax_step(float (&S)[n], RowState& state, float (&alpha)[2], bool first,
                            bool half, const float (&lazy)[2], const ForwardSm90Params& p) {
  float m[2];
  row_maxima(S, half, m);                                // fmaxf drops a NaN; it shows up in P
  const bool moves = fmaf(m[0], p.unit, -state.m_ref[0]) > lazy[0]
                     || fmaf(m[1], p.unit, -state.m_ref[1]) > lazy[1];
  const bool any = __any_sync(0xFFFFFFFF, moves);
  float m_ref[2] = {state.m_ref[0], state.m_ref[1]};
  if (any) {
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = move_reference(state, r, row_max(m[r]), lazy[r], p, shift[r],
                                          m_ref[r]);
      if (!first) {
        alpha[r] = factor;
        state.l[r] *= factor;
      }
    }
    if (__any_sync(0xFFFFFFFF, shift[0] != 0.f || shift[1] != 0.f)) {
#pragma unroll
      for (int i = 0; i < n; ++i) S[i] -= shift[row_of(i)];
    }
  }
  float sum[2];
  exponentials(S, half, m_ref, p.unit, sum);
#pragma unroll
  for (int r = 0; r < 2; ++r) state.l[r] += sum[r];
  return any;
}

// S: q.k -> scores by scale, softcap and ALiBi, of the rows r and r + 8 of a tile; column0: the key
// of the thread's first column.
template <int n>
CF_DEVICE void finish_scores(float (&S)[n], const ForwardSm90Params& p, const Work& w, int r,
                             int column0) {
  ScoreRow<float> row[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    row[i].position = w.query(r + 8 * i, p.pack) + w.offset;
    if (p.slopes.address != 0) {
      const int64 head = w.head_of(r + 8 * i, p.pack);
      row[i].width = load<float>(p.slopes.address + w.b * p.slopes.b + head * p.slopes.h,
                                 p.slopes.kind);
    }
  }
#pragma unroll
  for (int i = 0; i < n; ++i) {
    float x = ptx::multiply(p.qk_scale, S[i]);
    if (p.cap != 0.f) x = ptx::multiply(p.cap, tanh(x * p.per_cap));
    if (p.slopes.address != 0) x = add_alibi(x, row[row_of(i)], column0 + i / 4 * 8 + i % 2);
    S[i] = x;
  }
}

// Which of a thread's columns in a row lie before `end`, a bit each: it has the first two of every
// eight, counted from its first one.
CF_DEVICE uint32 columns_before(int end) {
  const int n = end <= 0 ? 0 : 2 * (end / 8) + min(end % 8, 2);
  return n >= 32 ? 0xFFFFFFFF : (1u << n) - 1;
}

// S = -inf outside of the keys that each of the thread's rows sees; column0: the key of the
// thread's first column.
template <int n>
CF_DEVICE void hide_keys(float (&S)[n], const KeyRange (&visible)[2], int column0) {
#pragma unroll
  for (int start = 0; start < n / 2; start += 32) {     // columns of a row, in words of 32
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int before = column0 + 4 * start;
      const uint32 seen = columns_before(visible[r].end - before)
                          & ~columns_before(visible[r].first - before);
#pragma unroll
      for (int j = 0; j < 32 && start + j < n / 2; ++j) {
        const int i = (start + j) / 2 * 4 + 2 * r + j % 2;
        if (!(seen & (1u << j))) S[i] = -inf<float>();
      }
    }
  }
}

}  // namespace cf

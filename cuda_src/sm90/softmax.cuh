// The online softmax on accumulators of wgmma: a thread holds a part of two rows.
#pragma once

#include "../attention/score.cuh"
#include "../attention/softmax.cuh"
#include "../view/accumulators.cuh"
#include "work.cuh"

namespace cf {

// Element i of the accumulators belongs to row i / 2 % 2 of the thread's two.
CF_HOST_DEVICE constexpr int row_of(int i) { return i / 2 % 2; }

// m and l of the thread's two rows. m_ref: see PowerReference.
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
  const bool move = passes(top, m, p.unit, lazy);
  const float m_new = move ? top : m;
  const PowerReference reference(m_new, m_new * p.unit);
  state.m[r] = m_new;
  state.m_ref[r] = reference.m_ref;
  shift = reference.shift;
  m_ref = PowerReference::after(reference.m_ref);
  return move ? alpha_of(m, m_new, p.unit) : 1.f;
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

}  // namespace cf

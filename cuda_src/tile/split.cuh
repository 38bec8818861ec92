// Where a forward kernel writes when the keys are split.
#pragma once

#include "../params.cuh"

namespace cf {

// out or, of one split, out_partial; lse likewise.
template <typename T>
CF_DEVICE Tensor split_result(const ForwardParams& p, const Tensor& whole, uint64 partial,
                              int64 columns, int64 split) {
  if (p.splits == 1) return whole;
  const int64 row = columns * int64(sizeof(T)), head = row * p.Nq, batch = head * p.heads_q;
  return {partial + split * p.batch * batch, batch, head, row, sizeof(T),
          sizeof(T) == 8 ? FLOAT64 : FLOAT32};
}

}  // namespace cf

// Where a forward kernel writes when the keys are split.
#pragma once

#include "mask.cuh"

namespace cf {

// An array [splits, batch, heads_q, Nq, columns] in workspace, from a split on.
template <typename T>
CF_DEVICE Tensor split_part(const ForwardParams& p, uint64 partial, int64 columns, int64 split) {
  const int64 row = columns * int64(sizeof(T)), head = row * p.Nq, batch = head * p.heads_q;
  return {partial + split * p.batch * batch, batch, head, row, sizeof(T),
          sizeof(T) == 8 ? FLOAT64 : FLOAT32};
}

// out or, of one split, out_partial.
template <typename T>
CF_DEVICE Tensor split_out(const ForwardParams& p, int64 split) {
  return p.splits == 1 ? p.out : split_part<T>(p, p.out_partial, p.d_v, split);
}

// lse of row r, or m and l of one split of its keys: beside a large m there is no room for ln l.
// l = 0: the row sees none of them.
template <typename T>
CF_DEVICE void store_m_and_l(const ForwardParams& p, const Rows& rows, int r, int64 split, T m,
                             T l) {
  if (p.splits == 1) {
    if (p.lse.address != 0) at<T>(rows.address(p.lse, r)) = m + log(l);
    return;
  }
  at<T>(rows.address(split_part<T>(p, p.lse_partial, 1, split), r)) = l != T(0) ? m : -inf<T>();
  at<T>(rows.address(split_part<T>(p, p.l_partial, 1, split), r)) = l;
}

}  // namespace cf

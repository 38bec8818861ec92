// Where things lie in the workspace of a plan.
#pragma once

#include "band.cuh"

namespace cf {

// The place of a row among those of all sequences: [batch, heads_q, Nq].
CF_DEVICE int64 row_index(const Params& p, int64 b, int64 head, int64 query) {
  return (b * p.heads_q + head) * p.Nq + query;
}

// Split keys. An array [splits, batch, heads_q, Nq, columns], from a split on.
template <typename T>
CF_DEVICE Tensor split_part(const Params& p, uint64 partial, int64 columns, int64 split) {
  const int64 row = columns * int64(sizeof(T)), head = row * p.Nq, batch = head * p.heads_q;
  return {partial + split * p.batch * batch, batch, head, row, sizeof(T),
          sizeof(T) == 8 ? FLOAT64 : FLOAT32};
}

// out or, of one split, out_partial.
template <typename T>
CF_DEVICE Tensor split_out(const ForwardParams& p, int64 split) {
  return p.splits == 1 ? p.out : split_part<T>(p, p.out_partial, p.d_v, split);
}

// Split rows. The sums of a split for a key head: [Nk, columns].
template <typename T>
CF_DEVICE uint64 sums_of(const BackwardParams& p, uint64 sums, int64 columns, int64 split,
                         int64 head) {
  const int64 heads = p.batch * p.heads_k;
  return sums + (split * heads + head) * p.Nk * columns * int64(sizeof(T));
}

// Tiles of Br packed rows of a key head.
CF_DEVICE int64 row_tiles(const BackwardParams& p, int Br) {
  return ceil_div(p.group * p.Nq, int64(Br));
}

// `state`: of each tile of state_rows packed rows the lse [Br] and behind it the delta [Br]. head:
// of all key heads of all sequences. lse is +inf for rows that see no key, so that their P is 0.
template <typename T>
CF_DEVICE uint64 state_address(const BackwardParams& p, int64 head, int64 tile, int Br) {
  return p.state + (head * row_tiles(p, Br) + tile) * (2 * Br * int(sizeof(T)));
}

// The lse of one row of a tile; its delta is `state_rows` elements behind it.
template <typename T>
CF_DEVICE uint64 row_state(const BackwardParams& p, const Rows& rows, int r) {
  const uint32 group = uint32(p.group), Br = uint32(p.state_rows);
  const uint32 head = uint32(rows.head0 + rows.packed.head(r));
  const uint32 row = uint32(rows.packed.query(r)) * group + head % group;
  return state_address<T>(p, rows.b * p.heads_k + head / group, row / Br, int(Br))
         + row % Br * sizeof(T);
}

// `dq_sums`: of each tile of Br packed rows fragments [Br / 16, d / 16] of 16 x 16 sums in the
// order of registers, two halves of four sums for each of 32 lanes; those of a lane are neighbours
// in float32, those of a warp in float64, as the additions want them.
template <typename Config>
CF_DEVICE uint64 dq_address(const BackwardParams& p, int64 head, int64 tile) {
  using A = accumulator<typename Config::element>;
  return p.dq_sums
         + (head * row_tiles(p, Config::Br) + tile) * (Config::Br * Config::d * int(sizeof(A)));
}

// Bytes from the start of a tile's sums to what a lane has of one half of fragment (i, j).
template <typename Config>
CF_DEVICE int dq_offset(int i, int j, int half, int lane) {
  const int tile = ((i * (Config::d / 16) + j) * 2 + half) * 32;
  return sizeof(typename Config::element) == 8 ? (tile * 4 + lane) * 8 : (tile + lane) * 16;
}

// Four sums of a lane.
template <typename A>
struct alignas(16) FourSums {
  A x[4];
};

}  // namespace cf

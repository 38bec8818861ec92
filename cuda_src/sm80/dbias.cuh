// dbias from the registers of dS: stored, added, or summed first (Config::dbias).
#pragma once

#include "scores.cuh"

namespace cf {

template <typename A>
CF_DEVICE void put(uint16& to, A x, bool half) {
  to = half ? narrow<half_t>(float(x)).bits : narrow<bfloat16_t>(float(x)).bits;
}
template <typename A>
CF_DEVICE void put(float& to, A x, bool) {
  to = float(x);
}
template <typename A>
CF_DEVICE void put(double& to, A x, bool) {
  to = double(x);
}

// The dS of a view to dbias, in rows and keys that exist. lines: where the rows begin there, from
// the lane's first on; 0: nowhere.
template <typename X, typename View, typename Scores>
CF_DEVICE void write_dbias_as(const BackwardParams& p, const View& view, const Scores& dS,
                              const uint64* lines) {
  const bool half = p.dbias.kind == FLOAT16;
#pragma unroll
  for (int x0 = 0; x0 < View::count; x0 += View::keys) {
    const uint64 line = lines[View::row_offset(x0)];
    if (line == 0) continue;
#pragma unroll
    for (int x = x0; x < x0 + View::keys; ++x) {
      const int key = view.key0 + view.key(x);
      if (key < p.Nk) put(at<X>(line + key * p.dbias.c), view.at(dS, x), half);
    }
  }
}
template <typename View, typename Scores>
CF_DEVICE void write_dbias(const BackwardParams& p, const View& view, const Scores& dS,
                           const uint64* lines) {
  if (p.dbias.kind == FLOAT16 || p.dbias.kind == BFLOAT16) {
    write_dbias_as<uint16>(p, view, dS, lines);
  } else if (p.dbias.kind == FLOAT32) {
    write_dbias_as<float>(p, view, dS, lines);
  } else {
    write_dbias_as<double>(p, view, dS, lines);
  }
}

// ADDED: the dS of a view to the sums of their elements. A lane's neighbours have the next keys, so
// that eight lanes fill a sector. No branch stands between the additions: where there is no such
// row or key, dS is 0, and goes to an element that there is.
template <typename View, typename Scores>
CF_DEVICE void add_dbias(const BackwardParams& p, const View& view, const Scores& dS,
                         const uint64* lines) {
  const int last = int(p.Nk) - 1;
#pragma unroll
  for (int x = 0; x < View::count; ++x) {
    const int key = min(view.key0 + view.key(x), last);
    const uint64 line = lines[View::row_offset(x)];
    ptx::add_to_global(line + int64(key) * int(sizeof(typename View::T)), view.at(dS, x));
  }
}

// OVER_ROWS: the sums of a thread for its keys, of which each has a place.
template <typename Config>
CF_DEVICE double* row_sums_here(const FusedTiles<Config>& t) {
  return t.dbias_sums + ptx::opaque(int(threadIdx.x));
}
template <typename Config>
CF_DEVICE void clear_row_sums(const FusedTiles<Config>& t) {
  using Traits = BackwardSm80Traits<Config>;
#pragma unroll
  for (int n = 0; n < Traits::strip / 8; ++n) row_sums_here(t)[n * Traits::threads] = 0.;
}
// sums += dS over the rows of a view.
template <typename Config, typename View, typename Scores>
CF_DEVICE void add_over_rows(const FusedTiles<Config>& t, const View& view, const Scores& dS) {
  using T = typename View::T;
  double* const sums = row_sums_here(t);
#pragma unroll
  for (int n = 0; n < View::keys; ++n) {
    T sum = T(0);
#pragma unroll
    for (int x = n; x < View::count; x += View::keys) sum += view.at(dS, x);
    sums[n * BackwardSm80Traits<Config>::threads] += double(sum);
  }
}
// After the walk: what the lanes with the same key have, to workspace; from the second piece of the
// rows on, one more.
template <typename Config>
CF_DEVICE void store_row_sums(const BackwardParams& p, const FusedTiles<Config>& t,
                              const RowPiece& piece, int64 split) {
  using Traits = BackwardSm80Traits<Config>;
  const OwnKeys& own = *t.own;
  const uint64 to = key_sums_address<Config>(p, split, own.head, Share<Config>::part());
#pragma unroll
  for (int n = 0; n < Traits::strip / 8; ++n) {
    double sum = row_sums_here(t)[n * Traits::threads];
    sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFF, sum, 2);
    const int key = Share<Config>::strip() + row_here() + 8 * n;
    if (here() % 4 != 0 || key >= own.keys) continue;
    double& total = at<double>(to + (own.key0 + key) * int64(sizeof(double)));
    total = piece.first ? sum : total + sum;
  }
}

// OVER_KEYS: the dS of each row of a view, summed over the warp's keys, to the sums of the row. The
// eight lanes that share rows divide them up: in each step one gives half of its sums away for the
// other half of its partner's.
template <typename View, typename Scores>
CF_DEVICE void add_over_keys(const View& view, const Scores& dS, const uint64* lines) {
  using T = typename View::T;
  constexpr int rows = View::count / View::keys;
  static_assert(rows == 4 || rows == 8, "a lane has four rows of one or two fragments");
  T sums[rows];
#pragma unroll
  for (int r = 0; r < rows; ++r) {
    sums[r] = view.at(dS, r * View::keys);
#pragma unroll
    for (int n = 1; n < View::keys; ++n) sums[r] += view.at(dS, r * View::keys + n);
  }
  const int lane = here();
  int own = 0;                                          // the row that is left to the lane
#pragma unroll
  for (int step = 16, count = rows / 2; step >= 4; step /= 2, count /= 2) {
    const bool upper = (lane & step) != 0;
#pragma unroll
    for (int r = 0; r < count; ++r) {
      const T give = upper ? sums[r] : sums[r + count];
      sums[r] = (upper ? sums[r + count] : sums[r]) + __shfl_xor_sync(0xFFFFFFFF, give, step);
    }
    if (upper) own += count;
    if (count == 0) sums[0] += __shfl_xor_sync(0xFFFFFFFF, sums[0], step);
  }
  const bool twice = rows < 8 && (lane & 4) != 0;       // two lanes have the sum
  ptx::add_to_global(lines[View::row_offset(own * View::keys)], twice ? 0. : double(sums[0]));
}

// What becomes of the dS of a view. lines: see FusedTiles::dbias, from the lane's first row on.
template <typename Config, typename View, typename Scores>
CF_DEVICE void take_dbias(const BackwardParams& p, const FusedTiles<Config>& t, const View& view,
                          const Scores& dS, const uint64* lines) {
  if constexpr (dbias_is<Config>(STORED)) {
    write_dbias(p, view, dS, lines);
  } else if constexpr (dbias_is<Config>(ADDED)) {
    add_dbias(p, view, dS, lines);
  } else if constexpr (dbias_is<Config>(OVER_ROWS)) {
    add_over_rows(t, view, dS);
  } else {
    add_over_keys(view, dS, lines);
  }
}

// dbias = 0 for the block's keys in the tiles of rows before `first` and from `end` on, which see
// none of them.
template <typename Config>
CF_DEVICE_CALLED void clear_dbias(const BackwardParams& p, const OwnKeys& own, int first, int end,
                                  const RowPiece& piece) {
  const int64 b = own.head / p.heads_k, head0 = own.head % p.heads_k * p.group;
  const uint64 base = head_address(p.dbias, b, head0);
  for (int64 row = piece.begin + warp_id(); row < piece.end; row += Config::warps) {
    if (row >= int64(first) * Config::Br && row < int64(end) * Config::Br) continue;
    const uint64 line = base + row % p.group * p.dbias.h + row / p.group * p.dbias.n;
    for (int64 key = own.key0 + lane_id(); key < own.key0 + own.keys; key += 32) {
      store(line + key * p.dbias.c, p.dbias.kind, 0.f);
    }
  }
}

}  // namespace cf

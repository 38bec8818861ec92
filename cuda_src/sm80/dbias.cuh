// dbias where each score has an element of its own, which then is dS (Config::dbias).
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

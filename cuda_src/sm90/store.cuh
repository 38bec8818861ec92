// Accumulators of wgmma to memory.
#pragma once

#include "softmax.cuh"
#include "tiles.cuh"

namespace cf {

// Row r of a work in out or lse; head: where its first query head begins there.
CF_DEVICE uint64 row_address(const ForwardSm90Params& p, const Tensor& t, uint64 head,
                             const Work& w, int r) {
  const uint32 row = w.row0 + r, pack = p.pack;
  if (pack == 1) return head + row * t.n;
  return head + row % pack * t.h + row / pack * t.n;
}

// The same of a thread's two rows, r and r + 8.
CF_DEVICE void row_addresses(const ForwardSm90Params& p, const Tensor& t, uint64 head,
                             const Work& w, int r, uint64 (&rows)[2]) {
  if (p.pack == 1) {
    rows[0] = head + uint32(w.row0 + r) * t.n;
    rows[1] = rows[0] + 8 * t.n;
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) rows[i] = row_address(p, t, head, w, r + 8 * i);
  }
}

// Ends the sums of the rows r and r + 8: stores lse, and factor becomes 1 / l. They are -inf and 0
// for rows that see no key, and for rows behind q_lens. score_of_S: the factor from S to scores in
// natural units.
template <typename Config>
CF_DEVICE void close_rows(const ForwardSm90Params& p, const Work& w, int r, const RowState& state,
                          float score_of_S, float (&factor)[2]) {
  float lse[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int own = r + 8 * i;
    const RowEnd<float> end = finish_row<Config>(p, w.head_of(own, p.pack), own < w.rows,
                                                 ptx::multiply(score_of_S, state.m[i]),
                                                 row_sum(state.l[i]));
    lse[i] = end.lse();
    factor[i] = end.factor;
  }
  if (threadIdx.x % 4 != 0 || p.lse.address == 0) return;
  uint64 rows[2];
  row_addresses(p, p.lse, w.lse, w, r, rows);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (r + 8 * i < w.count) at<float>(rows[i]) = lse[i];
  }
}

// out = acc / l by the TMA unit. The warp puts panels of its 16 rows into shared memory, as many as
// have a place, has them copied and goes on; places are filled again once they have been read. Rows
// and columns outside of the array are left out by the copies.
template <typename Config>
CF_DEVICE void store_panels(const ForwardSm90Params& p, const ForwardSm90Tiles<Config>& tiles,
                            const Work& w, int group, const float (&acc)[Config::d_v / 2],
                            const float (&factor)[2]) {
  using Traits = ForwardSm90Traits<Config>;
  constexpr int place_bytes = panels_bytes(16, PANEL);
  const int warp = 4 * group + int(threadIdx.x) % 128 / 32, lane = int(threadIdx.x) % 32;
  const int head = w.head_of(16 * warp, p.pack), query = w.query(16 * warp, p.pack);
  // Of the matrices that a lane's rows belong to, two lie below each other and two side by side.
  const SmemAddress own_row = tiles.out(warp) + lane % 16 * PANEL_ROW_BYTES;
#pragma unroll
  for (int first = 0; first < Traits::out_panels; first += Traits::out_places) {
    const int end = min(first + Traits::out_places, Traits::out_panels);
    if (lane == 0) ptx::stores_read<0>("panels_read");
    ptx::sync_warp("panels_free");
#pragma unroll
    for (int block = 4 * first; block < min(4 * end, Config::d_v / 16); ++block) {
      uint32 word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 8 * block + 2 * j;
        const float f = factor[row_of(i)];
        // A select: the accumulators of a row without keys may hold NaN.
        word[j] = f != 0.f ? ptx::pack<typename Config::element>(acc[i] * f, acc[i + 1] * f) : 0;
      }
      const int place = (block / 4 - first) * place_bytes, chunk = block % 4 * 2 + lane / 16;
      ptx::store_matrices(own_row + place + (chunk ^ lane % 8) * 16, word);
    }
    ptx::fence_async_reads("panels_fenced");
    ptx::sync_warp("panels_written");                   // and fenced by all lanes
    if (lane == 0) {
#pragma unroll
      for (int panel = first; panel < end; ++panel) {
        ptx::store_box(p.out_map, tiles.out(warp) + (panel - first) * place_bytes, panel * PANEL,
                       head, query, w.b);
      }
      ptx::stores_commit();
    }
  }
}

// The element type of out.
template <typename T, int wide>
struct ResultOf {
  using type = float;
};
template <typename T>
struct ResultOf<T, 0> {
  using type = T;
};

// out = acc / l from registers: by pairs, where they lie on borders of their size, or one by one.
template <typename O, bool pairs, int n>
CF_DEVICE void store_rows(const ForwardSm90Params& p, const Work& w, int r,
                          const float (&acc)[n], const float (&factor)[2]) {
  const int column0 = 2 * (int(threadIdx.x) % 4);
  uint64 rows[2];
  row_addresses(p, p.out, w.out, w, r, rows);
  int columns[2];                                       // from the thread's first one on
#pragma unroll
  for (int own = 0; own < 2; ++own) {
    rows[own] += int(sizeof(O)) * column0;
    columns[own] = r + 8 * own < w.count ? int(p.d_v) - column0 : 0;
  }
#pragma unroll
  for (int i = 0; i < n; i += 2) {
    const int own = row_of(i), column = i / 4 * 8;
    const uint64 to = rows[own] + int(sizeof(O)) * column;
    Pair<O> two;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      two.x[j] = narrow<O>(factor[own] != 0.f ? acc[i + j] * factor[own] : 0.f);
      if (!pairs && column + j < columns[own]) at<O>(to + int(sizeof(O)) * j) = two.x[j];
    }
    if (pairs && column < columns[own]) at<Pair<O>>(to) = two;
  }
}

// One warp: the rows of a tile of which no row sees a key, by zeros of the type Z: as wide as
// stores to out may be.
template <typename Config, typename Z>
CF_DEVICE void store_nothing(const ForwardSm90Params& p, const Work& w) {
  const int zeros = int(p.d_v) * (p.out.kind == FLOAT32 ? 4 : 2) / int(sizeof(Z));
#pragma unroll 1
  for (int i = int(threadIdx.x) % 32; i < w.count * zeros; i += 32) {
    const int r = i / zeros;
    at<Z>(row_address(p, p.out, w.out, w, r) + int(sizeof(Z)) * (i % zeros)) = Z{};
    if (i % zeros == 0 && p.lse.address != 0) {
      const RowEnd<float> end =
          finish_row<Config>(p, w.head_of(r, p.pack), r < w.rows, -inf<float>(), 0.f);
      at<float>(row_address(p, p.lse, w.lse, w, r)) = end.lse();
    }
  }
}

}  // namespace cf

// What the consumers of the backward kernels for sm_90a have in common: products over a tile of
// rows, what is hidden in it, and the arithmetic between the products.
//
// Scores are computed transposed, keys as rows: P^T and dS^T are then operands of dV += P^T dO and
// dK += dS^T Q in the registers that hold them. What is multiplied lies at addresses of which the
// compiler can tell that all lanes have the same: a shuffle would take as long as a product.
#pragma once

#include "../ptx/reduce.cuh"
#include "backward_store.cuh"
#include "ring.cuh"

namespace cf {

// A consumer is a warpgroup; its 64 keys are those from first_key on.
template <typename Config, typename Tiles>
struct BackwardRows {
  using Traits = typename Tiles::Traits;
  using T = typename Config::element;
  using RowPlace = Place<Traits::stages>;
  static constexpr int Br = Config::Br, Bc = Config::Bc, d = Config::d, d_v = Config::d_v;
  using Scores = float[Br / 2];        // [64, Br]
  using Operand = uint32[Br / 16][4];  // [64, Br]
  const BackwardSm90Params& p;
  const Tiles& tiles;
  const int group;                     // which consumer this is
  const int first_key;
  RowPlace place;                      // of the tile of rows
  int first, end;                      // tiles of rows that see any of the keys
  int whole_first, whole_end;          // tiles of rows all of which see all of the keys

  CF_DEVICE BackwardRows(const BackwardSm90Params& p_, const Tiles& tiles_, int group_,
                         int first_key_)
      : p(p_), tiles(tiles_), group(group_), first_key(first_key_) {}

  static CF_DEVICE int lane() { return int(threadIdx.x) % 32; }
  static CF_DEVICE int warp() { return int(threadIdx.x) % 128 / 32; }
  // The first of the thread's two keys, counted from the block's first; the other is 8 behind.
  CF_DEVICE int own_key() const { return first_key + 16 * warp() + lane() / 4; }
  // The first of the thread's rows: of each 8 it has this one and the next.
  static CF_DEVICE int own_row() { return 2 * (lane() % 4); }

  CF_DEVICE void open(const KeyWork& w) {
    first = ptx::uniform(w.first / Br);
    end = ptx::uniform(ceil_div(w.end, Br));
    whole_first = ptx::uniform(w.whole_first);
    whole_end = ptx::uniform(w.whole_end);
  }
  CF_DEVICE bool hides(int tile) const { return tile < whole_first || tile >= whole_end; }

  // x = A B^T of the consumer's 64 keys and all rows of a tile, in a group of its own.
  template <int depth>
  CF_DEVICE void start_scores(Scores& x, SmemAddress A, SmemAddress B) const {
    const ptx::UniformDescriptor keys(A + first_key * PANEL_ROW_BYTES, Bc), rows(B, Br);
    ptx::products_begin();
#pragma unroll
    for (int i = 0; i < depth / 16; ++i) {
      const int panel = i / 4, inside = i % 4 * 32;
      ptx::Wgmma<T, Br>::rows(x, keys.at(panel * Bc * PANEL_ROW_BYTES + inside),
                              rows.at(panel * Br * PANEL_ROW_BYTES + inside), i > 0);
    }
    ptx::products_commit();
  }
  // sums += x B over the rows of a tile, in a group of its own; nothing if they are not asked for.
  template <int gradient, int width>
  CF_DEVICE void start_sums(float (&sums)[width / 2], const Operand& x,
                            SmemAddress B) const {
    const ptx::UniformDescriptor rows(B, Br);
#pragma unroll
    for (int i = 0; i < (wants<Config>(gradient) ? Br / 16 : 0); ++i) {
      ptx::Wgmma<T, width>::columns(sums, x[i], rows.at(i * 16 * PANEL_ROW_BYTES), 1);
    }
    ptx::products_commit();
  }
  // S = -inf where a row does not see a key.
  CF_DEVICE void hide(Scores& S) const {
    const KeysAsRows<float, KeyRange, 1, Br / 16> view = {tiles.ranges(group) + own_row(),
                                                          own_key()};
    hide_keys(S, view, -inf<float>());
  }

  // Zeroes the rows first ... last - 1 of a tile of `rows`: whatever they hold must not matter, and
  // 0 * NaN is NaN. Each consumer does all of it, so that none has to wait for the others.
  template <int rows, int width>
  static CF_DEVICE void zero_rows(SmemAddress tile, int first, int last) {
    constexpr int chunks = PANEL_ROW_BYTES / 16;
    const int t = int(threadIdx.x) % 128;
#pragma unroll 1
    for (int r = first + t / chunks; r < last; r += 128 / chunks) {
#pragma unroll
      for (int panel = 0; panel < ceil_div(width, PANEL); ++panel) {
        ptx::store_zeros(tile + (panel * rows + r) * PANEL_ROW_BYTES + t % chunks * 16);
      }
    }
  }
  CF_DEVICE void meet() const {
    ptx::fence_async_reads("zeros_fenced");             // for the products
    ptx::named_barrier_wait(2 + group, 128, "zeros_written");  // by all of the consumer
  }
  // Keys that no row sees, if the array has them.
  CF_DEVICE void forget_keys(const KeyWork& w) const {
    if (w.seen_first == 0 && w.seen_end == w.keys) return;
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
      const int first = side == 0 ? 0 : w.seen_end, last = side == 0 ? w.seen_first : w.keys;
      zero_rows<Bc, d>(tiles.K(), first, last);
      zero_rows<Bc, d_v>(tiles.V(), first, last);
    }
    meet();
  }
  // Before the products of a tile of which some row does not see some key: finds who sees what, and
  // zeroes rows that see none of the keys.
  CF_DEVICE void open_some(const KeyWork& w, int tile) const {
    const int begin = w.first - tile * Br, end = w.end - tile * Br;
    const int r = int(threadIdx.x) % 128;
    if (r < Br) {
      const int query = int(uint32(tile * Br + r) / uint32(p.group));
      const bool real = r >= begin && r < end;
      tiles.ranges(group)[r] = {real ? query + w.left - w.key0 : 0,
                                real ? min(query + w.right, w.kv_len) - w.key0 : 0};
    }
    if (begin > 0 || end < Br) {
      tiles.dout().wait(place, "dout_full");
#pragma unroll 1
      for (int side = 0; side < 2; ++side) {
        const int first = side == 0 ? 0 : max(end, 0), last = side == 0 ? begin : Br;
        zero_rows<Br, d>(tiles.Q(place.stage()), first, last);
        zero_rows<Br, d_v>(tiles.dO(place.stage()), first, last);
      }
    }
    meet();
  }

  static CF_DEVICE void round(Operand& to, const Scores& x) {
#pragma unroll
    for (int i = 0; i < Br / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) to[i][j] = ptx::pack<T>(x[8 * i + 2 * j], x[8 * i + 2 * j + 1]);
    }
    ptx::settle(to);
  }

  CF_DEVICE void find_exponents(Scores& S, float scale) const {
    subtract_lse<1, Br / 16>(S, scale, tiles.state(place.stage()) + own_row());
  }
  static CF_DEVICE void exponentiate(Scores& S) { cf::exponentiate<Config, 1, Br / 16>(S); }
  CF_DEVICE void differentiate(Scores& dP, const Scores& P) const {
    cf::differentiate<1, Br / 16>(dP, P, tiles.state(place.stage()) + Br + own_row());
  }
  // dQ [64, 64] = dS K over all keys of the block, in a group that is left open.
  static CF_DEVICE void multiply_keys(float (&dQ)[32], const ptx::UniformDescriptor& scores,
                                      const ptx::UniformDescriptor& keys) {
#pragma unroll
    for (int i = 0; i < (wants<Config>(DQ) ? Bc / 16 : 0); ++i) {
      const int bytes = i * 16 * PANEL_ROW_BYTES;
      ptx::multiply_columns(T(), dQ, scores.at(bytes), keys.at(bytes), i > 0);
    }
  }
  // And to the sums, in the fragments of `dq_offset`, of which those of 16 columns are neighbours.
  static CF_DEVICE void add_to_sums(uint64 sums, const float (&dQ)[32]) {
#pragma unroll
    for (int j = 0; j < (wants<Config>(DQ) ? 8 : 0); ++j) {
      ptx::add_to_global(sums + dq_offset<Config>(0, j / 2, j % 2, 0), dQ[4 * j], dQ[4 * j + 1],
                         dQ[4 * j + 2], dQ[4 * j + 3]);
    }
  }
};

}  // namespace cf

// The producer of the backward kernels for sm_90a: one thread that has tiles loaded.
#pragma once

#include "backward_work.cuh"
#include "ring.cuh"

namespace cf {

// The producer: K and V, then dO, with lse and delta, and Q of each tile of rows, in the order in
// which places become free.
template <typename Config, typename Tiles>
struct BackwardProducer {
  using Traits = typename Tiles::Traits;
  const BackwardSm90Params& p;
  const Tiles& tiles;

  template <int columns, int rows>
  static CF_DEVICE void load_panels(SmemAddress tile, const TensorMap& map, SmemAddress full,
                                    int c1, int c2, int c3) {
#pragma unroll
    for (int i = 0; i < ceil_div(columns, PANEL); ++i) {
      ptx::load_box(tile + i * rows * PANEL_ROW_BYTES, map, full, i * PANEL, c1, c2, c3);
    }
  }

  CF_DEVICE void run() const {
    const KeyWork& w = *tiles.work;
    const SmemAddress keys_full = tiles.keys_full();
    ptx::barrier_expect(keys_full, Traits::k_bytes + Traits::v_bytes);
    load_panels<Config::d, Config::Bc>(tiles.K(), p.k_map, keys_full, w.key0, w.head_k, w.b);
    load_panels<Config::d_v, Config::Bc>(tiles.V(), p.v_map, keys_full, w.key0, w.head_k, w.b);
    const int group = int(p.group), end = ceil_div(w.end, Config::Br);
    const int head = w.head_k * group, step = Config::Br / group;
    Place<Traits::stages> place;
    for (int tile = w.first / Config::Br; tile < end; ++tile, ++place.count) {
      const int stage = place.stage();
      const SmemAddress q_full = tiles.q().full(stage), dout_full = tiles.dout().full(stage);
      tiles.dout().claim(place, "dout_empty");
      ptx::barrier_expect(dout_full, Traits::dout_bytes + Traits::state_bytes);
      ptx::load_bytes(ptx::smem_address(tiles.state(stage)),
                      w.state + int64(tile) * Traits::state_bytes, Traits::state_bytes, dout_full);
      load_panels<Config::d_v, Config::Br>(tiles.dO(stage), p.dout_map, dout_full, head,
                                           tile * step, w.b);
      tiles.q().claim(place, "q_empty");
      ptx::barrier_expect(q_full, Traits::q_bytes);
      load_panels<Config::d, Config::Br>(tiles.Q(stage), p.q_map, q_full, head, tile * step, w.b);
    }
  }
};

}  // namespace cf

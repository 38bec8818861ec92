// The producer of the forward kernel: one thread that finds work and has the TMA unit load tiles.
#pragma once

#include "tiles.cuh"

namespace cf {

template <typename Config>
struct Producer {
  using Traits = ForwardSm90Traits<Config>;
  static constexpr bool ONE_Q = Traits::q_stages == 1;
  const ForwardSm90Params& p;
  const ForwardSm90Tiles<Config>& tiles;
  Place<WORKS> work_place;             // of the next work
  Place<Traits::stages> place;         // of the next K; the next V is one tile behind

  // fetch: into the L2 cache only.
  template <int columns, int rows>
  static CF_DEVICE void load_panels(SmemAddress tile, const TensorMap& map, SmemAddress full,
                                    int c1, int c2, int c3, bool fetch = false) {
#pragma unroll
    for (int i = 0; i < ceil_div(columns, PANEL); ++i) {
      if (fetch) {
        ptx::fetch_box(map, i * PANEL, c1, c2, c3);
      } else {
        ptx::load_box(tile + i * rows * PANEL_ROW_BYTES, map, full, i * PANEL, c1, c2, c3);
      }
    }
  }
  // Each consumer's rows by themselves: they become free and are needed at different times.
  CF_DEVICE void load_Q(const Work& w) {
    const Place<Traits::q_stages> q_place = {work_place.count};
    const int query = w.query(0, p.pack), step = 64 / p.pack;
    const int stage = q_place.stage();
    for (int group = 0; group < Traits::groups; ++group) {
      const SmemAddress full = tiles.q(group).full(stage);
      tiles.q(group).claim(q_place, "q_empty");
      ptx::barrier_expect(full, Traits::q_bytes);
      load_panels<Config::d, 64>(tiles.Q(stage, group), p.q_map, full, w.head,
                                 query + group * step, w.b);
    }
  }
  CF_DEVICE void load_K(int head_k, int b, int key0) {
    const int stage = place.stage();
    tiles.k().claim(place, "k_empty");
    ptx::barrier_expect(tiles.k().full(stage), Traits::k_bytes);
    load_panels<Config::d, Config::Bc>(tiles.K(stage), p.k_map, tiles.k().full(stage), key0,
                                       head_k, b);
  }
  CF_DEVICE void load_V(int head_k, int b, int key0) {
    const Place<Traits::stages> before = place.before();
    const int stage = before.stage();
    tiles.v().claim(before, "v_empty");
    ptx::barrier_expect(tiles.v().full(stage), Traits::v_bytes);
    load_panels<Config::d_v, Config::Bc>(tiles.V(stage), p.v_map, tiles.v().full(stage), key0,
                                         head_k, b);
  }
  // What the next work needs first may be far away. It is asked for late, behind the last keys of
  // the work before: what the L2 cache fetches is not loaded for the consumers meanwhile.
  CF_DEVICE void fetch_ahead(const Work& w) const {
    if (w.b < 0) return;
    load_panels<Config::d, Config::Bc>(0, p.k_map, 0, w.last_tile, w.head_k, w.b, true);
    if (!ONE_Q) return;
    const int query = w.query(0, p.pack), step = 64 / p.pack;
    for (int group = 0; group < Traits::groups; ++group) {
      load_panels<Config::d, 64>(0, p.q_map, 0, w.head, query + group * step, w.b, true);
    }
  }

  // Finds the next work with keys, and hands it to the consumers.
  CF_DEVICE void publish(Turns<Config>& turns, Place<WORKS> at) const {
    tiles.work().claim(at, "work_empty");
    Work& w = tiles.works[at.stage()];
    w.b = -1;
    while (turns.next()) {
      turns.open(w);
      if (!w.empty()) break;
      w.b = -1;
    }
    ptx::barrier_arrive(tiles.work().full(at.stage()));
  }

  // In the order in which tiles are needed and places become free: V after the next tile's K, also
  // where that belongs to the next work; the next work's Q in advance, where it has a place. A work
  // is published one work ahead, behind the first tiles of the one before.
  CF_DEVICE void run() {
    Turns<Config> turns(p);
    Place<WORKS> next;
    bool first = true;
    int key0 = -1, first_tile = 0;                      // of a work that has been loaded
    int head_k = 0, b = 0, values = -1;                 // of the V that is still to be loaded
    while (true) {
      if (first) publish(turns, next);
      first = key0 < first_tile;
      if (first) {
        work_place = next;
        ++next.count;
      }
      const Work& w = tiles.works[work_place.stage()];
      if (w.b < 0) break;
      if (first) {
        key0 = w.last_tile;
        first_tile = w.first_tile;
        if (!ONE_Q) load_Q(w);
      }
      load_K(w.head_k, w.b, key0);
      if (values >= 0) load_V(head_k, b, values);
      if (first && ONE_Q) load_Q(w);
      if (!first && key0 == first_tile) fetch_ahead(tiles.works[next.stage()]);
      head_k = w.head_k;
      b = w.b;
      values = key0;
      key0 -= Config::Bc;
      ++place.count;
    }
    if (values >= 0) load_V(head_k, b, values);
  }
};

}  // namespace cf

// A consumer of the forward kernel: a warpgroup that works on 64 of the rows.
//
// A step of the inner loop computes the scores of one key tile while it adds up the values of the
// tile before: S = Q K_i^T and acc += P V_(i-1) are started together, and the second runs beside
// the softmax of the first. The first step of a work runs beside the last addition of the work
// before, so that the tensor cores do not wait where one ends.
// Shah et al., "FlashAttention-3" (2024), algorithms 1 and 2.
#pragma once

#include "store.cuh"
#include "tiles.cuh"

namespace cf {

// A step: the scores of one key tile.
struct Step {
  int key0;                            // where it begins
  bool changes, last, hides;           // whether its work is a new one; whether it is the work's
};                                     // last; whether keys are hidden from rows

template <typename Config>
struct Consumer {
  using Traits = HopperForwardTraits<Config>;
  using T = typename Config::element;
  const HopperForwardParams& p;
  const HopperForwardTiles<Config>& tiles;
  const int group;                     // which consumer this is
  Place<WORKS> work_place;             // of the work whose values are added up
  Place<WORKS> current;                // of the work whose scores are computed
  Place<STAGES> place;                 // of the next K; the next V is one tile behind
  float S[Config::Bc / 2];             // [64, Bc]
  uint32 P[Config::Bc / 16][4];        // [64, Bc], as operands
  float acc[Config::d_v / 2];          // [64, d_v]
  RowState state;

  CF_DEVICE Consumer(const HopperForwardParams& p_, const HopperForwardTiles<Config>& tiles_,
                     int group_)
      : p(p_), tiles(tiles_), group(group_) {}

  // The first of the thread's two rows in the tile; the other is 8 below.
  CF_DEVICE int row() const {
    return 64 * group + int(threadIdx.x) % 128 / 32 * 16 + int(threadIdx.x) % 32 / 4;
  }
  CF_DEVICE const Work& work_at(Place<WORKS> at) const { return tiles.works[at.stage()]; }
  CF_DEVICE Place<Traits::q_stages> q_place(Place<WORKS> at) const { return {at.count}; }

  CF_DEVICE ptx::Descriptor Q_at(int stage) const {
    return ptx::Descriptor(tiles.Q(stage, group), 64);
  }
  CF_DEVICE ptx::Descriptor K_at(int stage) const {
    return ptx::Descriptor(tiles.K(stage), Config::Bc);
  }
  CF_DEVICE ptx::Descriptor V_at(int stage) const {
    return ptx::Descriptor(tiles.V(stage), Config::Bc);
  }

  CF_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < Config::d_v / 2; ++i) acc[i] = 0.f;
    // Or ptxas moves the zeros between running products, and makes those wait.
    ptx::settle(acc);
  }

  // Starts S = Q K^T.
  CF_DEVICE void start_scores(const ptx::Descriptor& q, const ptx::Descriptor& k) {
#pragma unroll
    for (int i = 0; i < Config::d / 16; ++i) {
      const int panel = i / 4, inside = i % 4 * 32;
      ptx::Wgmma<T, Config::Bc>::rows(S, q.at(panel * 64 * PANEL_ROW_BYTES + inside),
                                      k.at(panel * Config::Bc * PANEL_ROW_BYTES + inside), i > 0);
    }
    ptx::products_commit();
  }

  // Starts acc += P V.
  CF_DEVICE void start_values(const ptx::Descriptor& v) {
#pragma unroll
    for (int i = 0; i < Config::Bc / 16; ++i) {
      ptx::Wgmma<T, Config::d_v>::columns(acc, P[i], v.at(i * 16 * PANEL_ROW_BYTES), 1);
    }
    ptx::products_commit();
  }

  // After the wait for S: K is free, and after a work's last key tile Q.
  CF_DEVICE void release_keys(bool last) {
    ptx::settle(S);
    tiles.k().release(place);
    if (last) tiles.q(group).release(q_place(current));
  }

  CF_DEVICE void round_P() {
#pragma unroll
    for (int i = 0; i < Config::Bc / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) P[i][j] = ptx::pack<T>(S[8 * i + 2 * j], S[8 * i + 2 * j + 1]);
    }
  }

  CF_DEVICE void scale(const float (&alpha)[2]) {
#pragma unroll
    for (int i = 0; i < Config::d_v / 2; ++i) acc[i] *= alpha[row_of(i)];
  }

  // S: q.k -> scores of the keys of a tile.
  CF_DEVICE void score(const Work& w, int key0, bool hides) {
    const int column0 = key0 + 2 * (int(threadIdx.x) % 4);
    if constexpr (Config::features) finish_scores(S, p, w, row(), column0);
    if (hides) hide(w, column0);
  }
  CF_DEVICE void hide(const Work& w, int column0) {
    KeyRange visible[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = w.query(row() + 8 * r, p.pack);
      visible[r] = {w.first_key(query), w.end_key(query)};
    }
    hide_keys(S, visible, column0);
  }

  // Zeroes the rows of the key tile's V that no row of the work sees, if there are such rows in
  // the array: whatever they hold must not matter, and 0 * NaN is NaN. Each consumer does all of
  // it, so that none has to wait for the others.
  CF_DEVICE void forget_values(const Work& w, int key0) const {
    const int begin = w.first - key0, end = w.end - key0;
    if (begin <= 0 && (end >= Config::Bc || w.end >= int(p.Nk))) return;
    tiles.v().wait(place.before(), "v_full");
    constexpr int chunks = PANEL_ROW_BYTES / 16;
    for (int i = int(threadIdx.x) % 128; i < Traits::v_bytes / 16; i += 128) {
      const int key = i / chunks % Config::Bc;
      if (key < begin || key >= end) ptx::store_zeros(tiles.V(place.before().stage()) + 16 * i);
    }
    ptx::fence_async_reads();
    ptx::named_barrier_wait(4 + group, 128);
  }

  CF_DEVICE void await_turn() const {
    if (Traits::takes_turns) ptx::named_barrier_wait(1 + group, 256);
  }
  CF_DEVICE void pass_turn() const {
    const int next = group + 1 == Traits::groups ? 0 : group + 1;
    if (Traits::takes_turns) ptx::named_barrier_arrive(1 + next, 256);
  }

  // Starts S of a key tile and acc += P V of the one before. All that can be done before the turn
  // comes is done before, for the other consumers wait for its end.
  // ends: acc is that of a work without further values, which is stored beside the product Q K^T.
  CF_DEVICE void start_step(const Step& step, bool ends, const float (&factor)[2]) {
    const bool K_full = ptx::barrier_try(tiles.k().full(place.stage()), place.parity());
    const bool V_full = ptx::barrier_try(tiles.v().full(place.before().stage()),
                                         place.before().parity());
    const ptx::Descriptor q = Q_at(q_place(current).stage()), k = K_at(place.stage());
    const ptx::Descriptor v = V_at(place.before().stage());
    round_P();
    ptx::settle(P);
    if (step.changes) tiles.q(group).wait(q_place(current), "q_full");
    if (!K_full) tiles.k().wait(place, "k_full");
    if (!V_full) tiles.v().wait(place.before(), "v_full");
    await_turn();
    ptx::products_begin();
    start_scores(q, k);
    if (Traits::stores_late) {
      if (ends) {
        pass_turn();
        store(factor);
      }
      ptx::products_begin();                            // acc has been written, perhaps
    }
    start_values(v);
    if (!ends) pass_turn();
  }

  // The step behind the one at key0; false if there is none. Called beside the products.
  CF_DEVICE bool find_next(int key0, Step& next) const {
    Place<WORKS> at = current;
    next.key0 = key0 - Config::Bc;
    next.changes = next.key0 < work_at(at).first_tile;
    if (next.changes) {
      ++at.count;
      tiles.work().wait(at, "work_full");
      __syncwarp();                                     // products are waited for in step
      if (work_at(at).b < 0) return false;
      next.key0 = work_at(at).last_tile;
    }
    next.last = next.key0 == work_at(at).first_tile;
    next.hides = work_at(at).hides(next.key0);
    return true;
  }

  // Waits for acc. Left to itself, ptxas moves the wait up, before the exponentials that are to run
  // beside the products, or those down behind it. A loop that depends on their sum keeps both in
  // place; the sum is no negative number, so the loop ends at once.
  CF_DEVICE void finish_values() {
    ptx::settle(S);
    ptx::require_zero(ptx::sign_of(state.l[0]) | ptx::sign_of(state.l[1]));
    ptx::products_wait<0>();
    ptx::settle(acc);
    ptx::settle(P);
    tiles.v().release(place.before());
    ++place.count;
  }

  // Ends a work: its sums, while its last values are still being added up, and then its rows.
  CF_DEVICE void close(float (&factor)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = close_row(p, work_at(work_place), row() + 8 * r, r, state,
                            Config::features ? 1.f : float(p.scale));
    }
  }
  CF_DEVICE void store(const float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (Config::wide) {
        store_wide_row(p, work_at(work_place), row() + 8 * r, r, acc, factor[r]);
      } else {
        store_row<T>(p, work_at(work_place), row() + 8 * r, r, acc, factor[r]);
      }
    }
    __syncwarp();                                       // all lanes have read the work
    tiles.work().release(work_place);
    ++work_place.count;
    clear();
  }

  // The first step of the first work, if there is one, and what comes behind it.
  CF_DEVICE bool begin(Step& next, bool& more) {
    tiles.work().wait(current, "work_full");
    const Work& w = work_at(current);
    if (w.b < 0) return false;
    const int key0 = w.last_tile;
    tiles.q(group).wait(q_place(current), "q_full");
    tiles.k().wait(place, "k_full");
    ptx::products_begin();
    start_scores(Q_at(q_place(current).stage()), K_at(place.stage()));
    more = find_next(key0, next);
    ptx::products_wait<0>();
    release_keys(key0 == w.first_tile);
    ++place.count;
    float none[2];
    score(w, key0, w.hides(key0));
    softmax_step(S, state, none, true, p);
    if (w.hides(key0)) forget_values(w, key0);
    return true;
  }

  // All steps but the first. The first step of a work runs beside the last addition of the work
  // before; that is stored then, or beside the next step's product.
  CF_DEVICE void run() {
    Step next;
    bool more = false, ends = false;
    float factor[2] = {};    // of acc: alpha, or 1 / l where the work ends
    clear();
    if (!begin(next, more)) return;
    if (group == Traits::groups - 1) pass_turn();
    while (more) {
      const Step step = next;
      if (step.changes) ++current.count;
      start_step(step, ends, factor);
      more = find_next(step.key0, next);
      ptx::products_wait<1>();
      release_keys(step.last);
      // One branch around all that is rare: each one that is taken makes the fetch of code wait.
      const bool rare = step.hides || step.changes;
      if (Config::features || rare) {
        score(work_at(current), step.key0, step.hides);
        if (step.changes) {
          close(factor);
          state = RowState();
        }
      }
      const bool moved = softmax_step(S, state, factor, step.changes, p);
      finish_values();
      ends = Traits::stores_late && step.changes;
      if (rare || moved) {
        if (!step.changes && moved) scale(factor);
        if (!Traits::stores_late && step.changes) store(factor);
        if (step.hides) forget_values(work_at(current), step.key0);
      }
    }
    if (ends) store(factor);
    round_P();
    tiles.v().wait(place.before(), "v_full");
    ptx::products_begin();
    start_values(V_at(place.before().stage()));
    ptx::products_wait<0>();
    ptx::settle(acc);
    close(factor);
    store(factor);
  }
};

}  // namespace cf

// A consumer of the forward kernel: a warpgroup that works on 64 of the rows.
//
// A step computes the scores of one key tile while it adds up the values of the tile before:
// S = Q K_i^T and acc += P V_(i-1) are started together, and softmax follows. The first step of a
// work runs beside the last addition of the work before, so that the tensor cores do not wait where
// one ends. Most steps are plain: every row sees every key, and no reference has to move.
// Shah et al., "FlashAttention-3" (2024), algorithms 1 and 2.
#pragma once

#include "holes.cuh"
#include "store.cuh"

namespace cf {

template <typename Config>
struct Consumer {
  using Traits = ForwardSm90Traits<Config>;
  using T = typename Config::element;
  // The next Q is waited for: this one is released early, which plain steps cannot.
  static constexpr bool ONE_Q = Traits::q_stages == 1;
  const ForwardSm90Params& p;
  const ForwardSm90Tiles<Config>& tiles;
  const int group;                     // which consumer this is
  Place<WORKS> work_place;             // of the work whose values are added up
  Place<WORKS> current;                // of the work whose scores are computed
  Place<Traits::stages> place;         // of the next K; the next V is one tile behind
  float S[Config::Bc / 2];             // [64, Bc]
  uint32 P[Config::Bc / 16][4];        // [64, Bc], as operands
  float acc[Config::d_v / 2];          // [64, d_v]
  RowState state;

  CF_DEVICE Consumer(const ForwardSm90Params& p_, const ForwardSm90Tiles<Config>& tiles_,
                     int group_)
      : p(p_), tiles(tiles_), group(group_) {}

  // The first of the thread's two rows in the tile; the other is 8 below.
  CF_DEVICE int row() const {
    return 64 * group + int(threadIdx.x) % 128 / 32 * 16 + int(threadIdx.x) % 32 / 4;
  }
  CF_DEVICE const Work& work_at(Place<WORKS> at) const { return tiles.works[at.stage()]; }
  CF_DEVICE Place<Traits::q_stages> q_place(Place<WORKS> at) const { return {at.count}; }

  // Of Q, and of the first K and V in shared memory.
  CF_DEVICE ptx::Descriptor Q() const {
    return ptx::Descriptor(tiles.Q(q_place(current).stage(), group), 64);
  }
  CF_DEVICE ptx::Descriptor K() const { return ptx::Descriptor(tiles.K(0), Config::Bc); }
  CF_DEVICE ptx::Descriptor V() const { return ptx::Descriptor(tiles.V(0), Config::Bc); }

  // Starts S = Q K^T and, in a group of its own, acc += P V.
  CF_DEVICE void start_scores(const ptx::Descriptor& q, const ptx::Descriptor& k) {
    const int tile = place.stage() * Traits::k_bytes;
#pragma unroll
    for (int i = 0; i < Config::d / 16; ++i) {
      const int panel = i / 4, inside = i % 4 * 32;
      ptx::Wgmma<T, Config::Bc>::rows(S, q.at(panel * 64 * PANEL_ROW_BYTES + inside),
                                      k.at(tile + panel * Config::Bc * PANEL_ROW_BYTES + inside),
                                      i > 0);
    }
    ptx::products_commit();
  }
  CF_DEVICE void start_values(const ptx::Descriptor& v) {
    const int tile = place.before().stage() * Traits::v_bytes;
#pragma unroll
    for (int i = 0; i < Config::Bc / 16; ++i) {
      ptx::Wgmma<T, Config::d_v>::columns(acc, P[i], v.at(tile + i * 16 * PANEL_ROW_BYTES), 1);
    }
    ptx::products_commit();
  }

  CF_DEVICE void await_turn() const {
    if (Traits::takes_turns) ptx::named_barrier_wait(1 + group, 256, "turn");
  }
  CF_DEVICE void pass_turn() const {
    const int next = group + 1 == Traits::groups ? 0 : group + 1;
    if (Traits::takes_turns) ptx::named_barrier_arrive(1 + next, 256);
  }

  // The products of a step. again: the consumer has had its turn.
  CF_DEVICE void start(const ptx::Descriptor& q, const ptx::Descriptor& k, const ptx::Descriptor& v,
                       bool again) {
    if (!again) await_turn();
    ptx::products_begin();
    start_scores(q, k);
    start_values(v);
    if (!again) pass_turn();
  }

  CF_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < Config::d_v / 2; ++i) acc[i] = 0.f;
    // Or ptxas moves the zeros between running products, and makes those wait.
    ptx::settle(acc);
  }
  CF_DEVICE void scale(const float (&alpha)[2]) {
#pragma unroll
    for (int i = 0; i < Config::d_v / 2; ++i) acc[i] *= alpha[row_of(i)];
  }
  CF_DEVICE void round_P() {
#pragma unroll
    for (int i = 0; i < Config::Bc / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) P[i][j] = ptx::pack<T>(S[8 * i + 2 * j], S[8 * i + 2 * j + 1]);
    }
    ptx::settle(P);
  }
  CF_DEVICE void clear_P() {
#pragma unroll
    for (int i = 0; i < Config::Bc / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) P[i][j] = 0;
    }
    ptx::settle(P);
  }

  // Waits for acc.
  CF_DEVICE void wait_for_values() {
    ptx::settle(S);
    ptx::products_wait<0>();
    ptx::settle(acc);
    ptx::settle(P);
  }

  // Whether the warp's rows see nothing of the second half of a tile that hides keys.
  CF_DEVICE bool sees_half(const Work& w, int key0) const {
    if (!Traits::halves) return false;
    const int last = 64 * group + int(threadIdx.x) % 128 / 32 * 16 + 15;
    return ptx::uniform(w.end_key(w.query(last, p.pack)) <= key0 + Config::Bc / 2);
  }
  // S = -inf where a row does not see a key.
  CF_DEVICE void hide(const Work& w, int column0) {
    KeyRange visible[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = w.query(row() + 8 * r, p.pack);
      visible[r] = {w.first_key(query), w.end_key(query)};
    }
    hide_keys(S, QueriesAsRows<float, KeyRange, 1, Config::Bc / 16, 1>{visible, column0},
              -inf<float>());
  }
  // q.k -> scores. In bias and mask the thread's rows have all keys, but none where they are not
  // real.
  CF_DEVICE void finish(const Work& w, int column0) {
    ScoreRow<float> rows[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = row() + 8 * i;
      const int64 head = w.head_of(r, p.pack), query = w.query(r, p.pack);
      const auto address = [&](const Tensor& t) {
        return head_address(t, w.b, head) + query * t.n;
      };
      rows[i].end = r < w.rows ? w.kv_len : 0;
      rows[i].position = query + w.offset;
      if constexpr (has<Config>(ALIBI)) {
        rows[i].slope = load<float>(head_address(p.slopes, w.b, head), p.slopes.kind);
      }
      if constexpr (has<Config>(BIAS)) rows[i].bias = address(p.bias);
      if constexpr (has<Config>(MASK)) rows[i].mask = address(p.mask);
    }
    // Tiles of fewer than 128 keys go with wide accumulators, which leave few registers.
    constexpr int loads = Config::Bc < 128 ? 8 : 16;
    const QueriesAsRows<float, ScoreRow<float>, 1, Config::Bc / 16, loads> view = {rows, column0};
    finish_scores<Config>(S, view, p, Scaling<float>{p.qk_scale, p.cap, p.per_cap},
                          [](int, float) {});
  }

  // Zeroes those of the keys first ... last - 1 of the key tile's V that no row of the work sees:
  // whatever they hold must not matter, and 0 * NaN is NaN. Each consumer does all of it, so that
  // none has to wait for the others: zeros meet zeros there, which a checker of races may report.
  template <typename Hidden>
  CF_DEVICE void zero_values(int first, int last, const Hidden& hidden) const {
    tiles.v().wait(place.before(), "v_full");
    constexpr int chunks = PANEL_ROW_BYTES / 16;
    const int t = int(threadIdx.x) % 128;
    const SmemAddress V = tiles.V(place.before().stage()) + t % chunks * 16;
#pragma unroll 1
    for (int key = first + t / chunks; key < last; key += 128 / chunks) {
      if (!hidden(key)) continue;
#pragma unroll
      for (int panel = 0; panel < ceil_div(Config::d_v, PANEL); ++panel) {
        ptx::store_zeros(V + (panel * Config::Bc + key) * PANEL_ROW_BYTES);
      }
    }
    ptx::fence_async_reads("zeros_fenced");
    ptx::named_barrier_wait(4 + group, 128, "zeros_written");
  }
  // Keys that ranges hide, if the array has them. They lie on one side of the tile, but for a work
  // of few keys.
  CF_DEVICE void forget_values(const Work& w, int key0) const {
    const int begin = w.first - key0, end = w.end - key0;
    if (begin <= 0 && (end >= Config::Bc || w.end >= int(p.Nk))) return;
    zero_values(begin > 0 ? 0 : end, end < Config::Bc ? Config::Bc : begin,
                [=](int key) { return key < begin || key >= end; });
  }
  // The same where arrays hide keys, of which the consumers have to tell each other. seen: of the
  // warp's rows.
  CF_DEVICE void forget_unseen_values(uint32 seen) const {
    constexpr int threads = 128 * Traits::groups;
    constexpr uint32 all = 0xFFFFFFFF >> (32 - Config::Bc / 4);
    if (!ptx::named_barrier_any(7, threads, seen != all, "some_unseen")) return;
    // All have read what the step before left there.
    const int lane = int(threadIdx.x) % 32;
    if (lane < 4) tiles.seen[4 * (int(threadIdx.x) / 32 - 4) + lane] = seen;
    ptx::named_barrier_wait(7, threads, "seen_written");
    const SeenColumns<4 * Traits::groups> any(tiles.seen);
    zero_values(0, Config::Bc, [&](int key) { return !any.has(key); });
  }

  // Ends a work: its sums, while its last values are still being added up, and then its rows.
  CF_DEVICE void close(float (&factor)[2]) const {
    close_rows<Config>(p, work_at(work_place), row(), state, Config::scaled ? 1.f : p.qk_scale,
                       factor);
  }
  CF_DEVICE void store(const float (&factor)[2]) {
    if constexpr (Traits::tiled) {
      store_panels(p, tiles, work_at(work_place), group, acc, factor);
    } else {
      using O = typename ResultOf<T, Config::wide>::type;
      store_rows<O, Config::narrow < 2>(p, work_at(work_place), row(), acc, factor);
    }
    ptx::sync_warp("work_read");                        // by all lanes
    tiles.work().release(work_place);
    ++work_place.count;
  }

  // Any step; first: of its work; again: in place of a plain one that could not be ended.
  // lazy: how far scores may pass the reference of a row.
  CF_DEVICE void step(const Work& w, int key0, bool first, bool again, const float (&lazy)[2]) {
    const bool ends = first && work_place.count != current.count;   // the work before
    const int column0 = key0 + 2 * (int(threadIdx.x) % 4);
    if (first) tiles.q(group).wait(q_place(current), "q_full");
    tiles.k().wait(place, "k_full");
    // With the block's first K there is no V, but whatever lies there: acc is cleared afterwards.
    const bool has_V = place.count != 0;
    if (has_V) tiles.v().wait(place.before(), "v_full");
    start(Q(), K(), V(), again);
    float factor[2];         // of acc: alpha, or 1 / l where a work ends
    if (ends) close(factor);
    if (first) state = RowState();
    ptx::products_wait<1>();
    ptx::settle(S);
    tiles.k().release(place);
    if (ONE_Q && key0 == w.first_tile) tiles.q(group).release(q_place(current));
    if constexpr (Config::scaled) finish(w, column0);
    const bool hides = w.hides(key0);
    const bool half = hides && sees_half(w, key0);
    if (hides) hide(w, column0);
    uint32 seen = 0;
    if constexpr (hides_any<Config>()) seen = seen_columns(S, w, row());
    const bool moved = softmax_step(S, state, factor, first, half, lazy, p);
    // Left to itself, ptxas moves the wait up, before the exponentials that are to run beside the
    // products, or those down behind it. A loop that depends on their sum keeps both in place; the
    // sum is no negative number, so the loop ends at once.
    ptx::settle(S);
    ptx::require_zero(ptx::sign_of(state.l[0]) | ptx::sign_of(state.l[1]));
    wait_for_values();
    if (has_V) tiles.v().release(place.before());
    ++place.count;
    if (ends) store(factor);
    if (first) {
      clear();
    } else if (moved) {
      scale(factor);
    }
    if constexpr (hides_any<Config>()) {
      forget_unseen_values(seen);
    } else if (hides) {
      forget_values(w, key0);
    }
    round_P();
  }

  // Up to `count` plain steps, from key0 on; returns how many could be ended. The one that could
  // not be leaves all as it was before it, except that its values have been added up, and P is 0.
  // The whole consumer turns back then, but only the rows that made it do so move: lazy.
  CF_DEVICE int plain_steps(const Work& w, int key0, int count, float (&lazy)[2]) {
    count = ptx::uniform(count);
    place.count = ptx::uniform(place.count);
    const ptx::Descriptor q = Q(), k = K(), v = V();
    if (count <= 0) return 0;
    bool has_K = false, has_V = false;
#pragma unroll 1
    for (int i = 0;; ++i) {
      if (!has_K) tiles.k().wait(place, "k_full");
      if (!has_V) tiles.v().wait(place.before(), "v_full");
      start(q, k, v, false);
      ptx::products_wait<1>();
      ptx::settle(S);
      if constexpr (Config::scaled) {
        finish(w, key0 - i * Config::Bc + 2 * (int(threadIdx.x) % 4));
      }
      float sum[2];
      exponentials(S, false, state.m_ref, p.unit, sum);
      // The wait stays behind the barrier. The vote tells the compiler that lanes do not part here.
      bool passed = sum[0] > p.most || sum[1] > p.most;
      passed = ptx::named_barrier_any(4 + group, 128, passed, "some_passed");
      passed = __any_sync(0xFFFFFFFF, passed);
      wait_for_values();
      if (passed) {
        clear_P();
#pragma unroll
        for (int r = 0; r < 2; ++r) lazy[r] = row_max(sum[r]) > p.most ? 0.f : -LOWEST;
        return i;
      }
      tiles.k().release(place);
      tiles.v().release(place.before());
      ++place.count;
      // Asked early, for the answers take a while.
      has_K = tiles.k().has(place);
      has_V = tiles.v().has(place.before());
#pragma unroll
      for (int r = 0; r < 2; ++r) state.l[r] += sum[r];
      round_P();
      if (i + 1 == count) return count;
    }
  }

  // All key tiles of a work.
  CF_DEVICE void run(const Work& w) {
    const int lowest = max(w.full, w.first_tile + (ONE_Q ? Config::Bc : 0));
    int key0 = w.last_tile;
    bool again = false;
    float lazy[2] = {p.lazy_2, p.lazy_2};
    while (true) {
      step(w, key0, key0 == w.last_tile, again, lazy);
      lazy[0] = lazy[1] = p.lazy_2;
      key0 -= Config::Bc;
      if constexpr (!hides_any<Config>()) {
        const int plain = key0 < w.full_end ? max((key0 - lowest) / Config::Bc + 1, 0) : 0;
        const int done = plain_steps(w, key0, plain, lazy);
        key0 -= done * Config::Bc;
        again = done < plain;
      }
      if (key0 < w.first_tile) break;
    }
    if (!ONE_Q) tiles.q(group).release(q_place(current));
  }

  CF_DEVICE void run() {
    clear();
    clear_P();
    if (group == Traits::groups - 1) pass_turn();
    while (true) {
      tiles.work().wait(current, "work_full");
      const Work& w = work_at(current);
      if (w.b < 0) break;
      run(w);
      ++current.count;
    }
    if (current.count == 0) return;
    const ptx::Descriptor v = V();
    tiles.v().wait(place.before(), "v_full");
    ptx::products_begin();
    start_values(v);
    ptx::products_wait<0>();
    ptx::settle(acc);
    float factor[2];
    close(factor);
    store(factor);
    // Shared memory goes with the block.
    if constexpr (Traits::tiled) ptx::stores_read<0>("last_panels_read");
  }
};

}  // namespace cf

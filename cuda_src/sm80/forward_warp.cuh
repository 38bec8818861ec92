// One warp of the kernel `forward_sm80`: its rows of S, P and acc stay in its registers.
#pragma once

#include "copy.cuh"
#include "../attention/score.cuh"
#include "../attention/unseen.cuh"
#include "online.cuh"
#include "store.cuh"

namespace cf {

// With `pairs` two warps share their rows: each has the scores of half the keys and the sums of
// half the columns, and hands its P over through shared memory. An accumulator for wide heads then
// leaves room for twice the rows, and each fragment of K and V feeds two products. Of a single
// fragment of keys one of the two has the scores (`one_scores`).
// With `split_Q` the block splits Q for 3xTF32 once, as K and V always are; without it each warp
// splits what it reads, tile after tile, for want of shared memory.
template <typename Config>
CF_HOST_DEVICE constexpr bool one_scores() {
  return Config::pairs && Config::Bc < 32;
}
// Warps of a pair that have scores.
template <typename Config>
CF_HOST_DEVICE constexpr int key_parts() {
  return Config::pairs && !one_scores<Config>() ? 2 : 1;
}
// Whether P of all keys of a tile is read from shared memory, by both parts.
template <typename Config>
CF_HOST_DEVICE constexpr bool shares_P() {
  return Config::pairs && fresh_sums<Config>();
}

template <typename Config>
struct ForwardSm80Traits {
  using T = typename Config::element;
  static constexpr int threads = 32 * Config::warps, parts = Config::pairs ? 2 : 1;
  static constexpr int rows = Config::Br / Config::warps * parts;        // of a warp
  static constexpr int fragments = rows / 16, keys = Config::Bc / 16 / key_parts<Config>();
  static constexpr int columns = Config::d_v / 16 / parts;
  static constexpr int pitch = rows_pitch<T>(Config::d), pitch_v = depth_pitch<T>(Config::d_v);
  static constexpr int pitch_Q = rows_pitch<T>(max(Config::d, Config::d_v));   // Q, and then out
  static constexpr int pitch_P = rows_pitch<T>(Config::Bc);
  static constexpr int bytes_P = parts == 1 ? 0 : Config::Br * pitch_P * int(sizeof(T));
  static constexpr int bytes_rows =
      parts == 1 ? 0 : parts * Config::Br * int(sizeof(accumulator<T>));
  static constexpr int rests = rest_rows<Config>(Config::Bc), rows_K = Config::Bc + rests;
  static constexpr int rests_Q = Config::split_Q ? rest_rows<Config>(Config::Br) : 0;
  using Row = ScoreRow<accumulator<T>>;
  static constexpr int bytes_scores =
      changes_scores<Config>() ? Config::Br * int(sizeof(Row)) + 16 * Config::warps : 0;
  static constexpr int smem_bytes =
      ((Config::Br + rests_Q) * pitch_Q + rows_K * (pitch + pitch_v)) * int(sizeof(T)) + bytes_P
      + 2 * bytes_rows + bytes_scores;
  static_assert(Config::d % 16 == 0 && Config::d_v % (16 * parts) == 0,
                "d and d_v must be multiples of 16");
  static_assert(Config::Br * parts % (16 * Config::warps) == 0, "a warp must have whole fragments");
  static_assert(Config::Bc % (16 * key_parts<Config>()) == 0, "Bc must be a multiple of 16");
  static_assert(parts == 1 || Config::precision == 0, "float32 has no two parts");
};

// Shared memory of a block, and which part of it a warp reads.
template <typename Config>
struct ForwardSm80Tiles {
  using T = typename Config::element;
  using Traits = ForwardSm80Traits<Config>;
  T* Q;                // [Br, d], and out [Br, d_v]; if it is split, followed by its rests
  T* K;                // [Bc, d], in 3xTF32 followed by its rests
  T* V;                // [Bc, d_v], likewise
  T* P;                // [Br, Bc]; in two parts only, like what follows
  accumulator<T> *top, *l;     // [2, Br]: what a part's rows say of themselves to the other part's
  typename Traits::Row* rows;  // [Br], with options
  uint32* seen;        // [warps, 4], with options: see SeenColumns

  CF_DEVICE explicit ForwardSm80Tiles(unsigned char* memory) {
    Carver carver{memory};
    Q = carver.take<T>((Config::Br + Traits::rests_Q) * Traits::pitch_Q * int(sizeof(T)));
    K = carver.take<T>(Traits::rows_K * Traits::pitch * int(sizeof(T)));
    V = carver.take<T>(Traits::rows_K * Traits::pitch_v * int(sizeof(T)));
    P = carver.take<T>(Traits::bytes_P);
    top = carver.take<accumulator<T>>(Traits::bytes_rows);
    l = carver.take<accumulator<T>>(Traits::bytes_rows);
    rows = carver.take<typename Traits::Row>(Config::Br * int(sizeof(typename Traits::Row)));
    seen = carver.take<uint32>(16 * Config::warps);
  }
  static CF_DEVICE int part() { return warp_id() % Traits::parts; }
  static CF_DEVICE int row0() { return warp_id() / Traits::parts * Traits::rows; }
  // The other part of the next two pairs: warps 0, 2, 5 and 7, each on tensor cores of its own.
  static CF_DEVICE bool has_scores() {
    return !one_scores<Config>() || part() == warp_id() / 4 % 2;
  }
  static CF_DEVICE int key_part() { return one_scores<Config>() ? 0 : part(); }
  static CF_DEVICE int key0() { return key_part() * Traits::keys * 16; }
  static CF_DEVICE int column0() { return part() * Traits::columns * 16; }
};

// What a warp keeps while it walks the keys.
template <typename Config>
struct ForwardWarp {
  using F = Fragments<Config>;
  using T = typename F::T;
  using Traits = ForwardSm80Traits<Config>;
  static constexpr int fragments = Traits::fragments, keys = Traits::keys;
  static constexpr int columns = Traits::columns, depths = Config::d / F::depth;
  using S = typename F::C[fragments][keys];

  using Tiles = ForwardSm80Tiles<Config>;
  ReaderA<Config, Layout::row, Traits::pitch_Q, Order::paired, Traits::rests_Q> Q;
  ReaderB<Config, Layout::col, Traits::pitch, Order::paired, Traits::rests> K;
  ReaderB<Config, Layout::row, Traits::pitch_v, Order::paired, Traits::rests> V;
  typename F::A kept[fragments][Config::keep_Q ? depths : 1];
  typename F::C acc[fragments][columns];
  OnlineSoftmax<Config, fragments> softmax;

  CF_DEVICE ForwardWarp(const ForwardSm80Tiles<Config>& t, const Params& p)
      : Q(t.Q + t.row0() * Traits::pitch_Q),
        K(t.K + t.key0() * Traits::pitch),
        V(t.V + (shares_P<Config>() ? 0 : t.key0()) * Traits::pitch_v + t.column0()),
        acc{},
        softmax(p) {}

  CF_DEVICE void keep_Q() {
#pragma unroll
    for (int i = 0; i < fragments * depths; ++i) {
      kept[i / depths][i % depths] = Q.load_part(i / depths * 16, i % depths * F::depth);
    }
  }

  // scores = Q K^T. often: in the loop that must be fast; elsewhere wide types, whose products take
  // long, have short code, which is compiled sooner.
  template <bool often>
  CF_DEVICE void multiply_keys(S& scores) const {
    constexpr int piece = chain_depth<Config>() > 0 ? chain_depth<Config>() / F::depth : depths;
    constexpr int pieces = Config::precision == 2 ? 2 : depths;        // its code is long enough
    constexpr int products = often || sizeof(T) == 2 ? piece : 1;
    Sums<Config> sums[fragments][keys];
#pragma unroll pieces
    for (int k0 = 0; k0 < depths; k0 += piece) {
#pragma unroll products
      for (int x = 0; x < piece; ++x) {
        const int k = k0 + x;
        if (depths % piece != 0 && k >= depths) break;
        decltype(operand<Config>(kept[0][0])) a[fragments];
#pragma unroll
        for (int i = 0; i < fragments; ++i) {
          if constexpr (Config::keep_Q) {
            a[i] = operand<Config>(kept[i][k]);
          } else {
            a[i] = operand<Config>(Q.load(i * 16, k * F::depth));
          }
        }
#pragma unroll
        for (int j = 0; j < keys; ++j) {
          const auto b = operand<Config>(K.load(k * F::depth, j * 16));
#pragma unroll
          for (int i = 0; i < fragments; ++i) add_product(sums[i][j], a[i], b);
        }
      }
      add_large<Config>(scores, sums, k0 == 0);
    }
    add_small<Config>(scores, sums);
  }

  // Hides what a row does not see: keys behind its end and, if `first`, those before its first.
  template <bool first>
  static CF_DEVICE void hide(S& scores, const TileKeys& keys_of, const Rows& rows, int key0) {
    KeyRange ranges[2 * fragments];
#pragma unroll
    for (int i = 0; i < 2 * fragments; ++i) {
      ranges[i] = keys_of.of_row(rows, Tiles::row0() + i * 8 + lane_row());
    }
    const QueriesInRegisters<typename F::Sum, KeyRange, fragments, keys, 1, first> view(
        ranges, key0 + Tiles::key0() + lane_column());
    hide_keys(scores, view, -inf<typename F::Sum>());
  }

  // q.k -> scores, before positions hide any.
  static CF_DEVICE void finish_scores(S& scores, const Tiles& t, const Params& p, int key0) {
    const QueriesInMemory<typename F::Sum, typename Traits::Row, fragments, keys, 2 * keys> view(
        t.rows + Tiles::row0() + lane_row(), key0 + Tiles::key0() + lane_column());
    cf::finish_scores<Config>(scores, view, p, scaling_of<Config>(p),
                              [](int, typename F::Sum) {});
  }

  // From S to acc += P V of the warp's own keys, summed in acc itself. The exponentials of the next
  // keys stand between the products of these, for the two have pipes of their own.
  CF_DEVICE void multiply_values(S& scores, const Tiles& t) {
    typename OnlineSoftmax<Config, fragments>::Exponentials exponentials(softmax);
    constexpr int elements = 8 * fragments;
    exponentials.take(scores, 0, 0, elements);
#pragma unroll
    for (int j = 0; j < keys; ++j) {
      typename F::A a[fragments];
#pragma unroll
      for (int i = 0; i < fragments; ++i) a[i] = AccumulatorAsA<Config>(scores[i][j]).a[0];
      if constexpr (Traits::parts == 2) share_P(t.P, a, j);
#pragma unroll
      for (int n = 0; n < columns; ++n) {
        const typename F::B b = V.load(j * 16, n * 16);
#pragma unroll
        for (int i = 0; i < fragments; ++i) mma<Config>(acc[i][n], a[i], b);
        if (j + 1 < keys) {
          exponentials.take(scores, j + 1, n * elements / columns, (n + 1) * elements / columns);
        }
      }
    }
    softmax.add_sums(exponentials);
  }

  // acc += P V, each 16 columns of it summed apart and added as a whole.
  CF_DEVICE void multiply_values_apart(const S& P) {
    constexpr int count = 16 / F::depth;
    decltype(operand<Config>(kept[0][0])) a[fragments][keys][count];
#pragma unroll
    for (int i = 0; i < fragments * keys; ++i) {
      const AccumulatorAsA<Config> one(P[i / keys][i % keys]);
#pragma unroll
      for (int x = 0; x < count; ++x) a[i / keys][i % keys][x] = operand<Config>(one.a[x]);
    }
#pragma unroll
    for (int n = 0; n < columns; ++n) {
      Sums<Config> sums[fragments];
#pragma unroll
      for (int k = 0; k < keys * count; ++k) {
        const auto b = operand<Config>(V.load(k * F::depth, n * 16));
#pragma unroll
        for (int i = 0; i < fragments; ++i) add_product(sums[i], a[i][k / count][k % count], b);
      }
#pragma unroll
      for (int i = 0; i < fragments; ++i) {
#pragma unroll
        for (int e = 0; e < 8; ++e) acc[i][n].x[e] += sums[i].total(e);
      }
    }
  }

  // The same with P of both parts, which lies in shared memory.
  CF_DEVICE void multiply_shared_values(const Tiles& t) {
    constexpr int depths = Config::Bc / F::depth;
    const ReaderA<Config, Layout::row, Traits::pitch_P> reader(t.P + t.row0() * Traits::pitch_P);
    typename F::A a[fragments][depths];
#pragma unroll
    for (int i = 0; i < fragments * depths; ++i) {
      const int row = i / depths * 16, k = i % depths * F::depth;
      if constexpr (sizeof(T) == 2) {
        a[i / depths][i % depths] = reader.load(row, k);
      } else {
        a[i / depths][i % depths] = reader.load_pairs(row, k);
      }
    }
#pragma unroll
    for (int n = 0; n < columns; ++n) {
      Sums<Config> sums[fragments];
#pragma unroll
      for (int k = 0; k < depths; ++k) {
        const auto b = V.load(k * F::depth, n * 16);
#pragma unroll
        for (int i = 0; i < fragments; ++i) add_product(sums[i], a[i][k], b);
      }
#pragma unroll
      for (int i = 0; i < fragments; ++i) {
#pragma unroll
        for (int e = 0; e < 8; ++e) acc[i][n].x[e] += sums[i].total(e);
      }
    }
  }

  // The warp's P to where both parts read it.
  static CF_DEVICE void share_all_P(T* P, const S& scores) {
    T* const corner = P + (Tiles::row0() + lane_row()) * Traits::pitch_P + Tiles::key0()
                      + lane_column();
#pragma unroll
    for (int i = 0; i < 2 * fragments; ++i) {
      stage_row<T, Config>(corner + 8 * i * Traits::pitch_P, scores[i / 2], i % 2,
                           typename F::Sum(1));
    }
  }

  // acc += P V with the other part's P, which lies in shared memory.
  CF_DEVICE void multiply_other_values(const Tiles& t) {
    const int other = (1 - t.part()) * keys * 16;
    const ReaderA<Config, Layout::row, Traits::pitch_P> reader(t.P + t.row0() * Traits::pitch_P
                                                               + other);
    const ReaderB<Config, Layout::row, Traits::pitch_v> values(t.V + other * Traits::pitch_v
                                                               + t.column0());
#pragma unroll
    for (int k = 0; k < keys * 16; k += F::depth) {
      typename F::A a[fragments];
#pragma unroll
      for (int i = 0; i < fragments; ++i) a[i] = reader.load(i * 16, k);
#pragma unroll
      for (int n = 0; n < columns; ++n) {
        const typename F::B b = values.load(k, n * 16);
#pragma unroll
        for (int i = 0; i < fragments; ++i) mma<Config>(acc[i][n], a[i], b);
      }
    }
  }

  // The j-th fragments of the warp's P to where the other part reads them.
  static CF_DEVICE void share_P(T* P, const typename F::A (&a)[fragments], int j) {
    T* const corner = P + (Tiles::row0() + lane_row()) * Traits::pitch_P + Tiles::key0() + j * 16
                      + lane_column();
#pragma unroll
    for (int i = 0; i < fragments; ++i) {
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        *reinterpret_cast<uint32*>(corner + (i * 16 + row_step(e)) * Traits::pitch_P
                                   + column_step(e)) = a[i].x[e / 2];
      }
    }
  }

  // The number of the barrier at which the two parts of the same rows meet.
  static CF_DEVICE int meeting() { return 1 + warp_id() / 2; }

  // What the other part's warp says of the same rows; the four lanes of a row say the same.
  CF_DEVICE void exchange(typename F::Sum* said, typename F::Sum (&x)[fragments][2]) const {
#pragma unroll
    for (int i = 0; i < 2 * fragments; ++i) {
      if (lane_id() % 4 == 0) {
        said[Tiles::part() * Config::Br + Tiles::row0() + i * 8 + lane_row()] = x[i / 2][i % 2];
      }
    }
    ptx::named_barrier_wait(meeting(), 64, "other_part_said");
#pragma unroll
    for (int i = 0; i < 2 * fragments; ++i) {
      x[i / 2][i % 2] = said[(1 - Tiles::part()) * Config::Br + Tiles::row0() + i * 8 + lane_row()];
    }
  }

  using Top = typename F::Sum[fragments][2];

  // The rows' maxima from their lanes', and from the other part's. there: whether there are scores.
  CF_DEVICE void join_top(typename F::Sum* shared, const S& scores, bool there, Top& top) const {
    if constexpr (sizeof(typename F::Sum) == 8) {
      if (Traits::parts == 1 || there) softmax.find_exact_top(scores, top);
    }
#pragma unroll
    for (int i = 0; i < 2 * fragments; ++i) top[i / 2][i % 2] = row_max(top[i / 2][i % 2]);
    if constexpr (Traits::parts == 2) {
      Top other;
#pragma unroll
      for (int i = 0; i < 2 * fragments; ++i) other[i / 2][i % 2] = top[i / 2][i % 2];
      exchange(shared, other);
#pragma unroll
      for (int i = 0; i < 2 * fragments; ++i) {
        const auto x = top[i / 2][i % 2], y = other[i / 2][i % 2];
        if constexpr (sizeof(x) == 4) {
          top[i / 2][i % 2] = fmaxf(x, y);
        } else {
          top[i / 2][i % 2] = y > x ? y : x;            // none of them is NaN
        }
      }
    }
  }

  // The rows' l, each lane's sum of its keys, and of the other part's.
  CF_DEVICE void join_l(typename F::Sum* shared) {
#pragma unroll
    for (int i = 0; i < 2 * fragments; ++i) {
      softmax.l[i / 2][i % 2] = row_sum(softmax.l[i / 2][i % 2]);
    }
    if constexpr (Traits::parts == 2) {
      Top other;
#pragma unroll
      for (int i = 0; i < 2 * fragments; ++i) other[i / 2][i % 2] = softmax.l[i / 2][i % 2];
      exchange(shared, other);
#pragma unroll
      for (int i = 0; i < 2 * fragments; ++i) {
        // In this order in both parts: they must divide by the same.
        softmax.l[i / 2][i % 2] = Tiles::part() == 0
                                      ? softmax.l[i / 2][i % 2] + other[i / 2][i % 2]
                                      : other[i / 2][i % 2] + softmax.l[i / 2][i % 2];
      }
    }
  }

  // From scores to acc, once V is there.
  CF_DEVICE void finish_tile(S& scores, const Tiles& t) {
    if constexpr (shares_P<Config>()) {
      if (Tiles::has_scores()) {
        softmax.exponentials(scores);
        share_all_P(t.P, scores);
      }
      ptx::named_barrier_wait(meeting(), 64, "P_written");
      multiply_shared_values(t);
    } else if constexpr (fresh_sums<Config>()) {
      softmax.exponentials(scores);
      multiply_values_apart(scores);
    } else {
      multiply_values(scores, t);
      if constexpr (Traits::parts == 2) {
        ptx::named_barrier_wait(meeting(), 64, "other_P_written");
        multiply_other_values(t);
      }
    }
  }
};

}  // namespace cf

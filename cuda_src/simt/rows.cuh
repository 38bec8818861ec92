// Kernels whose threads own keys: the walk over the rows. A thread has K keys and all that belongs
// to them in registers; rows lie in shared memory, where one load serves K keys.
#pragma once

#include "../attention/gradient.cuh"
#include "../attention/schedule.cuh"
#include "../view/threads.cuh"
#include "records.cuh"

namespace cf {

// What the scores of a row need beside q.
template <typename Config, typename T, bool changes = changes_scores<Config>()>
struct RowKind {
  using Row = ScoreRow<T>;
};
template <typename Config, typename T>
struct RowKind<Config, T, false> {
  using Row = KeyRange;
};

template <typename Config>
struct RowTraits {
  using T = typename Config::element;
  using Row = typename RowKind<Config, T>::Row;
  static constexpr int threads = block_threads<Config>();
  static constexpr int K = Config::Bc / threads;
  static constexpr int d = Config::d, d_v = Config::d_v;
  // Elements of a record: q, dO, lse, delta. As many as are `together` in registers fill pieces.
  static constexpr int step = max(Piece<T>::elements / Config::together, 1);
  static constexpr int width = ceil_div(d + d_v + 2, step) * step;
  static constexpr int rows_bytes = Config::Br * (width * int(sizeof(T)) + int(sizeof(Row)));
  static_assert(sizeof(T) >= 4, "16-bit types have tensor cores");
  static_assert(Config::Bc % threads == 0, "Bc must be whole keys of all threads");
  static_assert(Config::Br % Config::together == 0, "Br must be whole steps");
};

// A tile of rows in shared memory.
template <typename Config>
struct RowTile {
  using Traits = RowTraits<Config>;
  using T = typename Config::element;
  using Row = typename Traits::Row;
  T* records;                // [Br, width]; lse is +inf for fully masked rows
  Row* rows;                 // [Br]
  unsigned char* rest;

  CF_DEVICE explicit RowTile(unsigned char* memory) {
    Carver carver{memory};
    records = carver.take<T>(Config::Br * Traits::width * int(sizeof(T)));
    rows = carver.take<Row>(Config::Br * int(sizeof(Row)));
    rest = carver.next;
  }

  // The thread's part of the rows, among which a row sees the keys of `keys`.
  CF_DEVICE void load(const BackwardParams& p, const Rows& block, const TileKeys& keys) const {
    constexpr int d = Traits::d, d_v = Traits::d_v;
#pragma unroll 1
    for (int r = int(threadIdx.x); r < Config::Br; r += Traits::threads) {
      const bool real = r < block.rows;
      StateOfRow<T> state = {inf<T>(), T(0)};
      if (real) {
        const uint64 from = row_state<T>(p, block, r);
        state = {at<const T>(from), at<const T>(from + p.state_rows * int(sizeof(T)))};
      }
      T* const record = records + r * Traits::width;
      load_row<d>(record, block.address(p.q, r), real);
      load_row<d_v>(record + d, block.address(p.dout, r), real);
      record[d + d_v] = state.lse;
      record[d + d_v + 1] = state.delta;
      const KeyRange range = real ? keys.of_row(block, r) : KeyRange{0, 0};
      if constexpr (changes_scores<Config>()) {
        rows[r] = open_gradient_row<Config, T>(p, block, r, range);
      } else {
        rows[r] = range;
      }
    }
  }
};

// The element of a key: zeros where there is none.
template <int columns, typename T>
CF_DEVICE void load_key(T (&x)[columns], const Tensor& t, uint64 base, int64 key, bool there) {
  load_row<columns>(x, base + key * t.n, there);
}

// The gradients of the scores of one key and n rows of a tile, whose records are x.
template <typename Config, bool hides, int n, typename T, int size>
CF_DEVICE void find_key_gradients(Gradient<T> (&g)[n], const T (&x)[size],
                                  const typename RowTraits<Config>::Row* rows, int key, const T* k,
                                  const T* v, const Params& p, const Scaling<T>& scaling) {
  constexpr int d = Config::d, d_v = Config::d_v, width = RowTraits<Config>::width;
  T S[n], dP[n];
#pragma unroll
  for (int r = 0; r < n; ++r) {
    S[r] = dot<d>(x + r * width, k);
    dP[r] = dot<d_v>(x + r * width + d, v);
  }
  const QueriesOfKey<T, typename RowTraits<Config>::Row, n> view = {rows, key};
  find_gradients<Config, hides>(g, S, dP, view, p, scaling, [&](int r) {
    return StateOfRow<T>{x[r * width + d + d_v], x[r * width + d + d_v + 1]};
  });
}

}  // namespace cf

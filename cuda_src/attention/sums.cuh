// Long sums: how long they stay in the tensor cores, and where those over many rows are cut.
// cupy_flash/plan/long_sums.py decides where either is needed.
//
// Tensor cores cut off what a sum cannot hold, all to one side: a sum of n equal terms of 16 bits
// loses n * 6e-9 of itself (H200). Rounded additions lose a few units at 2^13 rows, and more where
// they are more.
#pragma once

#include "../ptx.cuh"
#include "../params.cuh"

namespace cf {

// Depth after which a sum of scores moves on to a total, by an ordinary addition; 0: never. At
// N = 16384 a running float32 sum over mean-1 values is no better than plain TF32. In float64 a
// chain over d = 256 has five times the rounding error of a BLAS product; over d = 128 it has less
// than shorter ones. The 16-bit types and TF32 hide both.
//
// All kernels must sum scores alike, piece by piece from the first: where a key is nearly all that
// a row sees, P of the backward pass is as exact as its score is the one in lse, bit by bit.
template <typename Config>
CF_HOST_DEVICE constexpr int chain_depth() {
  return Config::precision == 2 ? 16 : sizeof(typename Config::element) == 8 ? 128 : 0;
}

// A sum of any length: `rest` has what the roundings of `sum` have cut off. Knuth, "The Art of
// Computer Programming", volume 2, theorem B of 4.2.2.
template <typename T>
struct LongSum {
  T sum = T(0), rest = T(0);

  CF_DEVICE void add(T x) {
    const T total = sum + x, added = total - sum;
    const T lost = (sum - (total - added)) + (x - added);
    rest += total - total == T(0) ? lost : T(0);        // of infinities it would be NaN
    sum = total;
  }
  CF_DEVICE void scale(T factor) {
    sum = ptx::multiply(sum, factor);                   // never fused with an addition
    rest *= factor;
  }
  CF_DEVICE T value() const { return sum + rest; }
};

// Config::fresh: sums of products leave the tensor cores after each tile, by ordinary additions.
template <typename Config, typename = void>
struct Fresh {
  static constexpr bool value = false;
};
template <typename Config>
struct Fresh<Config, decltype(void(Config::fresh))> {
  static constexpr bool value = Config::fresh != 0;
};

// Config::pieces: the packed rows of which dk and dv are added up at a time. Each piece is added to
// sums in memory, and the sums of all splits of the rows to dk and dv by `backward_sum`.
template <typename Config, typename = void>
struct Pieces {
  static constexpr int rows = 0;
};
template <typename Config>
struct Pieces<Config, decltype(void(Config::pieces))> {
  static constexpr int rows = Config::pieces;
};
template <typename Config>
CF_HOST_DEVICE constexpr bool has_pieces() {
  return Pieces<Config>::rows > 0;
}

// Packed rows of one piece; of a walk without pieces, all. first: of its split.
struct RowPiece {
  int64 begin, end;
  bool first;
};

// body(piece, split) for all pieces of one split, or once where rows are not cut. All threads of a
// block walk alike.
template <typename Config, typename Body>
CF_DEVICE void walk_pieces(const BackwardParams& p, int64 split, const Body& body) {
  const int64 rows = p.group * p.Nq;
  if constexpr (has_pieces<Config>()) {
    const int64 begin = split * p.split_rows, end = min(begin + p.split_rows, rows);
    for (int64 row = begin; row == begin || row < end; row += Pieces<Config>::rows) {
      body(RowPiece{row, min(row + Pieces<Config>::rows, end), row == begin});
    }
  } else {
    body(RowPiece{0, rows, true});
  }
}

}  // namespace cf

// From q.k to the score S that enters the softmax: scale, softcap, ALiBi, bias, masks, in this
// order.
#pragma once

#include "mask.cuh"

namespace cf {

// What the scores of one row have in common.
template <typename T>
struct ScoreRow {
  int first, end;      // the visible keys by position
  int64 position;
  T width;             // ALiBi's slope of the head
  T log_l;             // see normaliser.cuh
  uint64 bias, mask;   // where the row starts
};

template <typename Config, typename T>
CF_DEVICE ScoreRow<T> open_score_row(const Params& p, const Rows& rows, int r, KeyRange range) {
  ScoreRow<T> row = {range.first, range.end, 0, T(0), T(0), 0, 0};
  if constexpr (Config::features) {
    if (r < rows.rows) {
      row.position = rows.position(r);
      row.bias = rows.address(p.bias, r);
      row.mask = rows.address(p.mask, r);
      if (p.slopes.address != 0) {
        const uint64 slope = p.slopes.address + rows.b * p.slopes.b
                             + (rows.head0 + rows.packed.head(r)) * p.slopes.h;
        row.width = load<T>(slope, p.slopes.kind);
      }
    }
  }
  return row;
}

// S -= slope of the head * |position of the query - key|.
template <typename T>
CF_DEVICE T add_alibi(T S, const ScoreRow<T>& row, int key) {
  const int64 distance = row.position - key;
  return S - row.width * T(distance < 0 ? -distance : distance);
}

// S += bias; -inf hides the key even if its score is NaN.
template <typename T>
CF_DEVICE T add_bias(T S, const Tensor& bias, const ScoreRow<T>& row, int key) {
  const T x = load<T>(row.bias + key * bias.c, bias.kind);
  return x != -inf<T>() ? S + x : x;
}

// S = -inf where the boolean mask is False.
template <typename T>
CF_DEVICE T hide_by_mask(T S, const Tensor& mask, const ScoreRow<T>& row, int key) {
  return at<const unsigned char>(row.mask + key * mask.c) ? S : -inf<T>();
}

// The score of a key from the product qk. slope: its derivative by scale * qk, 1 - tanh^2.
template <typename Config, typename T>
CF_DEVICE T score(const Params& p, const ScoreRow<T>& row, T qk, int key, T& slope) {
  slope = T(1);
  // A select, not a sum: a hidden key may hold NaN. Nor does its mask or bias have to exist.
  if (key < row.first || key >= row.end) return -inf<T>();
  // Fused with the lse that is taken off it, the score of backward were not that of forward.
  T S = ptx::multiply(T(p.scale), qk);
  if constexpr (Config::features) {
    if (p.softcap != 0) {
      const T cap = T(p.softcap), t = tanh(S / cap);
      S = ptx::multiply(cap, t);
      slope = T(1) - t * t;
    }
    if (p.slopes.address != 0) S = add_alibi(S, row, key);
    if (p.bias.address != 0) S = add_bias(S, p.bias, row, key);
    if (p.mask.address != 0) S = hide_by_mask(S, p.mask, row, key);
  }
  return S;
}

// Whether keys may be hidden from a whole tile in the midst of its range.
template <typename Config>
CF_DEVICE bool hides_keys(const Params& p) {
  return Config::features && (p.mask.address != 0 || p.bias.address != 0);
}

}  // namespace cf

// How long sums of products stay in the tensor cores: one place for all kernels.
#pragma once

#include "../base.cuh"

namespace cf {

// Depth after which a sum moves on to a total, by an ordinary addition; 0: never. Tensor cores drop
// bits of float32 sums, all to one side: at N = 16384 a running sum over mean-1 values is no better
// than plain TF32. In float64 a chain over d = 256 has five times the rounding error of a BLAS
// product; over d = 128 it has less than shorter ones. The 16-bit types and TF32 hide both.
//
// All kernels must sum scores alike, piece by piece from the first: where a key is nearly all that
// a row sees, P of the backward pass is as exact as its score is the one in lse, bit by bit.
template <typename Config>
CF_HOST_DEVICE constexpr int chain_depth() {
  return Config::precision == 2 ? 16 : sizeof(typename Config::element) == 8 ? 128 : 0;
}

}  // namespace cf

// The parameters of the kernels for sm_90a: those of the pass, and how the TMA unit finds operands.
#pragma once

#include "../params.cuh"
#include "../ptx/hopper.cuh"

namespace cf {

struct ForwardSm90Params : ForwardParams {
  int32 pack;        // query heads whose rows stand side by side in a tile: 1 or the whole group
  int32 section;     // heads (of `pack` query heads) that are worked on at a time; see Sections
  float unit;        // P = 2^(unit S - reference): for S = q.k it is scale log2(e), above 0
  float lazy_2;      // the lazy threshold as a power of 2
  float qk_scale;    // `scaled` scores are finished first, and `unit` is log2(e): scale,
  float cap, per_cap;          // softcap (0: none) and its inverse
  float most;        // that a thread's P of a key tile sum to, or the reference has to move
  TensorMap q_map;   // boxes [64 / pack, pack, 64] of [batch, Nq, heads_q, d]
  TensorMap k_map;   // boxes [Bc, 64] of [batch, heads_k, Nk, d]
  TensorMap v_map;   // boxes [Bc, 64] of [batch, heads_k, Nk, d_v]
  TensorMap out_map; // boxes [16 / heads, heads, 64] of [batch, Nq, heads_q, d_v], heads being
                     // min(pack, 16): the rows of a warp; not made where they go another way
};

struct BackwardSm90Params : BackwardParams {
  TensorMap q_map;     // boxes [Br / group, group, 64] of [batch, Nq, heads_q, d]
  TensorMap k_map;     // boxes [Bc, 64] of [batch, heads_k, Nk, d]
  TensorMap v_map;     // boxes [Bc, 64] of [batch, heads_k, Nk, d_v]
  TensorMap dout_map;  // boxes [Br / group, group, 64] of [batch, Nq, heads_q, d_v]
};

static_assert(sizeof(TensorMap) == 128, "TensorMap must have 128 bytes");

}  // namespace cf

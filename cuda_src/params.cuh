// The parameter structs: one per pass, passed to its kernels by value. The host reads them here
// (cupy_flash/backends/cuda/structs.py), so that a struct has nothing but fields.
#pragma once

#include "base.cuh"

namespace cf {

// The element type of an array.
enum Kind : int64 { FLOAT16 = 0, BFLOAT16 = 1, FLOAT32 = 2, FLOAT64 = 3 };

// An array of up to four axes: its address and its strides in bytes. Address 0: it is absent.
// A stride of 0 is a broadcast axis.
struct Tensor {
  uint64 address;
  int64 b, h, n, c;  // strides of batch, head, row, column
  int64 kind;        // a Kind; masks are bytes and have none
};

// What both passes must know of the problem.
struct Params {
  Tensor q;                          // [batch, heads_q, Nq, d]
  Tensor k;                          // [batch, heads_k, Nk, d]
  Tensor v;                          // [batch, heads_k, Nk, d_v]
  Tensor out;                        // [batch, heads_q, Nq, d_v]
  Tensor lse;                        // [batch, heads_q, Nq], of the accumulators' type, or absent
  Tensor mask, bias;                 // [batch, heads_q, Nq, Nk]
  Tensor slopes;                     // [batch, heads_q]
  uint64 sink;                       // address of [heads_q], of the accumulators' type; 0: absent
  uint64 q_lens, kv_lens;            // addresses of int32 [batch]; 0: all lengths are Nq and Nk
  int64 batch, heads_q, heads_k, group, Nq, Nk, d, d_v;
  int64 aligned, q_offset;           // aligned: the offset is kv_len - q_len, q_offset is not read
  int64 left, right;                 // keys that a query sees before and after its own position
  int64 vector_bytes;                // loads of so many bytes are aligned in all rows and fill them
  int64 tasks;                       // of this launch; CTAs walk them in steps of the grid
  double scale, softcap, lazy;       // softcap 0: none
};

struct ForwardParams : Params {
  int64 splits, split_keys;          // split s has the keys s * split_keys ... (s + 1) * split_keys
  uint64 out_partial;                // [splits, batch, heads_q, Nq, d_v] of the accumulators' type
  uint64 lse_partial, l_partial;     // [splits, batch, heads_q, Nq]: m and l, see store_end
};

struct BackwardParams : Params {
  Tensor dout;                       // [batch, heads_q, Nq, d_v]
  Tensor dlse;                       // [batch, heads_q, Nq], or absent
  Tensor dq, dk, dv;                 // shaped as q, k, v
  Tensor dbias;                      // [batch_bias, heads_bias, Nbias_q, Nbias_k]
  Tensor dsink;                      // [heads_q]
  uint64 state;                      // [batch, heads_k, tiles, lse or delta, state_rows]
  int64 state_rows;                  // packed rows of a tile of `state`
  uint64 dq_sums;                    // [batch, heads_k, tiles, Br * d] in the order of registers
  int64 Nbias_q, Nbias_k, batch_bias, heads_bias;
  int64 row_splits, split_rows;      // split s has the packed rows s * split_rows ...
  uint64 dk_sums, dv_sums;           // [row_splits, batch, heads_k, Nk, d or d_v]
  uint64 normalisers;                // [batch, heads_q, Nq, 2], see gradient.cuh, or absent
  uint64 dbias_sums;                 // see attention/dbias_sums.cuh, or absent
};

// Of kernels that leave dq of a part of the keys to each of some splits.
struct DqParams : BackwardParams {
  int64 key_splits, split_keys;      // as in ForwardParams
  uint64 dq_parts;                   // [key_splits, batch, heads_q, Nq, d]
};

}  // namespace cf

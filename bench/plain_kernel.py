"""softmax(q k) v in a few dimensions by a plain kernel for CUDA cores: a peer of ours there.

A thread has some rows of q; keys and values go through shared memory, a tile at a time.
"""

from math import log2

import cupy as cp
import numpy as np

THREADS, ROWS = 128, (2, 4, 8)
KERNEL = r"""
constexpr int TILE = 256, STEP = 8;
__device__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ double exp2_of(double x) { return exp2(x); }

template <typename T, int D, int DV, int ROWS>
__global__ void plain(const T* q, const T* k, const T* v, T* out, int N, int M, T scale_log2) {
  __shared__ T keys[TILE * D], values[TILE * DV];
  const int first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  T a[ROWS][D], acc[ROWS][DV], l[ROWS], m[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    const int row = first + r * stride;
    for (int c = 0; c < D; ++c) a[r][c] = row < N ? q[row * D + c] * scale_log2 : T(0);
    for (int c = 0; c < DV; ++c) acc[r][c] = 0;
    l[r] = 0;
    m[r] = -1e30;
  }
  for (int tile = 0; tile < M; tile += TILE) {
    __syncthreads();
    for (int x = threadIdx.x; x < TILE * D; x += blockDim.x)
      keys[x] = tile * D + x < M * D ? k[tile * D + x] : T(0);
    for (int x = threadIdx.x; x < TILE * DV; x += blockDim.x)
      values[x] = tile * DV + x < M * DV ? v[tile * DV + x] : T(0);
    __syncthreads();
    const int end = min(TILE, M - tile);
    for (int begin = 0; begin < end; begin += STEP) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        T s[STEP], largest = m[r];
#pragma unroll
        for (int j = 0; j < STEP; ++j) {
          T x = 0;
#pragma unroll
          for (int c = 0; c < D; ++c) x += a[r][c] * keys[(begin + j) * D + c];
          s[j] = begin + j < end ? x : T(-1e30);
          largest = max(largest, s[j]);
        }
        if (largest > m[r] + T(8)) {
          const T alpha = exp2_of(m[r] - largest);
          l[r] *= alpha;
#pragma unroll
          for (int c = 0; c < DV; ++c) acc[r][c] *= alpha;
          m[r] = largest;
        }
#pragma unroll
        for (int j = 0; j < STEP; ++j) {
          const T p = exp2_of(s[j] - m[r]);
          l[r] += p;
#pragma unroll
          for (int c = 0; c < DV; ++c) acc[r][c] += p * values[(begin + j) * DV + c];
        }
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    const int row = first + r * stride;
    for (int c = 0; row < N && c < DV; ++c) out[row * DV + c] = acc[r][c] / l[r];
  }
}
"""


def plain(cell, sets):
    """Number of a call -> (out,), by the fastest number of rows a thread."""
    calls = [_call(cell, sets, rows) for rows in ROWS]
    return min(calls, key=_milliseconds)


def _call(cell, sets, rows):
    """The same with so many rows a thread."""
    name = {"float32": "float", "float64": "double"}[cell.dtype]
    expression = f"plain<{name}, {cell.d}, {cell.d_v}, {rows}>"
    module = cp.RawModule(code=KERNEL, options=("-std=c++17",), name_expressions=(expression,))
    kernel, blocks = module.get_function(expression), -(-cell.Nq // (THREADS * rows))
    scale_log2 = np.dtype(cell.dtype).type(cell.d**-0.5 * log2(np.e))

    def call(i):
        one = sets[i % len(sets)]
        out = cp.empty(one.dout.shape, one.dout.dtype)
        kernel((blocks,), (THREADS,), (*one[:3], out, np.int32(cell.Nq), np.int32(cell.Nk),
                                       scale_log2))
        return (out,)

    return call


def _milliseconds(call):
    """Of a call on the GPU, the shortest of three."""
    start, end, taken = cp.cuda.Event(), cp.cuda.Event(), []
    for i in range(4):              # the first one compiles
        start.record()
        call(i)
        end.record()
        end.synchronize()
        taken.append(cp.cuda.get_elapsed_time(start, end))
    return min(taken[1:])

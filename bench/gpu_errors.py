"""Errors of the GPU path against float64, up to N = 65,536."""

import cupy as cp
import ml_dtypes
import numpy as np
from gpu_check import say

import cupy_flash as cf

KINDS = {"float16": (np.float16, None), "bfloat16": (ml_dtypes.bfloat16, None),
         "tf32": (np.float32, "tf32"), "tf32x3": (np.float32, "tf32x3"),
         "float64": (np.float64, None)}
LENGTHS = (1024, 4096, 16384, 65536)
DATA = ("mean 0", "mean 1", "late maxima")
D = 64
NAMES = ("out", "lse", "dq", "dk", "dv")
ROWS = 1024         # of a block of the reference: at N = 65,536 its scores take half a GiB


def inputs(data, N, dtype):
    """q, k, v, dout (1, N, D), rounded to the dtype; the same for every run."""
    rng = cp.random.default_rng([N, DATA.index(data)])
    q, k, v, dout = (rng.standard_normal((1, N, D), cp.float32) for _ in range(4))
    if data == "mean 1":
        q, k, v, dout = q + 1, k + 1, v + 1, dout + 1
    if data == "late maxima":       # the maxima of all rows go on moving, some to the last keys
        k *= cp.linspace(0.5, 2, N, dtype=cp.float32)[:, None]
        k[:, -5:] = 3 * q[:, N // 3:N // 3 + 5]
    return [x.astype(dtype) for x in (q, k, v, dout)]


def reference(q, k, v, dout):
    """All results in float64, block of rows by block of rows; causal."""
    q, k, v, dout = (x[0].astype(cp.float64) for x in (q, k, v, dout))
    N, scale = len(q), D**-0.5
    out, lse, dq = cp.empty_like(v), cp.empty(N), cp.empty_like(q)
    dk, dv = cp.zeros_like(k), cp.zeros_like(v)
    for row in range(0, N, ROWS):
        rows, keys = slice(row, row + ROWS), slice(0, row + ROWS)
        S = scale * (q[rows] @ k[keys].T)
        S[cp.arange(row, row + ROWS)[:, None] < cp.arange(row + ROWS)] = -cp.inf
        m = S.max(axis=1, keepdims=True)
        P = cp.exp(S - m)
        l = P.sum(axis=1, keepdims=True)
        P /= l
        out[rows], lse[rows] = P @ v[keys], (m + cp.log(l))[:, 0]
        dP = dout[rows] @ v[keys].T
        dS = P * (dP - (P * dP).sum(axis=1, keepdims=True))
        dq[rows] = scale * (dS @ k[keys])
        dk[keys] += scale * (dS.T @ q[rows])
        dv[keys] += P.T @ dout[rows]
    return dict(zip(NAMES, (out, lse, dq, dk, dv), strict=True))


def errors(options, results):
    """One line for each kind, length and data: largest error over largest value."""
    for N in LENGTHS:
        for data in DATA:
            known, want = None, None
            for kind, (dtype, precision) in KINDS.items():
                q, k, v, dout = inputs(data, N, dtype)
                if known != np.dtype(dtype):        # both float32 kinds have the same answer
                    known, want = np.dtype(dtype), reference(q, k, v, dout)
                wide = cp.float64 if kind == "float64" else cp.float32
                out, lse = cf.attention(q, k, v, causal=True, precision=precision,
                                        return_lse=True, out_dtype=wide)
                g = cf.attention_backward(dout, q, k, v, out, lse, causal=True,
                                          precision=precision, grad_dtype=wide)
                got = dict(zip(NAMES, (out, lse, g.dq, g.dk, g.dv), strict=True))
                found = {name: _error(x[0], want[name]) for name, x in got.items()}
                results.add(kind=kind, N=N, data=data, d=D, errors=found)
                say(f"N {N:6d}  {data:11}  {kind:8}",
                    "  ".join(f"{name} {error:.1e}" for name, error in found.items()))
            cp.get_default_memory_pool().free_all_blocks()
    return 0


def _error(got, want):
    """Largest error over the largest value; NaN if anything is not finite."""
    return float(cp.abs(got.astype(cp.float64) - want).max() / cp.abs(want).max())

"""Memory of the GPU path: its peak to the byte, offsets beyond 2^31, and what only O(N) can do.

    python -m bench memory
"""

import time
from pathlib import Path

import cupy as cp
import numpy as np

import cupy_flash as cf
from cupy_flash import device
from cupy_flash.bind import Options, bind_backward, bind_forward
from cupy_flash.plan import make_plan

from . import RESULTS
from .cells import Cell
from .records import Results, say
from .truth import answers

GRAIN = 512         # CuPy's pool rounds each array up to this
PASSES = {"forward": (bind_forward, cf.attention),
          "backward": (bind_backward, cf.attention_backward)}


def arguments(parser):
    """Of the command line."""
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_memory.jsonl",
                        help="file for the JSON lines")


def main(options):
    """All checks; 1 if one fails."""
    results, wrong = Results(options.out), 0
    for check in (peak, batch_offsets, row_offsets, large_batch, large_group, large_mask,
                  float64_long):
        start = time.perf_counter()
        try:
            found, fault = check(), None
        except AssertionError as error:
            found, fault = {}, str(error)
        cp.get_default_memory_pool().free_all_blocks()
        wrong += fault is not None
        say(f"{check.__name__}: {fault or 'right'}  {found}  {time.perf_counter() - start:.1f} s")
        results.add(check=check.__name__, fault=fault, **found)
    return 1 if wrong else 0


def normal(*shape, dtype=np.float16, seed=0):
    return cp.random.default_rng(seed).standard_normal(shape, cp.float32).astype(dtype)


def both(q, k, v, dout, **options):
    """out, lse, dq, dk, dv."""
    out, lse = cf.attention(q, k, v, return_lse=True, **options)
    return (out, lse, *cf.attention_backward(dout, q, k, v, out, lse, **options)[:3])


def same(names, got, want, message):
    """The same bits, but for dq, whose sums have no order: within a unit of the narrow type."""
    for name, a, b in zip(names, got, want, strict=True):
        if name == "dq":
            assert apart(a, b) <= 2**-10, f"{message}: {name} differs by {apart(a, b)}"
        else:
            assert cp.array_equal(a, b), f"{message}: {name} differs"


def apart(a, b):
    """The largest difference in units of the largest value."""
    a, b = a.astype(cp.float32), b.astype(cp.float32)
    return float(cp.abs(a - b).max() / cp.abs(b).max())


def peak():
    """The pool grows by the results and the planned workspace, and by nothing else."""
    found = {}
    for N in (4096, 65536):
        q = normal(1, 4, N, 64)
        out, lse = cf.attention(q, q, q, causal=True, return_lse=True)
        arguments = {"forward": (q, q, q), "backward": (q, q, q, q, out, lse)}
        results = {"forward": out.nbytes + lse.nbytes, "backward": 3 * q.nbytes}
        for direction, (bind, function) in PASSES.items():
            problem, *_ = bind(*arguments[direction], Options(causal=True))
            plan = make_plan(direction, problem, device.gpu(q.device.id))
            taken = pool_bytes(function, *arguments[direction])
            allowed = results[direction] + plan.workspace_bytes + 8 * GRAIN
            assert taken <= allowed, (
                f"{direction} at N = {N} took {taken:,} bytes, planned {allowed:,}")
            found[f"{direction}_{N}"] = taken
    return found


def pool_bytes(function, *arrays):
    """Bytes that a pool of its own has to ask for during a causal call."""
    function(*arrays, causal=True)          # CuPy and the driver take what they take only once
    pool = cp.cuda.MemoryPool()
    with cp.cuda.using_allocator(pool.malloc):
        function(*arrays, causal=True)
        cp.cuda.Device().synchronize()
        return pool.total_bytes()


def batch_offsets():
    """Keys of the second batch entry lie 2^31 elements behind those of the first."""
    memory = cp.zeros(2**31 + 4096, cp.float16)
    small = normal(2, 1, 16, 64)

    def far(x):
        view = cp.lib.stride_tricks.as_strided(memory, x.shape, (2**32, 2048, 128, 2))
        view[...] = x
        return view

    q, k, dout = normal(2, 1, 50, 64, seed=1), far(small), normal(2, 1, 50, 64, seed=2)
    same(("out", "lse", "dq", "dk", "dv"), both(q, k, k, dout), both(q, small, small, dout),
         "keys 2^31 elements apart")
    out = cp.lib.stride_tricks.as_strided(memory, (*q.shape[:2], 16, 64), (2**32, 2048, 128, 2))
    want = cf.attention(q[:, :, :16], small, small)
    cf.attention(q[:, :, :16], small, small, out=out)
    same(("out",), (out,), (want,), "results 2^31 elements apart")
    return {}


def row_offsets():
    """17 keys, each 2^27 elements behind the one before."""
    memory = cp.zeros(2**31 + 64, cp.float16)
    small = normal(1, 1, 17, 64)
    k = cp.lib.stride_tricks.as_strided(memory, small.shape, (0, 0, 2**28, 2))
    k[...] = small
    q, dout = normal(1, 1, 50, 64, seed=1), normal(1, 1, 50, 64, seed=2)
    same(("out", "lse", "dq", "dk", "dv"), both(q, k, k, dout), both(q, small, small, dout),
         "rows 2^27 elements apart")
    return {}


def large_batch():
    """1.3e9 elements an array and 300,000 blocks; the last entries are those of a small call."""
    shape = (1600, 16, 729, 72)
    q = cp.empty(shape, cp.float16)
    for b in range(0, 1600, 200):
        q[b:b + 200] = normal(200, *shape[1:], seed=b)
    results = both(q, q, q, q)
    for b in (0, 801, 1599):
        part = cp.ascontiguousarray(q[b:b + 1])
        same(("out", "lse", "dq", "dk", "dv"), [x[b:b + 1] for x in results],
             both(part, part, part, part), f"batch entry {b}")
    return {"bytes": int(q.nbytes)}


def large_group():
    """2.7e8 rows of one key head: the last queries are those of a small call."""
    N = 2**22 + 2**16
    q, k, dout = normal(1, 64, 64, 16), normal(1, 1, 100, 16, seed=1), normal(1, 64, 64, 16, seed=2)
    many = cp.tile(q, (N // 64, 1))
    only_last = cp.zeros_like(many)
    only_last[:, :, -64:] = dout
    out, lse, dq, dk, dv = both(many, k, k, only_last)
    last = (out[:, :, -64:], lse[..., -64:], dq[:, :, -64:], dk, dv)
    same(("out", "lse", "dq", "dk", "dv"), last, both(q, k, k, dout), "a group of 2.7e8 rows")
    return {"rows": 64 * N}


def large_mask():
    """A lower-triangular mask of 2.15e9 cells is causal."""
    N = 46400
    q, dout = normal(1, 1, N, 16), normal(1, 1, N, 16, seed=1)
    mask = cp.tri(N, dtype=bool)
    got, want = both(q, q, q, dout, mask=mask), both(q, q, q, dout, causal=True)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert apart(a, b) <= 2**-9, f"{name}: mask and causal differ by {apart(a, b)}"
    return {"cells": N * N}


def float64_long():
    """Forward and backward at N = 131,072 in float64; sampled rows against the formulas."""
    N, d = 131072, 64
    q, k, v, dout = (cp.random.default_rng(i).standard_normal((N, d)) for i in range(4))
    pool = cp.cuda.MemoryPool()
    with cp.cuda.using_allocator(pool.malloc):
        start = time.perf_counter()
        out, lse, dq, _, _ = both(q, k, v, dout)
        cp.cuda.Device().synchronize()
        seconds = time.perf_counter() - start
    taken = pool.total_bytes()
    rows = cp.asarray(np.random.default_rng(0).integers(N, size=64))
    some = Cell("memory", "backward", "float64", 1, 1, 1, len(rows), N, d, d)
    want = answers(some, q[rows][None], k, v, dout[rows][None], cp)
    errors = {name: float(cp.abs(x[rows] - want[name][0]).max() / cp.abs(want[name]).max())
              for name, x in (("out", out), ("lse", lse), ("dq", dq))}
    assert max(errors.values()) < 1e-11, f"errors {errors}"
    assert taken <= 6 * q.nbytes, f"{taken:,} bytes were taken"
    return {"N": N, "seconds": round(seconds, 2), "peak_bytes": int(taken), "errors": errors,
            "torch_math": _torch_math(q, k, v)}


def _torch_math(q, k, v):
    """What PyTorch's own float64 path says to the same problem, where PyTorch is installed."""
    try:
        import torch
    except ImportError:
        return "not installed"
    x, y, z = (torch.from_dlpack(a).requires_grad_() for a in (q, k, v))
    try:
        torch.nn.functional.scaled_dot_product_attention(*(a[None, None] for a in (x, y, z)))
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError as error:
        return f"{type(error).__name__}: {str(error).split('.')[0]}"
    return "fits"

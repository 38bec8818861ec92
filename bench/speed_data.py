"""Inputs of a problem on the GPU, its answers in float64, and the judgement of results."""

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

ROWS = 1024         # of a block of the answers: its scores take 128 MiB at Nk = 16,384
MOST_SETS = 32
RESULTS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}
# Norm of the difference over norm of the answer: a few roundings of the type, and twice that for
# gradients, which are sums of rounded dS. An error of `out` shifts delta, and dq by a part of the
# mean key: from rounding, it stays as large as it is while dq falls with the root of the keys.
# Where rounding is fine, what tensor cores cut off a running sum over mean-1 values stands out, and
# that grows with the root of the keys itself: 1.2e-3 at 4096 keys, from all kernels measured.
BOUNDS = {"bfloat16": 8e-3, "float16": 1e-3, "tf32": 2e-3, "tf32x3": 1e-5, "float64": 1e-12}


class Set(NamedTuple):
    """The arrays of one call, all (B, heads, N, width)."""

    q: object
    k: object
    v: object
    dout: object


@dataclass
class Data:
    """Inputs as torch tensors and as CuPy arrays over the same memory, and answers of some heads.

    There are so many sets that going through them leaves nothing of a set in the L2 cache until its
    turn comes again. `answers` belong to the first set: (b, key head) -> name -> array.
    """

    torch: list
    cupy: list
    answers: dict


def make(cell):
    """Standard normal inputs; the last head of v and of dout has mean 1, which sums grow with."""
    import cupy as cp
    import torch

    sizes = {"q": (cell.Hq, cell.Nq, cell.d), "k": (cell.Hk, cell.Nk, cell.d),
             "v": (cell.Hk, cell.Nk, cell.d_v), "dout": (cell.Hq, cell.Nq, cell.d_v)}
    dtype = getattr(torch, cell.dtype)
    count = sets(cell, cp.cuda.Device().attributes["L2CacheSize"])
    torch.manual_seed(0)
    with torch.device("cuda"):
        arrays = {name: torch.randn((count, cell.B, *size), dtype=dtype)
                  for name, size in sizes.items()}
        for name in ("v", "dout"):
            arrays[name][:, :, -1] += 1
        tensors = [Set(*(x[i] for x in arrays.values())) for i in range(count)]
        known = {place: answers(cell, *_heads(cell, tensors[0], *place), torch)
                 for place in {(0, 0), (cell.B - 1, cell.Hk - 1)}}
    return Data(tensors, [Set(*map(cp.from_dlpack, one)) for one in tensors], known)


def sets(cell, cache_bytes):
    """How many sets of inputs are twice as large as the cache."""
    itemsize = {"float32": 4, "float64": 8}.get(cell.dtype, 2)
    widths = cell.Hq * cell.Nq * cell.d + cell.Hk * cell.Nk * (cell.d + cell.d_v)
    return min(MOST_SETS, ceil(2 * cache_bytes / (cell.B * widths * itemsize)))


def _heads(cell, arrays, b, head):
    """q, k, v, dout of one key head: (group, Nq, d), (Nk, d), (Nk, d_v), (group, Nq, d_v)."""
    group = cell.Hq // cell.Hk
    rows = slice(head * group, (head + 1) * group)
    return arrays.q[b, rows], arrays.k[b, head], arrays.v[b, head], arrays.dout[b, rows]


def answers(cell, q, k, v, dout, xp):
    """out, dq (group, Nq, ...), dk, dv (Nk, ...) in float64, block of rows by block of rows.

    xp: torch, which has its kernels compiled, or NumPy.
    """
    q, k, v, dout = (xp.asarray(x, dtype=xp.float64) for x in (q, k, v, dout))
    scale = cell.d**-0.5
    out, dq = xp.empty_like(dout), xp.empty_like(q)
    dk, dv = xp.zeros_like(k), xp.zeros_like(v)
    offset = cell.Nk - cell.Nq
    for head, row in ((h, r) for h in range(len(q)) for r in range(0, cell.Nq, ROWS)):
        rows = slice(row, min(row + ROWS, cell.Nq))
        first = max(0, row + offset - cell.window + 1) if cell.window else 0
        keys = slice(first, min(rows.stop + offset, cell.Nk) if cell.causal else cell.Nk)
        S = scale * (q[head, rows] @ k[keys].T)
        if cell.causal:
            ahead = (xp.arange(keys.start, keys.stop)
                     - xp.arange(row + offset, rows.stop + offset)[:, None])
            hidden = ahead > 0
            if cell.window:
                hidden |= ahead <= -cell.window
            S[hidden] = -xp.inf
        P = xp.exp(S - xp.amax(S, axis=1, keepdims=True))
        P /= P.sum(axis=1, keepdims=True)
        out[head, rows] = P @ v[keys]
        dS = dout[head, rows] @ v[keys].T
        dS -= (out[head, rows] * dout[head, rows]).sum(axis=1, keepdims=True)
        dS *= P
        dq[head, rows] = scale * (dS @ k[keys])
        dk[keys] += scale * (dS.T @ q[head, rows])
        dv[keys] += P.T @ dout[head, rows]
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def errors(cell, results, known, xp):
    """Relative error of each result where answers are known; NaN if any element is not finite.

    results: arrays (B, heads, N, width) in the order of `RESULTS`.
    """
    group, found = cell.Hq // cell.Hk, {}
    for name, x in zip(RESULTS[cell.direction], results, strict=True):
        found[name] = 0.0
        for (b, head), want in known.items():
            rows = slice(head * group, (head + 1) * group)
            got = x[b, rows] if name in ("out", "dq") else x[b, head]
            difference = xp.asarray(got, dtype=xp.float64) - want[name]
            ratio = xp.linalg.norm(difference.ravel()) / xp.linalg.norm(want[name].ravel())
            found[name] = max(found[name], float(ratio))
        if not xp.isfinite(x).all():
            found[name] = float("nan")
    return found


def bound(cell):
    """The largest error allowed."""
    if cell.direction == "forward":
        return BOUNDS[cell.kind]
    return 2 * BOUNDS[cell.kind] * max(1, cell.Nk / 4096)**(1 if cell.kind == "float16" else 0.5)

"""Errors of the GPU path against float64.

    python -m bench accuracy                # up to N = 65,536: what docs/accuracy.md shows
    python -m bench accuracy rows           # every row of every gradient judged by itself

The second part has problems whose rows of dout differ by factors up to 2^16: a row's error, in
units of its own norm, over that of the baseline in the same type, the largest among the 128 rows
nearest in norm. For float64 the baseline is the same formulas in another order of sums.
Printed are the largest factor once max(4, 0.2 %) of the rows are left out, in which terms cancel,
and the largest of all.
"""

from pathlib import Path

import numpy as np

from . import RESULTS
from .cells import KINDS, Cell, select
from .data import dtype_of, make, names, ours, wide_of, words
from .records import Results, say
from .support import CANCELLED, eps, largest_of_nearest, row_norms
from .truth import answers, of_head

LENGTHS = (1024, 4096, 16384, 65536)
DATA = ("mean 0", "mean 1", "late maxima")
D = 64


def arguments(parser):
    """Of the command line."""
    parser.add_argument("part", nargs="?", choices=("errors", "rows"), default="errors")
    parser.add_argument("--out", type=Path, help="file for the JSON lines")


def main(options):
    """Measure a part."""
    results = Results(options.out or RESULTS / f"gpu_{options.part}.jsonl")
    return {"errors": errors, "rows": rows}[options.part](results)


def inputs(cp, data, N, dtype):
    """q, k, v, dout (1, 1, N, D), rounded to the dtype; the same for every run."""
    rng = cp.random.default_rng([N, DATA.index(data)])
    q, k, v, dout = (rng.standard_normal((1, 1, N, D), cp.float32) for _ in range(4))
    if data == "mean 1":
        q, k, v, dout = q + 1, k + 1, v + 1, dout + 1
    if data == "late maxima":       # the maxima of all rows go on moving, some to the last keys
        k *= cp.linspace(0.5, 2, N, dtype=cp.float32)[:, None]
        k[..., -5:, :] = 3 * q[..., N // 3:N // 3 + 5, :]
    return [x.astype(dtype) for x in (q, k, v, dout)]


def errors(results):
    """One line for each kind, length and data: largest error over largest value."""
    import cupy as cp

    import cupy_flash as cf

    for N in LENGTHS:
        for data in DATA:
            known, want = None, None
            for kind, (dtype, precision) in KINDS.items():
                cell = Cell("accuracy", "backward", dtype, 1, 1, 1, N, N, D, D, causal=True,
                            precision=precision)
                q, k, v, dout = inputs(cp, data, N, dtype_of(dtype))
                if known != dtype:                  # both float32 kinds have the same answer
                    known, want = dtype, answers(cell, q[0], k[0, 0], v[0, 0], dout[0], cp)
                wide = wide_of(cell)
                out, lse = cf.attention(q, k, v, return_lse=True, out_dtype=wide, **words(cell))
                g = cf.attention_backward(dout, q, k, v, out, lse, grad_dtype=wide, **words(cell))
                got = {"out": out, "lse": lse, "dq": g.dq, "dk": g.dk, "dv": g.dv}
                found = {name: _error(cp, x.reshape(want[name].shape), want[name])
                         for name, x in got.items()}
                results.add(kind=kind, N=N, data=data, d=D, errors=found)
                say(f"N {N:6d}  {data:11}  {kind:8}",
                    "  ".join(f"{name} {error:.1e}" for name, error in found.items()))
            cp.get_default_memory_pool().free_all_blocks()
    return 0


def _error(cp, got, want):
    """Largest error over the largest value; NaN if anything is not finite."""
    return float(cp.abs(got.astype(cp.float64) - want).max() / cp.abs(want).max())


def rows(results):
    """One line for each cell and result."""
    import cupy as cp

    import cupy_flash as cf

    for cell in select(["rows"]):
        one, *_ = make(cell, cp)
        got = dict(zip(names(cell), ours(cf, cell, [one])(0), strict=True))
        want, plain = (heads(cell, one, cp, way) for way in (answers, plain_program))
        said = []
        for name in got.keys() & want.keys():
            largest, all_rows = factors(cp.asnumpy(got[name]), want[name], plain[name])
            results.add(cell=cell.name, result=name, factor=largest, largest=all_rows)
            said.append(f"{name} {largest:.2f} ({all_rows:.1f})")
        say(f"{cell.name:60}", "  ".join(sorted(said)))
    return 0


def heads(cell, one, xp, way):
    """What a way of computing says for all heads: name -> array (heads, N, width) of NumPy."""
    found = []
    for head in range(cell.Hk):
        arrays, options = of_head(cell, one, 0, head)
        found.append(way(cell, *arrays, xp, options))
    # Queries' results have a first axis of the heads that read the key head.
    return {name: np.concatenate([
        np.asarray(x[name] if xp is np else x[name].get()).reshape(-1, *x[name].shape[-2:])
        for x in found]) for name in ("out", "dq", "dk", "dv")}


def plain_program(cell, q, k, v, dout, xp, options):
    """The same in the cell's type, sums in float32; for float64 in another order of sums."""
    if cell.dtype != "float64":
        return answers(cell, q, k, v, dout, xp, options, xp.float32,
                       lambda x: x.astype(dtype_of(cell.dtype)).astype(xp.float32))
    turn = slice(None, None, -1 if cell.mask == "full" and not options else None)
    found = answers(cell, q[..., ::-1], k[turn, ::-1], v[turn, ::-1], dout[..., ::-1], xp, options)
    found = {name: x[..., ::-1] for name, x in found.items() if name != "lse"}
    return found | {name: found[name][turn] for name in ("dk", "dv")}


def factors(got, want, plain):
    """The largest factor of a row but for those left out, and of all rows."""
    norm = row_norms(want)
    seen = np.flatnonzero(norm > CANCELLED * norm.max())
    seen = seen[np.argsort(norm[seen], kind="stable")]
    ours, others = (row_norms(x.astype(np.float64).reshape(want.shape), want)[seen]
                    / norm[seen] for x in (got, plain))
    near = np.fmax(largest_of_nearest(others), eps(got.dtype) / 4)
    found = np.sort(ours / near)
    return float(found[-1 - max(4, len(found) // 500)]), float(found[-1])

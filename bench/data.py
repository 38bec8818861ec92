"""Inputs of a cell, the call of ours with them, and the error that a result may have."""

from math import ceil
from typing import Any, NamedTuple

import numpy as np

from .cells import ITEMSIZE

MOST_SETS = 32
RESULTS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}
GRADIENTS = {"bias": "dbias", "sink": "dsink"}      # of options that have one
# Norm of the difference over norm of the answer: a few roundings of the type, and twice that for
# gradients, which are sums of rounded dS. An error of `out` shifts delta, and dq by a part of the
# mean key: from rounding, it stays as large as it is while dq falls with the root of the keys.
# Where rounding is fine, what tensor cores cut off a running sum over mean-1 values stands out, and
# that grows with the root of the keys itself: 1.2e-3 at 4096 keys, from all kernels measured.
BOUNDS = {"bfloat16": 8e-3, "float16": 1e-3, "tf32": 2e-3, "tf32x3": 1e-5, "float32": 1e-5,
          "float64": 1e-12}


class Set(NamedTuple):
    """The arrays of one call, all but the options (B, heads, N, width)."""

    q: Any
    k: Any
    v: Any
    dout: Any
    options: dict


def dtype_of(name):
    """The dtype of NumPy and CuPy with this name."""
    if name == "bfloat16":
        import ml_dtypes
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def make(cell, xp, count=1):
    """Sets: standard normal, but the last head of v and of dout has mean 1, so sums grow.

    xp: NumPy or CuPy, which draw different numbers.
    """
    rng = xp.random.default_rng(0)
    return [_make(cell, xp, rng) for _ in range(count)]


def _make(cell, xp, rng):
    """A `Set`."""
    dtype, wide = dtype_of(cell.dtype), wide_of(cell)
    shapes = (*cell.shapes, (cell.B, cell.Hq, cell.Nq, cell.d_v))
    q, k, v, dout = (rng.standard_normal(shape, wide) for shape in shapes)
    for x in (v, dout):
        x[:, -1] += 1
    if cell.spread:
        dout *= xp.exp2(-cell.spread * rng.random((*dout.shape[:3], 1), wide))
    options = {name: _option(cell, xp, rng, name, cell.shape_of(axes))
               for name, axes in cell.arrays}
    return Set(*(x.astype(dtype) for x in (q, k, v, dout)), options)


def wide_of(cell):
    """The accumulators' dtype."""
    return np.dtype(np.float64 if cell.dtype == "float64" else np.float32)


def option_dtype(cell, name):
    """The dtype of the array of an option."""
    return {"mask": np.dtype(bool), "kv_lens": np.dtype(np.int32), "sink": wide_of(cell),
            "alibi_slopes": np.dtype(np.float32), "bias": dtype_of(cell.dtype)}[name]


def _option(cell, xp, rng, name, shape):
    """The array of an option."""
    dtype = option_dtype(cell, name)
    if name == "mask":
        return rng.random(shape) < 0.9
    if name == "bias":
        return rng.standard_normal(shape, wide_of(cell)).astype(dtype)
    if name == "alibi_slopes":
        return xp.asarray([2.0 ** (-8 * (h + 1) / cell.Hq) for h in range(cell.Hq)], dtype)
    if name == "kv_lens":
        return xp.asarray(cell.kv_lens, dtype)
    return xp.zeros(shape, dtype)        # sinks


def sets(cell, cache_bytes):
    """How many sets of inputs are twice as large as the cache.

    Going through them leaves nothing of a set there until its turn comes again.
    """
    widths = cell.Hq * cell.Nq * cell.d + cell.Hk * cell.Nk * (cell.d + cell.d_v)
    return min(MOST_SETS, ceil(2 * cache_bytes / (cell.B * widths * ITEMSIZE[cell.dtype])))


def names(cell):
    """Of the results of a cell, in their order."""
    more = [GRADIENTS[name] for name, _ in cell.arrays if name in GRADIENTS]
    return (*RESULTS[cell.direction], *(more if cell.direction == "backward" else ()))


def words(cell):
    """What is said to ours beside arrays."""
    found = {"causal": cell.causal, "precision": cell.precision, "softcap": cell.softcap}
    if cell.window:
        found["window"] = (cell.window - 1, 0)
    return {name: value for name, value in found.items() if value is not None}


def ours(cf, cell, data):
    """Number of a call -> results by `names`, of the sets in turn.

    Backward is given what forward returned, as others keep it. cf: the package, which may be that
    of another commit.
    """
    def forward(one, **more):
        return cf.attention(*one[:3], **words(cell), **one.options, **more)

    if cell.direction == "forward":
        return lambda i: (forward(data[i % len(data)]),)
    saved, wanted = [forward(one, return_lse=True) for one in data], names(cell)

    def call(i):
        one = data[i % len(data)]
        found = cf.attention_backward(one.dout, *one[:3], *saved[i % len(data)], **words(cell),
                                      **one.options)
        return tuple(getattr(found, name) for name in wanted)

    return call


def bound(cell):
    """The largest error allowed."""
    if cell.direction == "forward":
        return BOUNDS[cell.kind]
    return 2 * BOUNDS[cell.kind] * max(1, cell.Nk / 4096)**(1 if cell.kind == "float16" else 0.5)

"""The calls that `warmup` compiles for: what users ask for, as the planner sees it.

Which kernels a call needs is the planner's decision alone. So this file has no kernel in it, but a
grid of calls that is dense enough to meet every decision: whether there are many rows or few, many
tiles or few, whole groups of heads, features or none.
"""

from dataclasses import replace
from itertools import product

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cupy_flash.arrays import Layouts
from cupy_flash.bind import Options, bind_backward, bind_forward
from cupy_flash.plan import make_plan
from cupy_flash.problem import accumulator_of

# Options by their words in `cupy_flash.attention`; "out_dtype" stands for "grad_dtype" too, and
# "tf32" is a precision. What is not among them changes no kernel.
USUAL = ("causal", "mask", "bias", "softcap", "alibi_slopes", "sink", "out_dtype",
         "deterministic")
OPTIONS = (*USUAL, "tf32")
_LENGTHS = ((1, 2**16), (48, 48), (128, 128), (200, 4096), (1024, 1024), (4096, 4096), (2**13, 128),
            (2**15, 2**15))
# Batch, query heads, key heads: a single head, many, groups that fill tiles and groups that do not.
_HEADS = ((1, 1, 1), (4, 32, 32), (2, 32, 8), (2, 24, 8))


def launches(device, dtype, d, d_v, options=USUAL, *, backward=True):
    """What the calls with a dtype and head dims launch on a GPU, each kernel once.

    Parameters
    ----------
    device : GpuDevice
    dtype : numpy.dtype
        Of q, k and v.
    d, d_v : int
    options : sequence of str
        Those of `OPTIONS` that calls may have.
    backward : bool
        Whether gradients are asked for, too.

    Returns
    -------
    list of Launch
    """
    found = {}
    for problem, direction in _problems(device.number, dtype, d, d_v, options, backward):
        for launch in make_plan(direction, problem, device).launches:
            # `lazy` is an argument of a kernel, and no part of it.
            key = launch.entry, replace(launch.config, lazy=0.0), launch.smem_bytes
            found.setdefault(key, launch)
    return list(found.values())


def _problems(number, dtype, d, d_v, options, backward):
    """(problem, direction) of each call of the grid, as if its arrays were on a GPU."""
    wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    for (Nq, Nk), (batch, heads_q, heads_k) in product(_LENGTHS, _HEADS):
        q, k, v, out = (_array((batch, heads, N, columns), dtype) for heads, N, columns in (
            (heads_q, Nq, d), (heads_k, Nk, d), (heads_k, Nk, d_v), (heads_q, Nq, d_v)))
        lse = _array((batch, heads_q, Nq), wide)
        results = (None, wide) if "out_dtype" in options and dtype != wide else (None,)
        option_sets = _option_sets(options, dtype, (batch, heads_q, Nq, Nk))
        for chosen, result in product(option_sets, results):
            bound, *_ = bind_forward(q, k, v, chosen, None, result)
            yield on_gpu(bound, number), "forward"
            for order in _deterministic(options) if backward else ():
                bound, *_ = bind_backward(out, q, k, v, out, lse, chosen, grad_dtype=result,
                                          deterministic=order)
                yield on_gpu(bound, number), "backward"


def on_gpu(problem, number):
    """The same problem with all arrays on a GPU."""
    return replace(problem, layouts=Layouts(x._replace(gpu=number) for x in problem.layouts))


def _deterministic(options):
    """The values of `deterministic`."""
    return (False, True) if "deterministic" in options else (False,)


def _option_sets(options, dtype, scores):
    """The `Options` of calls with scores of this shape, causal or not.

    Kernels are compiled for the options that a call has: each by itself, and, where not the usual
    ones are asked for, those that are together.
    """
    features = [{}]
    if "mask" in options:
        features.append({"mask": np.broadcast_to(np.True_, scores)})
    if "bias" in options:       # of a key, a row, a pair and a single score
        features += [{"bias": np.broadcast_to(np.zeros(1, dtype), shape)}
                     for shape in ((1, 1, 1, scores[3]), (1, 1, scores[2], 1), (1, 1, *scores[2:]),
                                   scores)]
    if "softcap" in options:
        features.append({"softcap": 30.0})
    if "alibi_slopes" in options:
        features.append({"alibi_slopes": np.zeros(scores[1], np.float32)})
    if "sink" in options:
        features.append({"sink": np.zeros(scores[1], accumulator_of(dtype.name))})
    if tuple(options) != USUAL and len(features) > 2:
        features.append({name: x for feature in features for name, x in feature.items()})
    precisions = ("tf32x3", "tf32") if "tf32" in options else ("tf32x3",)
    if dtype != np.float32:
        precisions = (None,)
    causal = (False, True) if "causal" in options else (False,)
    for feature, flag, precision in product(features, causal, precisions):
        yield Options(**feature, causal=flag, precision=precision)


def _array(shape, dtype):
    """A dense array as far as its layout says, with the memory of one element."""
    one = np.zeros(1, dtype)
    strides = [one.itemsize]
    for extent in shape[:0:-1]:
        strides.insert(0, strides[0] * extent)
    return as_strided(one, shape, strides)

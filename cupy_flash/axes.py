"""The axes that kernels know, put on arrays as the user gave them."""

from functools import lru_cache

import numpy as np

from .problem import Operands

_AXES = {**dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv", "dbias"), 4),
         "lse": 3, "dlse": 3}


def four_axes(problem, arrays):
    """The arrays by name as `Operands`: axes (batch, head, row, column), mask and bias broadcast.

    `lse` and `dlse` get three axes, slopes (batch, head). Nothing is copied.
    """
    if _complete(problem):
        return Operands(**arrays)
    full = (problem.batch, problem.heads_q, problem.Nq, problem.Nk)
    shapes = {"mask": full, "bias": full, "slopes": full[:2]}
    widened = dict(arrays)
    for name, x in arrays.items():
        if name in shapes:
            widened[name] = np.broadcast_to(x, shapes[name])
        elif name in _AXES and x.ndim < _AXES[name]:
            widened[name] = x.reshape((1,) * (_AXES[name] - x.ndim) + x.shape)
    return Operands(**widened)


def as_given(problem, results):
    """Results by name, without the axes of extent 1 that `four_axes` put in front."""
    if problem.axes["q"] == 4 and not problem.bias_shape:
        return results
    axes = problem.axes
    ndims = {"lse": axes["q"] - 1, "dbias": axes.get("bias")}
    return {name: x.reshape(x.shape[x.ndim - ndims.get(name, axes["q"]):])
            for name, x in results.items()}


@lru_cache(maxsize=4096)
def _complete(problem):
    """Whether the arrays of a call have these axes as they are."""
    broadcast = problem.has_mask or problem.has_alibi or problem.bias_shape
    return problem.axes["q"] == 4 and not broadcast

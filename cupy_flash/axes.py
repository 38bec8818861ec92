"""The axes that kernels know, put on arrays as the user gave them."""

from functools import lru_cache

import numpy as np

from .problem import Operands

_AXES = {**dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv", "dbias"), 4),
         "lse": 3, "dlse": 3}


def four_axes(problem, operands):
    """The operands with the axes (batch, head, row, column), mask and bias broadcast.

    `lse` and `dlse` get three axes, slopes (batch, head). Nothing is copied.
    """
    if _complete(problem):
        return operands
    full = (problem.batch, problem.heads_q, problem.Nq, problem.Nk)
    shapes = {"mask": full, "bias": full, "slopes": full[:2]}
    given = {name: x for name, x in operands._asdict().items() if x is not None}
    for name, x in given.items():
        if name in shapes:
            given[name] = np.broadcast_to(x, shapes[name])
        elif name in _AXES and x.ndim < _AXES[name]:
            given[name] = x.reshape((1,) * (_AXES[name] - x.ndim) + x.shape)
    return Operands(**given)


@lru_cache(maxsize=4096)
def _complete(problem):
    """Whether the arrays of a call have these axes as they are."""
    broadcast = problem.has_mask or problem.has_alibi or problem.bias_shape
    return problem.axes["q"] == 4 and not broadcast

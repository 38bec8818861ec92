"""The axes that kernels know, put on arrays as the user gave them."""

import numpy as np

from .options import ARRAYS, GRADIENTS, shape_of
from .problem import Operands

# How many they are, of results and of what backward takes; of all others four.
_AXES = {"lse": 3, "dlse": 3, **{name: len(one.axes) for name, one in GRADIENTS.items()}}


def four_axes(problem, arrays):
    """The arrays by name as `Operands`: axes (batch, head, row, column), options broadcast.

    Nothing is copied.
    """
    widened = {}
    for name, x in arrays.items():
        if name in ARRAYS:
            option = ARRAYS[name]
            widened[option.kernel] = np.broadcast_to(x, shape_of(option.axes, problem.scores))
        else:
            axes = _AXES.get(name, 4)
            widened[name] = x if x.ndim == axes else x.reshape((1,) * (axes - x.ndim) + x.shape)
    return Operands(**widened)

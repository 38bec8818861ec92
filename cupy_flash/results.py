"""Which arrays a pass returns: their shapes, dtypes and memory order, for both backends."""

from typing import NamedTuple

import numpy as np

from .arrays import Layout, memory_order
from .options import GRADIENTS


class Result(NamedTuple):
    """An array that a pass returns, as it is allocated.

    Attributes
    ----------
    name : str
        As in the structs of the kernels.
    extents : tuple of int
        Shape of the dense array that is its memory.
    back : tuple of int or None
        The axes of that array in the order in which the result has them; None: as they are.
    dtype : numpy.dtype
    """

    name: str
    extents: tuple[int, ...]
    back: tuple[int, ...] | None
    dtype: np.dtype

    def layout(self, name, gpu):
        """The `Layout` of the array under another name, on a GPU or (None) in CPU memory."""
        strides, step = [], self.dtype.itemsize
        for extent in reversed(self.extents):
            strides.insert(0, step)
            step *= extent
        axes = self.back or range(len(self.extents))
        return Layout(name, tuple(self.extents[axis] for axis in axes),
                      tuple(strides[axis] for axis in axes), self.dtype, True, 0, gpu)


def possible(direction, problem):
    """Every `Result` that a pass can have, by name."""
    p, layouts = problem, problem.layouts
    if direction == "forward":
        found = [_rows("out", layouts["q"], p.d_v, p.out_dtype),
                 Result("lse", layouts["q"].shape[:-1], None, _dtype(p.accumulator))]
    else:
        found = [_rows(name, layouts[name[1]], layouts[name[1]].shape[-1], p.out_dtype)
                 for name in ("dq", "dk", "dv")]
        found += [Result(name, layouts[option.name].shape, None, _dtype(p.gradient_dtype(name)))
                  for name, option in GRADIENTS.items() if option.name in layouts]
    return {result.name: result for result in found}


def missing(direction, problem):
    """The results that are asked for and that the caller gave no buffer for."""
    asked = problem.wrt if direction == "backward" else (
        ("out", "lse") if problem.returns_lse else ("out",))
    return [result for name, result in possible(direction, problem).items()
            if name in asked and name not in problem.buffers]


def numpy_arrays(results, new=np.empty):
    """Arrays of NumPy for these, by name; `new` makes one of a shape and a dtype."""
    found = {}
    for name, extents, back, dtype in results:
        x = new(extents, dtype)
        found[name] = x if back is None else x.transpose(back)
    return found


def _rows(name, like, columns, dtype):
    """A result with the axes and the memory order of the array with the layout `like`.

    So the result for a transposed view is the same view of a dense array.
    """
    order, back = memory_order(like.strides)
    extents = (*(like.shape[axis] for axis in order), columns)
    in_order = order == tuple(range(len(order)))
    return Result(name, extents, None if in_order else (*back, len(order)), _dtype(dtype))


def _dtype(name):
    """The dtype of a name, bfloat16 among them."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)

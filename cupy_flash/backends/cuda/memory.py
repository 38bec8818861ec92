"""What a call allocates on the GPU: results that the user gave no buffer for, and the workspace."""

from functools import cache
from math import prod

import cupy
import numpy as np

from ...arrays import memory_order
from ...problem import Operands

_ALIGNMENT = 256
# Up to so many bytes a call makes one allocation, and results share it: each further one costs the
# host over a microsecond. Larger results must not keep each other's memory alive.
_TOGETHER = 2**16


class Memory:
    """The allocations of a plan's calls, which all have the layouts of the first.

    Attributes
    ----------
    offsets : dict of str to int
        Where each buffer of the plan starts in the workspace, in bytes.
    """

    def __init__(self, plan, operands):
        self.offsets, end = {}, 0
        for buffer in plan.workspace:
            self.offsets[buffer.name] = end
            end += _aligned(buffer.nbytes)
        self._bytes, self._results = end, []
        for name, like, columns, dtype in _missing(plan, operands):
            shape, dtype, back = _dense(like, columns, dtype)
            nbytes = prod(shape) * dtype.itemsize
            # CuPy looks a character up faster than a dtype; that of bfloat16 it does not know.
            code = dtype.char if dtype.isbuiltin == 1 else dtype
            self._results.append((operands._fields.index(name), shape, code, back, end, nbytes))
            end += _aligned(nbytes)
        self._together = 0 < end <= _TOGETHER
        if self._together:
            self._bytes = end

    def allocate(self, operands):
        """The operands with all results, and the workspace, to be held until the last launch.

        Not by cupy.empty, which takes twice as long.
        """
        workspace = cupy.cuda.alloc(self._bytes) if self._bytes else None
        arrays, together = list(operands), self._together
        for i, shape, code, back, offset, nbytes in self._results:
            memory = workspace + offset if together else cupy.cuda.alloc(nbytes)
            x = cupy.ndarray(shape, code, memory)
            arrays[i] = x if back is None else x.transpose(back)
        return Operands._make(arrays), workspace


def _aligned(nbytes):
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _missing(plan, operands):
    """(name, array whose axes it has, columns or None for all its axes, dtype) of each result."""
    p, o = plan.problem, operands
    if plan.direction == "forward":
        if p.returns_lse and o.lse is None:
            yield "lse", o.q[..., 0], None, p.accumulator
        if o.out is None:
            yield "out", o.q, p.d_v, p.out_dtype
        return
    for name in ("dq", "dk", "dv"):
        if getattr(o, name) is None:
            like = getattr(o, name[1])
            yield name, like, like.shape[-1], p.out_dtype
    if p.bias_shape:
        yield "dbias", o.bias, None, p.dbias_dtype


def _dense(like, columns, dtype):
    """Shape in memory, dtype, and the axes that lead back to those of `like`."""
    dtype = _dtype(dtype)
    shape, back = like.shape, None
    if columns is not None:             # results keep the memory order of q, k, v
        order, back = memory_order(like.strides)
        shape = (*(shape[axis] for axis in order), columns)
        back = None if order == tuple(range(len(order))) else (*back, len(order))
    return shape, dtype, back


@cache
def _dtype(name):
    """The dtype of a name, bfloat16 among them."""
    if name == "bfloat16":
        import ml_dtypes
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)

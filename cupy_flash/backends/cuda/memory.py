"""What a call allocates on the GPU: results that the user gave no buffer for, and the workspace."""

from functools import cache
from math import prod

import cupy
import numpy as np

from ...arrays import memory_order
from ...problem import Operands

_ALIGNMENT = 256


class Memory:
    """The allocations of a plan's calls, which all have the layouts of the first.

    Attributes
    ----------
    offsets : dict of str to int
        Where each buffer of the plan starts in the workspace, in bytes.
    """

    def __init__(self, plan, operands):
        self._results = [(operands._fields.index(name), *_dense(like, columns, dtype))
                         for name, like, columns, dtype in _missing(plan, operands)]
        self.offsets, self._bytes = {}, 0
        for buffer in plan.workspace:
            self.offsets[buffer.name] = self._bytes
            self._bytes += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT

    def results(self, operands):
        """The operands with all results."""
        arrays = list(operands)
        for i, shape, dtype, nbytes, back in self._results:     # cupy.empty takes twice as long
            x = cupy.ndarray(shape, dtype, cupy.cuda.alloc(nbytes))
            arrays[i] = x if back is None else x.transpose(back)
        return Operands(*arrays)

    def workspace(self):
        """Memory for all buffers of the plan, to be held until the last launch, and its address."""
        if not self._bytes:
            return None, 0
        memory = cupy.cuda.alloc(self._bytes)
        return memory, memory.ptr


def _missing(plan, operands):
    """(name, array whose axes it has, columns or None for all its axes, dtype) of each result."""
    p, o = plan.problem, operands
    if plan.direction == "forward":
        if p.returns_lse:
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
    """Shape in memory, dtype, bytes, and the axes that lead back to those of `like`."""
    dtype = _dtype(dtype)
    shape, back = like.shape, None
    if columns is not None:             # results keep the memory order of q, k, v
        order, back = memory_order(like.strides)
        shape = (*(shape[axis] for axis in order), columns)
        back = None if order == tuple(range(len(order))) else (*back, len(order))
    return shape, dtype, prod(shape) * dtype.itemsize, back


@cache
def _dtype(name):
    """The dtype of a name, bfloat16 among them."""
    if name == "bfloat16":
        import ml_dtypes
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)

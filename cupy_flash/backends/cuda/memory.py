"""What a call allocates on the GPU: results that the user gave no buffer for, and the workspace."""

from functools import cache
from math import prod

import cupy
import numpy as np

from ...arrays import memory_order

_ALIGNMENT = 256
# Up to so many bytes a call makes one allocation, and results share it: each further one costs the
# host over a microsecond. Larger results must not keep each other's memory alive.
_TOGETHER = 2**16


class Memory:
    """The allocations of a plan's calls, which all have the layouts of the first.

    Attributes
    ----------
    offsets : dict of str to int
        Where in the block of a call its parts start, in bytes: the plan's buffers, and the results
        if they are small.
    apart : tuple of str
        The results that get memory of their own.
    """

    def __init__(self, plan, arrays):
        self.offsets, end = {}, 0
        for buffer in plan.workspace:
            self.offsets[buffer.name] = end
            end += _aligned(buffer.nbytes)
        self._bytes, self._results = end, []
        for name, like, columns, dtype in _missing(plan, arrays):
            shape, dtype, back = _dense(like, columns, dtype)
            nbytes = prod(shape) * dtype.itemsize
            # CuPy looks a character up faster than a dtype; that of bfloat16 it does not know.
            code = dtype.char if dtype.isbuiltin == 1 else dtype
            self._results.append((name, shape, code, back, end, nbytes))
            end += _aligned(nbytes)
        self.apart = tuple(name for name, *_ in self._results)
        if 0 < end <= _TOGETHER:
            self._bytes, self.apart = end, ()
            self.offsets |= {name: offset for name, *_, offset, _ in self._results}

    def allocate(self):
        """The allocations of a call.

        Not by cupy.empty, which takes twice as long, nor by calling cupy.ndarray, which besides
        calls an __init__ that does nothing.

        Returns
        -------
        results : dict of str to cupy.ndarray
        block : cupy.cuda.MemoryPointer or None
            To be held until the last launch.
        addresses : list of int
            Of the results that are `apart`.
        """
        block = cupy.cuda.alloc(self._bytes) if self._bytes else None
        results, addresses = {}, []
        new, array, apart = cupy.ndarray.__new__, cupy.ndarray, self.apart
        for name, shape, code, back, offset, nbytes in self._results:
            if apart:
                memory = cupy.cuda.alloc(nbytes)
                addresses.append(memory.ptr)
            else:
                memory = block + offset
            x = new(array, shape, code, memory)
            results[name] = x if back is None else x.transpose(back)
        return results, block, addresses


def _aligned(nbytes):
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _missing(plan, arrays):
    """(name, array whose axes it has, columns or None for all its axes, dtype) of each result."""
    p = plan.problem
    if plan.direction == "forward":
        if p.returns_lse:
            yield "lse", arrays["q"][..., 0], None, p.accumulator
        if "out" not in arrays:
            yield "out", arrays["q"], p.d_v, p.out_dtype
        return
    for name in ("dq", "dk", "dv"):
        if name not in arrays:
            like = arrays[name[1]]
            yield name, like, like.shape[-1], p.out_dtype
    if p.bias_shape:
        yield "dbias", arrays["bias"], None, p.dbias_dtype


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

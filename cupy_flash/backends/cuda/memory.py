"""What a call allocates on the GPU: results that the user gave no buffer for, and the workspace."""

from math import prod

import cupy

from ...results import missing

_ALIGNMENT = 256
# Up to so many bytes a call makes one allocation, and results share it: each further one costs the
# host over a microsecond. Larger results must not keep each other's memory alive.
_TOGETHER = 2**16


class Memory:
    """The allocations of a plan's calls.

    Attributes
    ----------
    offsets : dict of str to int
        Where in the block of a call its parts start, in bytes: the plan's buffers, and the results
        if they are small.
    apart : tuple of str
        The results that get memory of their own.
    """

    def __init__(self, plan):
        self.offsets, end = {}, 0
        for buffer in plan.workspace:
            self.offsets[buffer.name] = end
            end += _aligned(buffer.nbytes)
        self._bytes, self._results = end, []
        for name, shape, back, dtype in missing(plan.direction, plan.problem):
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
        addresses : dict of str to int
            Of the results that are `apart`.
        """
        block = cupy.cuda.alloc(self._bytes) if self._bytes else None
        results, addresses = {}, {}
        new, array, apart = cupy.ndarray.__new__, cupy.ndarray, self.apart
        for name, shape, code, back, offset, nbytes in self._results:
            if apart:
                memory = cupy.cuda.alloc(nbytes)
                addresses[name] = memory.ptr
            else:
                memory = block + offset
            x = new(array, shape, code, memory)
            results[name] = x if back is None else x.transpose(back)
        return results, block, addresses


def _aligned(nbytes):
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

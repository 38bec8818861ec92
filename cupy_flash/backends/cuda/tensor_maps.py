"""Tensor maps: how the TMA unit of sm_90 finds the boxes of an array.

The CUDA driver writes them, 128 bytes each; no CUDA device is asked. A map holds an address, so the
maps of a call are kept by the addresses of its arrays.
"""

import ctypes
from array import array
from functools import cache

from ...plan.cuda import kernel_of

_BYTES = 128
_ALIGNMENT = 64
_MOST_KEPT = 256
_ELEMENTS = {"float16": 6, "bfloat16": 9}
_SWIZZLE_128B, _PROMOTION_256B = 3, 3


class TensorMaps:
    """The maps of a plan's calls, which all have the layouts of the first.

    `names` are the operands that have one. Results that do not leave by the TMA unit have zeros.
    """

    def __init__(self, plan, operands):
        (kernel, launch), = ((kernel_of(x.entry), x) for x in plan.launches
                             if kernel_of(x.entry).maps)
        self.names = kernel.maps
        boxes = kernel.boxes(plan.problem, launch.config)
        self.makers = [
            _maker(plan.problem.dtype, getattr(operands, name), *boxes[name]) if boxes[name]
            else _no_map for name in self.names]
        self._kept, self._made = {}, {}

    def __call__(self, *addresses):
        """The maps of the arrays with these `names`, by their addresses, as words of 8 bytes."""
        maps = self._kept.get(addresses)
        if maps is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
                self._made.clear()
            made = [self._map(*x) for x in enumerate(addresses)]
            maps = self._kept[addresses] = array("Q", b"".join(made))
        return maps

    def _map(self, i, address):
        """One of the maps. Those of q, k, v stay when a call has another out."""
        made = self._made.get((i, address))
        if made is None:
            made = self._made[i, address] = self.makers[i](address)
        return made


def _no_map(address):
    """The bytes in the place of a map that is not read."""
    return bytes(_BYTES)


def _maker(dtype, x, order, box):
    """The `MapMaker` of a four-axes array whose axes, innermost first, are `order`."""
    # The stride of an axis with one entry may be any number, and is not used.
    strides = [x.strides[i] if x.shape[i] > 1 else 16 for i in order[1:]]
    return MapMaker(dtype, [x.shape[i] for i in order], strides, box)


class MapMaker:
    """The maps of one array's layout, wherever the array lies.

    Parameters
    ----------
    dtype : str
    extents : tuple of int
        Of four axes, the innermost first.
    strides : tuple of int
        Bytes from one entry to the next of all axes but the innermost: multiples of 16.
    box : tuple of int
        What one copy moves of each axis; 64 of the innermost.
    """

    def __init__(self, dtype, extents, strides, box):
        self._array = ctypes.c_int(_ELEMENTS[dtype]), ctypes.c_uint32(4)
        self._layout = (
            (ctypes.c_uint64 * 4)(*extents), (ctypes.c_uint64 * 3)(*strides),
            (ctypes.c_uint32 * 4)(*box), (ctypes.c_uint32 * 4)(1, 1, 1, 1),
            ctypes.c_int(0), ctypes.c_int(_SWIZZLE_128B), ctypes.c_int(_PROMOTION_256B),
            ctypes.c_int(0),        # outside the array: zeros
        )

    def __call__(self, address):
        """The map of the array at an address."""
        # Of this call alone: other threads run while the driver writes.
        buffer = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
        place = -(-ctypes.addressof(buffer) // _ALIGNMENT) * _ALIGNMENT
        status = _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(place), *self._array, ctypes.c_void_p(address), *self._layout)
        if status:
            raise RuntimeError(f"cuTensorMapEncodeTiled returned the status {status}")
        return ctypes.string_at(place, _BYTES)


@cache
def _driver():
    """The library of the CUDA driver."""
    return ctypes.CDLL("nvcuda.dll" if hasattr(ctypes, "WinDLL") else "libcuda.so.1")

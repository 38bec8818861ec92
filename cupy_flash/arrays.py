"""Arrays of NumPy and CuPy: layouts, checking buffers, memory order, copies."""

from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import numpy as np

OFFSETS = 16                # the widest load: no kernel asks for more of an address
_OVERLAP_EFFORT = 10_000    # bound on the exact search; if it gives up, arrays count as overlapping


class Layout(NamedTuple):
    """An array without its elements: all that most of the validation looks at.

    Of the address of a CuPy array, `offset` is the rest by 16; `gpu` is the device it lies on.
    """

    name: str
    shape: tuple
    strides: tuple
    dtype: np.dtype
    aligned: bool
    offset: int = 0
    gpu: int | None = None

    @property
    def ndim(self):
        """Number of axes."""
        return len(self.shape)

    @property
    def dense(self):
        """Whether kernels can read it as it is: last axis contiguous, elements aligned."""
        itemsize = self.dtype.itemsize
        return self.aligned and (self.shape[-1] <= 1 or self.strides[-1] == itemsize
                                 or 0 in self.shape)


class Layouts:
    """The `Layout` of each array of a call: one after the other, or by its name."""

    def __init__(self, layouts=()):
        self._named = {layout.name: layout for layout in layouts}

    def __iter__(self):
        return iter(self._named.values())

    def __contains__(self, name):
        return name in self._named

    def __getitem__(self, name):
        return self._named[name]


class Arrays(NamedTuple):
    """The arrays of a call, and where they lie, both by the names of the public functions."""

    named: dict
    addresses: dict


def layouts(arrays):
    """What arrays, all of NumPy or all of CuPy, say about themselves: each is asked once.

    Returns
    -------
    layouts : tuple
        The fields of the `Layout` of each.
    addresses : dict of str to int
        Where they lie.
    """
    found, addresses = [], {}
    if isinstance(arrays["q"], np.ndarray):
        for name, x in arrays.items():
            addresses[name] = x.__array_interface__["data"][0]
            found.append((name, x.shape, x.strides, x.dtype, x.flags.aligned))
    else:
        for name, x in arrays.items():
            data = x.data
            address = addresses[name] = data.ptr
            found.append((name, x.shape, x.strides, x.dtype, True, address % OFFSETS,
                          data.device_id))
    return tuple(found), addresses


def address_of(x):
    """Where an array of NumPy or CuPy starts."""
    return x.__array_interface__["data"][0] if isinstance(x, np.ndarray) else x.data.ptr


def on_device_of(x):
    """A context in which CuPy works on the device of `x`; for a NumPy array one without effect."""
    return nullcontext() if isinstance(x, np.ndarray) else x.device


def check_buffer(name, x, others):
    """A result buffer: writable, every element once, apart from the arrays in `others`."""
    read_only = _is_read_only(x)
    x = _addresses(x)
    if read_only:
        raise ValueError(f"`{name}` is read-only, expected memory that may be written to (memory "
                         "that comes through DLPack counts as read-only unless its library says "
                         "otherwise)")
    if not x.flags.aligned:
        raise ValueError(f"`{name}` is not aligned, expected elements at multiples of their size")
    if _overlaps_itself(x):
        raise ValueError(f"`{name}` has strides {x.strides} for shape {x.shape}: elements overlap, "
                         "expected each to have memory of its own")
    for other_name, other in others.items():
        if _overlap(x, _addresses(other)):
            raise ValueError(f"`{name}` overlaps `{other_name}` in memory, expected a buffer of "
                             "its own")


def _is_read_only(x):
    """Whether an array may not be written to; CuPy does not ask, but keeps whom it could ask."""
    if isinstance(x, np.ndarray):
        return not x.flags.writeable
    owner = getattr(x.data.mem, "_owner", None)
    if owner is None:
        return False
    try:
        return bool(owner.__cuda_array_interface__["data"][1])
    except Exception:       # it has no such interface, or not now: a tensor that wants a gradient
        return False


class _Addresses:
    """The layout of a CuPy array as NumPy takes it in. Nothing ever looks at the elements."""

    def __init__(self, x):
        self.__array_interface__ = {"version": 3, "shape": x.shape, "strides": x.strides,
                                    "typestr": f"|V{x.itemsize}", "data": (x.data.ptr, False)}


def _addresses(x):
    """A NumPy array with the addresses of `x`, so that NumPy's test of overlaps serves both."""
    return x if isinstance(x, np.ndarray) else np.asarray(_Addresses(x))


def _overlap(x, other):
    """Whether two arrays share an element; True as well if that is too hard to tell."""
    try:
        return np.shares_memory(x, other, max_work=_OVERLAP_EFFORT)
    except np.exceptions.TooHardError:
        return True


def _overlaps_itself(x):
    """Whether an element of `x` lies where another does, as far as strides and extents tell."""
    reach = x.itemsize
    extents = zip(x.strides, x.shape, strict=True)
    for stride, extent in sorted((abs(s), n) for s, n in extents if n > 1):
        if stride < reach:
            return x.size > 0
        reach = stride * (extent - 1) + reach
    return False


@lru_cache(maxsize=4096)
def memory_order(strides):
    """The axes before the last as they follow each other in memory, and the way back.

    An array allocated in this order and transposed back has the axes of the array with these
    strides, in the order of its memory.
    """
    axes = range(len(strides) - 1)
    order = sorted(axes, key=lambda axis: (strides[axis] != 0, -abs(strides[axis])))
    return tuple(order), tuple(sorted(axes, key=order.__getitem__))


def dense_copy(x):
    """A copy of a NumPy or CuPy array with rows contiguous, the other axes ordered as in memory."""
    order, back = memory_order(x.strides)
    last = x.ndim - 1
    return x.transpose(*order, last).copy(order="C").transpose(*back, last)

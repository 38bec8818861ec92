"""How results are judged, and memory that notices what it should not.

The rule for every output and every gradient: NaN and infinities sit at the same places as in
the reference, and the largest error is at most twice that of a plain program in the same dtype
plus four units of the output dtype at the largest value of the reference. The error of a plain
program that was right by luck counts as `answers.floors` and `answers.floor_of_draws` say.
"""

import ml_dtypes
import numpy as np

NAN_BYTE = 0xFF  # every float dtype reads a run of these bytes as NaN
CANARY_BYTE = 0xA5


def eps(dtype):
    """Distance from 1 to the next number of `dtype`."""
    return float(ml_dtypes.finfo(dtype).eps)


def assert_as_accurate_as_baseline(name, got, want64, baseline64, floor=0.0):
    """Raise AssertionError unless `got` is as near to `want64` as the rule asks.

    Parameters
    ----------
    name : str
        Case and quantity, for the message.
    got : numpy.ndarray
        The result in its own dtype, which sets the unit of the rule.
    want64, baseline64 : numpy.ndarray
        The reference and the plain program, in float64 (or wider).
    floor : float
        Least error that the plain program is credited with: with few entries it may be right by
        luck. 0 wherever the entries are many.
    """
    assert got.shape == want64.shape, f"{name}: shape {got.shape}, expected {want64.shape}"
    wide = np.result_type(want64.dtype, np.float64)
    value, want = got.astype(wide), want64.astype(wide)
    assert_same_nonfinite(name, value, want)
    if not want.size:
        return
    finite = np.isfinite(want)
    error = np.where(finite, np.abs(np.where(finite, value, 0) - np.where(finite, want, 0)), 0)
    plain = np.abs(np.where(finite, baseline64.astype(wide), 0) - np.where(finite, want, 0))
    largest = np.abs(np.where(finite, want, 0)).max()
    limit = 2 * max(plain.max(), floor) + 4 * eps(got.dtype) * largest
    if not error.max() <= limit:
        at = np.unravel_index(error.argmax(), error.shape)
        raise AssertionError(
            f"{name}: at {tuple(map(int, at))} got {value[at]!r}, expected {want[at]!r}: error "
            f"{error.max():.3e} exceeds {limit:.3e} (a plain program errs by {plain.max():.3e}, "
            f"the largest value is {largest:.3e}); {int((error > limit).sum())} of {error.size} "
            f"entries are beyond the limit"
        )


def assert_same_nonfinite(name, got, want):
    """NaN, +inf and -inf must sit at the same places."""
    for kind, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        differ = test(got) != test(want)
        if differ.any():
            at = np.unravel_index(differ.argmax(), differ.shape)
            raise AssertionError(
                f"{name}: {kind} at different places, {int(differ.sum())} of {differ.size}; first "
                f"at {tuple(map(int, at))}: got {got[at]!r}, expected {want[at]!r}"
            )


def assert_bit_equal(name, got, want):
    """Same dtype, same shape, same bits; a NaN equals itself, and -0 differs from 0."""
    assert got.dtype == want.dtype, f"{name}: dtype {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
    bits = np.dtype(f"u{got.dtype.itemsize}")
    a, b = (np.ascontiguousarray(x).view(bits) for x in (got, want))
    differ = a != b
    if differ.any():
        at = np.unravel_index(differ.argmax(), differ.shape)
        raise AssertionError(
            f"{name}: {int(differ.sum())} of {differ.size} entries differ in bits; first at "
            f"{tuple(map(int, at))}: got {got[at]!r}, expected {want[at]!r}"
        )


class Fence:
    """An array in the middle of a larger buffer whose other bytes all hold one value.

    `margin` elements lie before and behind the array on every axis, so rows do not touch each
    other and the base pointer is aligned to the element only. With `NAN_BYTE` around an input a
    read outside the array turns up as NaN; with `CANARY_BYTE` around an output
    `assert_untouched` finds a write outside it.
    """

    def __init__(self, shape, dtype, byte, xp=np, margin=3):
        outer = tuple(n + 2 * margin for n in shape)
        size = int(np.prod(outer, dtype=np.int64)) * np.dtype(dtype).itemsize
        self.xp, self.byte = xp, byte
        self.buffer = xp.full(size, byte, np.uint8)
        self._inside = tuple(slice(margin, margin + n) for n in shape)
        self._outer = self.buffer.view(dtype).reshape(outer)
        self.array = self._outer[self._inside]

    def assert_untouched(self, name):
        """Raise AssertionError when a byte around the array no longer holds the fence's value."""
        around = self.xp.ones(self._outer.shape, bool)
        around[self._inside] = False
        itemsize = self.array.dtype.itemsize
        cells = self.buffer.reshape(*self._outer.shape, itemsize)
        touched = (cells != self.byte).any(axis=-1) & around
        if touched.any():
            first = tuple(int(x[0]) for x in self.xp.nonzero(touched))
            raise AssertionError(
                f"{name}: {int(touched.sum())} elements outside the array were written, the first "
                f"at {first} of a buffer of shape {self._outer.shape}"
            )


def fenced(array, byte=NAN_BYTE, xp=np, margin=3):
    """A copy of `array` with `byte` all around it."""
    fence = Fence(array.shape, array.dtype, byte, xp, margin)
    fence.array[...] = array
    return fence.array


def fill_free_memory(xp, byte):
    """Leave `byte` in memory that the next allocations are likely to get: fresh it is zero."""
    kept = [xp.full(2**n, byte, np.uint8) for n in range(4, 23) for _ in range(2)]
    del kept

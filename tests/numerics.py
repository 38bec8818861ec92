"""How results are judged, and memory that notices what it should not.

Two rules for every output and every gradient, beside NaN and infinities at the same places as in
the reference. For the whole array: the largest error is at most twice the baseline's, a plain
program in the same dtype, plus four units of the output dtype at the largest value of the
reference. For rows, as `assert_rows_as_accurate` says: so a small row beside a large one is seen.

What the baseline's error is, is settled before the result is looked at: that of one draw of the
data, or of `DRAWS` where `draws_for` says that one may flatter it.
"""

import ml_dtypes
import numpy as np

NAN_BYTE = 0xFF  # every float dtype reads a run of these bytes as NaN
CANARY_BYTE = 0xA5

FEW, FEW_ROWS, DRAWS = 1000, 32, 8
NEAREST = 128       # rows, by norm, among which the baseline's largest error counts
CANCELLED = 1e-12   # rows this far below the largest are rounding errors of the reference itself


def eps(dtype):
    """Distance from 1 to the next number of `dtype`."""
    return float(ml_dtypes.finfo(dtype).eps)


def draws_for(size, queries):
    """How many draws of the data count for an array of `size` elements of a problem.

    A problem of a few queries counts as small however many keys it has: the rounding of a query's
    `lse` and delta is in the gradients of all keys, so thousands of rows are a few samples.
    """
    return DRAWS if size < FEW or queries <= FEW_ROWS else 1


def assert_as_accurate_as_baseline(name, got, want, draws, floor=0.0):
    """Raise AssertionError unless the error of `got` is within the rule for the whole array.

    Parameters
    ----------
    name : str
        Case and quantity, for the message.
    got : numpy.ndarray
        The result in its own dtype, which sets the unit of the rule.
    want : numpy.ndarray
        The reference, in float64 (or wider).
    draws : iterable of (numpy.ndarray, numpy.ndarray)
        The reference and the baseline in float64 (or wider), for draw after draw of the data:
        the largest error of the baseline counts.
    floor : float
        Least error that the baseline is credited with, see `answers.floors`.
    """
    assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
    wide = np.result_type(want.dtype, np.float64)
    value = got.astype(wide)
    assert_same_nonfinite(name, value, want)
    if not want.size:
        return
    error = _errors(value, want)
    largest = _largest(want)
    limit = 0.0
    for truth, plain in draws:
        # A further draw can only raise the limit, so none is made once the error is within it.
        limit = max(limit, 2 * max(_errors(plain, truth).max(), floor)
                    + 4 * eps(got.dtype) * largest)
        if error.max() <= limit:
            return
    at = np.unravel_index(error.argmax(), error.shape)
    raise AssertionError(
        f"{name}: at {tuple(map(int, at))} got {value[at]!r}, expected {want[at]!r}: error "
        f"{error.max():.3e} exceeds {limit:.3e} (the largest value is {largest:.3e}); "
        f"{int((error > limit).sum())} of {error.size} entries are beyond the limit"
    )


def assert_rows_as_accurate(name, got, want, draws, floor=0.0):
    """Raise AssertionError unless the rows of `got`, its last axis, are within the rule for rows.

    Relative to its own norm, the error of a row is at most twice the baseline's largest among the
    `NEAREST` rows of nearest norm, the baseline rounded to the dtype of `got` and credited with a
    quarter of a unit. In float32 it is half of one: a GPU adds up an operand from two parts in TF32
    even where a row sees one key and the baseline is exact. `max(4, 0.2 %)` of the rows may be
    beyond that: terms cancel in them, and the baseline's luck decides. Rows that are not finite,
    and those below `CANCELLED`, are left to the rule for the whole array. The parameters are those
    of `assert_as_accurate_as_baseline`; a floor counts in proportion to the norm.
    """
    norm, error = row_norms(want), row_norms(got.astype(want.dtype), want)
    seen = np.flatnonzero(norm > CANCELLED * np.fmax.reduce(norm, initial=0))
    seen = seen[np.argsort(norm[seen], kind="stable")]
    allowed = max(4, len(seen) // 500)
    if len(seen) <= allowed:
        return
    factors = error[seen] / norm[seen]
    unit = eps(got.dtype) / (2 if got.dtype == np.float32 else 4)
    least = max(unit, floor / _largest(want))
    near = np.full(len(seen), least)
    for truth, plain in draws:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            plain = plain.astype(got.dtype).astype(truth.dtype)
            relative = (row_norms(plain, truth) / row_norms(truth))[seen]
        near = np.fmax(near, largest_of_nearest(relative))
        beyond = factors > 2 * near
        if beyond.sum() <= allowed:
            return
    worst = np.argsort(factors / near)[::-1][:allowed + 1]
    lines = [f"row {tuple(map(int, np.unravel_index(seen[i], want.shape[:-1])))} of norm "
             f"{norm[seen[i]]:.1e} errs by {factors[i]:.2e} of it, the baseline by {near[i]:.2e}"
             for i in (worst[0], worst[-1])]
    raise AssertionError(f"{name}: {int(beyond.sum())} of {len(seen)} rows are beyond the rule for "
                         f"rows, {allowed} may be; {'; '.join(lines)}")


def _largest(want):
    """The largest finite value."""
    return float(np.abs(np.where(np.isfinite(want), want, 0)).max(initial=0))


def _errors(value, want):
    """|value - want|, and 0 where `want` is not finite."""
    finite = np.isfinite(want)
    return np.abs(np.where(finite, value, 0) - np.where(finite, want, 0))


def row_norms(x, origin=None):
    """Norm of `x - origin` along the last axis, flat, NaN unless all is finite; never overflows."""
    with np.errstate(invalid="ignore"):
        x = np.abs(x if origin is None else x - origin)
    unit = x.max(axis=-1, keepdims=True, initial=0)
    with np.errstate(invalid="ignore"):
        x = x / np.where(unit == 0, 1, unit)
    return (np.sqrt(np.square(x).sum(axis=-1)) * unit[..., 0]).ravel()


def largest_of_nearest(x):
    """The largest of the `NEAREST` entries around each one: windows grow by doubling."""
    if len(x) <= NEAREST:
        return np.full_like(x, np.fmax.reduce(x))
    largest, width = x, 1
    while width < NEAREST:
        largest, width = np.fmax(largest[:-width], largest[width:]), 2 * width
    return largest[np.clip(np.arange(len(x)) - NEAREST // 2, 0, len(largest) - 1)]


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

"""The element types of user arrays as kernels see them: float16 and bfloat16 travel as integers.

Numba knows neither 16-bit type. Both are widened in the tile by bit tricks, exact for all 65,536
patterns, and narrowed to nearest even, like NumPy and ml_dtypes.
"""

import numpy as np
from numba import types
from numba.extending import overload, register_jitable

from .elementary import bit_cast

FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = range(4)
KINDS = {"float16": FLOAT16, "bfloat16": BFLOAT16, "float32": FLOAT32, "float64": FLOAT64}
ROUND_NOT, ROUND_TF32 = -1, -2  # beside FLOAT16 and BFLOAT16: how `round_tile` rounds

_U = np.uint32
_INF_BITS = _U(0x7F800000)
_TF32_MAX_BITS = _U(0x7F7FE000)


@register_jitable
def _float16_to_float32(x):
    magnitude = _U(x & np.uint16(0x7FFF))
    scaled = bit_cast(_U(magnitude << _U(13)), np.float32) * np.float32(2.0**112)
    bits = bit_cast(scaled, np.uint32)
    bits = _U(bits | _INF_BITS) if magnitude >= _U(0x7C00) else bits
    return bit_cast(_U(bits | _U(_U(x & np.uint16(0x8000)) << _U(16))), np.float32)


@register_jitable
def _bfloat16_to_float32(x):
    return bit_cast(_U(_U(np.uint16(x)) << _U(16)), np.float32)


@register_jitable
def to_float16(x):
    """The bits of the float32 `x` rounded to float16, to nearest even; NaN stays NaN."""
    bits = bit_cast(x, np.uint32)
    sign = _U(_U(bits >> _U(16)) & _U(0x8000))
    size = _U(bits & _U(0x7FFFFFFF))
    # Below 2^-14 the spacing of halves is fixed: adding 0.5 lets the FPU round at that spacing.
    small = _U(
        bit_cast(np.float32(bit_cast(size, np.float32) + np.float32(0.5)), np.uint32)
        - _U(0x3F000000)
    )
    normal = _U(_U(size + _U(0xC8000FFF) + _U(_U(size >> _U(13)) & _U(1))) >> _U(13))
    huge = _U(0x7C00) if size <= _INF_BITS else _U(0x7E00)
    rounded = small if size < _U(0x38800000) else normal
    return np.uint16(sign | (huge if size >= _U(0x477FF000) else rounded))


@register_jitable
def to_bfloat16(x):
    """The bits of the float32 `x` rounded to bfloat16, to nearest even; NaN stays NaN."""
    bits = bit_cast(x, np.uint32)
    rounded = _U(_U(bits + _U(0x7FFF) + _U(_U(bits >> _U(16)) & _U(1))) >> _U(16))
    quiet = _U(_U(bits >> _U(16)) | _U(0x40))
    return np.int16(quiet if _U(bits & _U(0x7FFFFFFF)) > _INF_BITS else rounded)


@register_jitable
def round_to_tf32(x):
    """`x` rounded to the 10 mantissa bits of TF32, ties away from zero.

    A finite value stays finite: TF32's infinity for the largest float32 would turn a masked value
    into NaN (0 * inf).
    """
    bits = bit_cast(x, np.uint32)
    size = _U(bits & _U(0x7FFFFFFF))
    rounded = _U(_U(size + _U(0x1000)) & _U(0xFFFFE000))
    rounded = _TF32_MAX_BITS if rounded >= _INF_BITS else rounded
    rounded = size if size >= _INF_BITS else rounded
    return bit_cast(_U(_U(bits & _U(0x80000000)) | rounded), np.float32)


def widen(x):
    """A carried element as a float; usable in kernels only."""
    raise NotImplementedError


@overload(widen, jit_options={"error_model": "numpy"})
def _widen(x):
    if x == types.uint16:
        return lambda x: _float16_to_float32(x)
    if x == types.int16:
        return lambda x: _bfloat16_to_float32(x)
    return lambda x: x

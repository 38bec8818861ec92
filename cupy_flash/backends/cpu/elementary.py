"""`exp` and `tanh` that LLVM's loop vectoriser can take: polynomials and bit patterns, no libm.

The polynomials are Chebyshev interpolations made at import in long double, so no table of
constants has to be trusted. Largest relative errors: `exp` 2e-7 and 4e-16 however large the
argument, `tanh` 4e-7 and 6e-16, in float32 and float64.
"""

import numpy as np
from numba import types
from numba.extending import intrinsic, overload, register_jitable

_LN2 = np.log(np.longdouble(2))
_JIT_OPTIONS = {"fastmath": {"contract"}, "error_model": "numpy"}


@intrinsic
def bit_cast(typingctx, x, to):
    """The bits of the scalar `x` as a value of the type `to`."""
    target = to.dtype if isinstance(to, types.NumberClass) else to

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(target))

    return target(x, to), codegen


def interpolate(function, low, high, degree):
    """Coefficients, lowest first, of the polynomial through the Chebyshev nodes of [low, high]."""
    ld = np.longdouble
    nodes = np.cos(ld(np.pi) * (np.arange(degree + 1) + ld(0.5)) / (degree + 1))
    nodes = (ld(low) + ld(high)) / 2 + (ld(high) - ld(low)) / 2 * nodes
    divided = function(nodes)
    for k in range(1, degree + 1):
        divided[k:] = (divided[k:] - divided[k - 1 : -1]) / (nodes[k:] - nodes[:-k])
    coefficients = np.zeros(degree + 1, ld)
    for k in range(degree, -1, -1):  # Newton's form -> monomials
        coefficients[1:], coefficients[0] = (
            coefficients[:-1] - nodes[k] * coefficients[1:],
            divided[k] - nodes[k] * coefficients[0],
        )
    return coefficients


def _make_exp(real, integer, mantissa_bits, bias, degree):
    magic = real(1.5 * 2.0**mantissa_bits)  # adding it rounds to an integer in the low bits
    low, shift, offset = real(-bias * _LN2), integer(mantissa_bits), integer(bias)
    log2_e = real(1 / _LN2)
    # Short enough for every n * ln2 to be exact: the argument is reduced without a rounding.
    ln2 = real(np.round(_LN2 * 2**(mantissa_bits - 12)) / 2**(mantissa_bits - 12))
    rest_of_ln2 = real(_LN2 - np.longdouble(ln2))
    coefficients = interpolate(np.exp, -_LN2 / 2, _LN2 / 2, degree)
    coefficients[0] = 1  # exp(0) = 1 exactly: an unmoved row keeps its sum
    even = tuple(real(c) for c in coefficients[0::2][::-1])
    odd = tuple(real(c) for c in coefficients[1::2][::-1])

    @register_jitable(**_JIT_OPTIONS)
    def exp(x):
        """e**x for x * log2(e) < 128 (1024); 0 at -inf and wherever the result is denormal."""
        x = low if x < low else x  # NaN stays NaN
        t = x * log2_e + magic
        n = t - magic
        f = x - n * ln2 - n * rest_of_ln2
        g = f * f  # two Horner chains in f*f: half the latency of one
        p, r = even[0], odd[0]
        for c in even[1:]:
            p = p * g + c
        for c in odd[1:]:
            r = r * g + c
        p = r * f + p
        power = integer((bit_cast(t, integer) + offset) << shift)  # Numba widens int32 sums
        return p * bit_cast(power, real)

    return exp


def _make_tanh(real, exp, degree):
    border = real(0.625)
    coefficients = interpolate(lambda z: np.tanh(np.sqrt(z)) / np.sqrt(z), 0, 0.625**2, degree)
    horner = tuple(real(c) for c in coefficients[::-1])
    one, minus_two = real(1), real(-2)

    @register_jitable(**_JIT_OPTIONS)
    def tanh(x):
        """Relative accuracy everywhere: a polynomial below 0.625, (1 - e) / (1 + e) above."""
        size = abs(x)
        z = size * size
        p = horner[0]
        for c in horner[1:]:
            p = p * z + c
        e = exp(minus_two * size)
        large = (one - e) / (one + e)
        large = large if x > 0 else -large
        return large if size > border else x * p  # NaN takes the polynomial and stays NaN

    return tanh


_EXP = {
    types.float32: _make_exp(np.float32, np.int32, 23, 127, 6),
    types.float64: _make_exp(np.float64, np.int64, 52, 1023, 11),
}
_TANH = {
    types.float32: _make_tanh(np.float32, _EXP[types.float32], 6),
    types.float64: _make_tanh(np.float64, _EXP[types.float64], 12),
}


def exp(x):
    """e**x in the precision of `x`; usable in kernels only."""
    raise NotImplementedError


def tanh(x):
    """tanh(x) in the precision of `x`; usable in kernels only."""
    raise NotImplementedError


@overload(exp, jit_options=_JIT_OPTIONS)
def _exp(x):
    exp_x = _EXP[x]
    return lambda x: exp_x(x)


@overload(tanh, jit_options=_JIT_OPTIONS)
def _tanh(x):
    tanh_x = _TANH[x]
    return lambda x: tanh_x(x)

"""The numbers, flags and words of a call, checked as far as that goes without the arrays."""

import math
import operator

import numpy as np

from .intake import is_on_gpu, is_traced, library
from .problem import GRADIENT_OF, UNLIMITED, accumulator_of
from .words import described, kind_of, shown

_PRECISIONS = ("tf32x3", "tf32")
_DEFAULTS = {"scale": "1 / sqrt(d)", "softcap": "no cap"}
_ONE_OFFSET = ("an integer on the host, one for the whole call: pass `int(q_offset)`; where "
               "lengths differ, `q_lens` and `kv_lens` align each batch entry")
_TRACED = "JAX traces it: make it static (`static_argnames`)"
_ONE_SIDE = "each side to be an integer, or None for unlimited: pass `int(...)` or None"


def numbers(options):
    """Scale, softcap, left, right, q_offset and precision of a call's options."""
    scale = None if options.scale is None else real("scale", options.scale)
    softcap = 0.0 if options.softcap is None else _softcap(options.softcap)
    left, right, offset = _positions(options)
    precision = options.precision
    if precision is not None and (not isinstance(precision, str) or precision not in _PRECISIONS):
        raise ValueError(f"`precision` is {shown(precision)}, expected 'tf32x3' (the default, as "
                         "exact as float32) or 'tf32': leave it out for the default")
    return scale, softcap, left, right, offset, precision


def real(name, value):
    """A finite number on the host as a Python float, whatever it was spelled as."""
    host = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if isinstance(value, np.ndarray):
        host = value.ndim == 0 and value.dtype.kind in "iuf" and library(type(value)) is not None
    if not host:
        raise TypeError(_no_real(name, value))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"`{name}` is {shown(value)}, expected a finite number: leave it out for "
                         f"{_DEFAULTS[name]}")
    return number


def _no_real(name, value):
    """Why a value is no number of its own, and what to write."""
    if isinstance(value, bool):
        return f"`{name}` is {value}, expected a number: leave it out for {_DEFAULTS[name]}"
    came = f"`{name}` is a {kind_of(value)}"
    if is_traced(value):
        return f"{came}, expected a number on the host: {_TRACED}"
    if getattr(value, "shape", ()):
        one = f"{came} of shape {value.shape}, expected one number for all"
        if name == "scale":
            return (f"{one}: multiply `q` by a scale of each head, as in "
                    "`q * scale[:, None, None]` with scale=1.0")
        return f"{one}: pass `float({name}[0])`, or make one call for each head"
    if is_on_gpu(value):
        return (f"{came}, expected a number on the host (an array on a GPU would have to be waited "
                f"for): pass a Python number, or `float({name})`, which waits")
    if isinstance(value, complex):
        return f"{came}, expected a real number: pass `{name}.real`"
    if isinstance(value, str) or hasattr(type(value), "__float__"):
        return f"{came}, expected a number of Python or NumPy: pass `float({name})`"
    return f"{came}, expected a number of Python or NumPy: leave it out for {_DEFAULTS[name]}"


def _softcap(softcap):
    """The bound of the scores; 0 for none."""
    value = real("softcap", softcap)
    if value < 0:
        raise ValueError(f"`softcap` is {value}, expected a positive number: None or 0 for none")
    return value


def _integer(name, value, whole, expected):
    """An integer of Python or NumPy; the argument is `whole`, of which `value` may be a part."""
    if type(value) is int:
        return value
    try:
        if isinstance(value, (bool, np.bool_)) or (hasattr(value, "shape") and is_on_gpu(value)):
            raise TypeError     # True is no position, and a GPU would have to be waited for
        return operator.index(value)
    except TypeError:
        if is_traced(value):
            expected = f"an integer on the host: {_TRACED}"
        came = (described(value) if whole is value
                else f"{shown(whole)} with a {kind_of(value)}")
        raise TypeError(f"`{name}` is {came}, expected {expected}") from None


def check_flag(name, value):
    """A bool of Python or NumPy, and nothing that is merely true or false."""
    if value is True or value is False or isinstance(value, np.bool_):
        return
    if getattr(value, "shape", ()):
        next_step = "an array of which keys may be seen is `mask=`"
    elif is_traced(value):
        next_step = _TRACED
    elif isinstance(value, str):
        next_step = f"pass `{name}=True` or `{name}=False`"
    else:
        next_step = f"pass `bool({name})`" if value is not None else f"leave `{name}` out for False"
    raise TypeError(f"`{name}` is {described(value)}, expected a bool: {next_step}")


def operand_names(wrt):
    """The names of operands in `wrt`, each one that there is and once; None: of all."""
    if wrt is None:
        return None
    names = f"{', '.join(GRADIENT_OF)}"
    if not isinstance(wrt, (tuple, list)):
        step = '`("q", "k")`, or leave it out for all'
        if isinstance(wrt, str) and wrt in GRADIENT_OF:
            step = f'`("{wrt}",)`'
        raise TypeError(f"`wrt` is {described(wrt)}, expected a tuple of names ({names}): pass "
                        f"{step}")
    for name in wrt:
        if not isinstance(name, str) or name not in GRADIENT_OF:
            kind = ValueError if isinstance(name, str) else TypeError
            operand = {gradient: name for name, gradient in GRADIENT_OF.items()}.get(
                name if isinstance(name, str) else "", "q")
            raise kind(f"`wrt` has {shown(name)}, expected names of operands ({names}): as in "
                       f'`wrt=("{operand}",)`')
    if not wrt:
        raise ValueError(f"`wrt` is {wrt}, expected one name or more ({names}): leave it out for "
                         "the gradients of all")
    if len({*wrt}) < len(wrt):
        raise ValueError(f"`wrt` is {wrt}, expected each name once: pass "
                         "`tuple(dict.fromkeys(wrt))`")
    return tuple(wrt)


def _positions(options):
    """Left, right and offset of the visible keys; causal is right = 0."""
    check_flag("causal", options.causal)
    left = right = UNLIMITED
    if options.window is not None:
        left, right = _window(options.window)
    offset = options.q_offset
    if offset is not None:
        offset = _integer("q_offset", offset, offset, _ONE_OFFSET)
        if abs(offset) > UNLIMITED:
            raise ValueError(f"`q_offset` is {shown(offset)}, expected -2**40 to 2**40: "
                             "nothing changes beyond, so pass the nearer of the two")
    return left, 0 if options.causal else right, offset


def _window(window):
    """Left and right; more than the largest number stands for is unlimited."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        hint = "pass `(left, right)`; W tokens, the query's own included, are `(W - 1, 0)`"
        if getattr(window, "shape", None) == (2,):
            hint = "pass `tuple(window)`"
        raise TypeError(f"`window` is {shown(window)}, expected (left, right), each an integer or "
                        f"None: {hint}")
    sides = [UNLIMITED if side is None else _integer("window", side, window, _ONE_SIDE)
             for side in window]
    if min(sides) < 0:
        mended = tuple(None if side is not None and side < 0 else side for side in window)
        raise ValueError(f"`window` is {shown(window)}, expected each side to be 0 or "
                         f"more: None means unlimited, as in `window={mended}`")
    return [min(side, UNLIMITED) for side in sides]


def result_dtype(name, wanted):
    """(name, dtype) of the results, None for that of q; what is no dtype stays as it is."""
    if wanted is None:
        return name, None
    try:
        return name, np.dtype(wanted)
    except (TypeError, ValueError, SyntaxError):
        return name, shown(wanted)


def allowed_result(name, wanted, dtype):
    """The dtype of the results: that of q, or the accumulator's."""
    if wanted is None:
        return np.dtype(dtype)
    allowed = dict.fromkeys((dtype, accumulator_of(dtype)))
    if isinstance(wanted, str) or wanted.name not in allowed or not wanted.isnative:
        raise TypeError(f"`{name}` is {wanted}, expected None or {' or '.join(allowed)} for "
                        f"{dtype} inputs: pass `np.{accumulator_of(dtype)}`, or leave it out, and "
                        "cast the results by `.astype`")
    return wanted

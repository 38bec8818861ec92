"""From a call to a `Problem` and its `Operands`: all validation of the library, and only here.

Every message starts with the argument's name, then says what came and what is expected. What can be
said without looking at an element is said about layouts, by `_problem`, which remembers: a repeated
call is recognised by its layouts and numbers, and nothing else of it is looked at again.
"""

import math
import operator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from . import device
from .arrays import (
    Layout,
    check_buffer,
    common_family,
    dense_copy,
    layouts,
    library,
    on_device_of,
    take,
)
from .problem import UNLIMITED, Mask, Problem, accumulator_of

DTYPES = ("float16", "bfloat16", "float32", "float64")
MAX_HEAD_DIM, MAX_GPU_ROWS = 256, 2**30 - 1
_BUFFERS = ("dq", "dk", "dv")
_ARRAY_OPTIONS = ("mask", "bias", "alibi_slopes", "q_lens", "kv_lens")


class Options(NamedTuple):
    """What may be said beside q, k, v, arrays first; the words of `cupy_flash.attention`."""

    mask: Any = None
    bias: Any = None
    alibi_slopes: Any = None
    q_lens: Any = None
    kv_lens: Any = None
    scale: Any = None
    causal: bool = False
    q_offset: int | None = None
    window: tuple | None = None
    softcap: float | None = None
    precision: str | None = None


def bind_forward(q, k, v, options, out=None, out_dtype=None, returns_lse=True):
    """What a forward call asks for, and of which arrays.

    Returns
    -------
    problem : Problem
    arrays : dict of str to ndarray
        By the names that `Operands` has for them; those that the kernels cannot read, copied.
    addresses : list of int
        Where those on a GPU lie, in the same order; of NumPy arrays, none.
    """
    arrays = {"q": q, "k": k, "v": v}
    if out is not None:
        arrays["out"] = out
    return _bind("forward", arrays, options, ("out_dtype", out_dtype), returns_lse, False)


def describe(q, k, v, options):
    """Problem of a forward call; nothing is copied."""
    arrays = _take_all({"q": q, "k": k, "v": v}, options)
    return _describe("forward", arrays, options, ("out_dtype", None), True, False)[0]


def bind_backward(dout, q, k, v, out, lse, options, *, dlse=None, deterministic=False,
                  grad_dtype=None, dq=None, dk=None, dv=None):
    """What a backward call asks for, and of which arrays; see `bind_forward`."""
    _check_flag("deterministic", deterministic)
    arrays = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}
    if dlse is not None:
        arrays["dlse"] = dlse
    if not dq is dk is dv is None:
        given = zip(_BUFFERS, (dq, dk, dv), strict=True)
        arrays |= {name: x for name, x in given if x is not None}
    return _bind("backward", arrays, options, ("grad_dtype", grad_dtype), False,
                 bool(deterministic))


def _bind(direction, arrays, options, wanted, returns_lse, deterministic):
    """Both passes; `wanted` is the argument that names the results' dtype, and its value."""
    arrays = _take_all(arrays, options)
    problem, addresses = _describe(direction, arrays, options, wanted, returns_lse,
                                   deterministic)
    for name in problem.buffers:
        check_buffer(name, arrays[name], {o: x for o, x in arrays.items() if o != name})
    if problem.copied:
        with on_device_of(arrays["q"]):
            arrays |= {name: dense_copy(arrays[name]) for name in problem.copied}
        addresses = layouts(arrays)[1]
    if problem.has_alibi:
        arrays = {"slopes" if name == "alibi_slopes" else name: x for name, x in arrays.items()}
    return problem, arrays, addresses


def _describe(direction, arrays, options, wanted, returns_lse, deterministic):
    """The problem, made or remembered, and the addresses; lengths in CPU memory are looked at."""
    named, addresses = layouts(arrays)
    problem = _problem(direction, named, _numbers(options), _result_dtype(*wanted), returns_lse,
                       deterministic)
    if problem.has_q_lens:
        _check_lens("q_lens", arrays["q_lens"], problem.Nq)
    if problem.has_kv_lens:
        _check_lens("kv_lens", arrays["kv_lens"], problem.Nk)
    return problem, addresses


def _take_all(arrays, options):
    """All arrays of the call by name, as NumPy or CuPy arrays; absent options are left out."""
    o = options
    if not o.mask is o.bias is o.alibi_slopes is o.q_lens is o.kv_lens is None:
        given = zip(_ARRAY_OPTIONS, o, strict=False)
        arrays |= {name: x for name, x in given if x is not None}
    family = common_family(arrays)
    if family == "cpu":
        return {name: take(name, x) for name, x in arrays.items()}
    if family == "gpu":
        return {name: x if library(type(x)) else device.adopt(name, x)
                for name, x in arrays.items()}
    return arrays


def _numbers(options):
    """Scale, softcap, left, right, q_offset and precision, checked as far as they stand alone."""
    scale = None if options.scale is None else _real("scale", options.scale)
    softcap = 0.0 if options.softcap is None else _softcap(options.softcap)
    left, right, offset = _positions(options)
    if options.precision not in (None, "tf32x3", "tf32"):
        raise ValueError(f"`precision` is {options.precision!r}, expected 'tf32x3' (the default) "
                         "or 'tf32'")
    return scale, softcap, left, right, offset, options.precision


@lru_cache(maxsize=4096)
def _problem(direction, arrays, numbers, result_dtype, returns_lse, deterministic):
    """The `Problem` of a call, after every check that needs no element."""
    scale, softcap, left, right, q_offset, precision = numbers
    wanted_name, wanted = result_dtype
    named = {name: Layout(*fields) for name, *fields in arrays}
    q, k, v = (named[name] for name in "qkv")
    _check_dtypes(q, k, v)
    batch, heads_q, heads_k = _check_shapes(q, k, v)
    full = (batch, heads_q, q.shape[-2], k.shape[-2])
    _check_options(named, full)
    if precision is not None and q.dtype != np.float32:
        raise ValueError(f"`precision` is {precision!r} for {q.dtype} inputs, expected None: it "
                         "applies to float32 only")
    if q.dtype == np.float32:
        precision = precision or "tf32x3"
    dtype = _allowed_result(wanted_name, wanted, q.dtype.name)
    bias = named.get("bias")
    if direction == "forward":
        buffers = {"out": (*q.shape[:-1], v.shape[-1])}
    else:
        _check_results(named)
        buffers = {name: named[name[1]].shape for name in _BUFFERS}
    buffers = {name: shape for name, shape in buffers.items() if name in named}
    for name, shape in buffers.items():
        _check_result_buffer(name, named[name], shape, dtype)
    for name, x in named.items():
        _check_place(name, x, q)
    return Problem(
        batch=batch, heads_q=heads_q, heads_k=heads_k, Nq=q.shape[-2], Nk=k.shape[-2],
        d=q.shape[-1], d_v=v.shape[-1], dtype=q.dtype.name, out_dtype=dtype.name,
        precision=precision, scale=q.shape[-1]**-0.5 if scale is None else scale, softcap=softcap,
        mask=Mask(left, right, q_offset),
        bias_shape=None if bias is None else (1,) * (4 - bias.ndim) + bias.shape,
        dbias_dtype=None if bias is None else (bias.dtype if wanted is None else dtype).name,
        copied=tuple(name for name in _dense_operands(direction)
                     if name in named and not named[name].dense),
        buffers=tuple(buffers), unaligned=tuple(name for name, x in named.items() if x.offset),
        gpu=q.gpu, has_alibi="alibi_slopes" in named, returns_lse=returns_lse,
        deterministic=deterministic, layouts=arrays, **{
            f"has_{name}": name in named for name in ("mask", "q_lens", "kv_lens", "dlse")},
    )


def _dense_operands(direction):
    """Operands whose rows the kernels read as they lie."""
    gradients = () if direction == "forward" else ("dout", "out")
    return "q", "k", "v", *gradients, "q_lens", "kv_lens"


def _check_dtypes(q, k, v):
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_dtype(name, x, DTYPES)
        if x.dtype != q.dtype:
            raise TypeError(f"`{name}` has dtype {x.dtype}, but `q` has {q.dtype}: q, k and v must "
                            "have the same")


def _check_dtype(name, x, allowed, hint=""):
    if x.dtype.name not in allowed:
        raise TypeError(f"`{name}` has dtype {x.dtype}, expected {' or '.join(allowed)}{hint}")
    if not x.dtype.isnative:
        raise TypeError(f"`{name}` has byte order {x.dtype.str}, expected the native one")


def _check_shapes(q, k, v):
    """Batch, query heads and key heads."""
    layout = "expected (N, d), (H, N, d) or (B, H, N, d)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not 2 <= x.ndim <= 4:
            raise ValueError(f"`{name}` has {x.ndim} axes (shape {x.shape}), {layout}")
        if x.ndim != q.ndim:
            raise ValueError(f"`{name}` has {x.ndim} axes (shape {x.shape}), but `q` has {q.ndim} "
                             f"(shape {q.shape}): all three must have as many, {layout}")
        if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(f"`{name}` has head dim {x.shape[-1]} (shape {x.shape}), expected 1 "
                             f"to {MAX_HEAD_DIM}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"`k` has head dim {k.shape[-1]}, but `q` has {q.shape[-1]}: both must be "
                         f"equal (q {q.shape}, k {k.shape}; {layout})")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"`v` has shape {v.shape}, but `k` has {k.shape}: all axes but the last "
                         f"must be equal, {layout}")
    (batch, heads_q), (batch_k, heads_k) = ((1, 1, *x.shape[:-2])[-2:] for x in (q, k))
    if batch_k != batch:
        raise ValueError(f"`k` has batch {batch_k} (shape {k.shape}), but `q` has {batch} (shape "
                         f"{q.shape}): both must be equal, {layout}")
    if heads_q != heads_k and (heads_k == 0 or heads_q % heads_k):
        raise ValueError(f"`q` has {heads_q} heads and `k` has {heads_k} (q {q.shape}, k "
                         f"{k.shape}): the query heads must be a multiple of the key heads, "
                         f"{layout}")
    return batch, heads_q, heads_k


def _check_array(name, x, shape, dtypes):
    _check_dtype(name, x, tuple(dict.fromkeys(t.name for t in dtypes)))
    if x.shape != shape:
        raise ValueError(f"`{name}` has shape {x.shape}, expected {shape}")


def _check_options(named, full):
    """Mask, bias, slopes and lengths beside scores of shape `full`."""
    batch, heads_q = full[:2]
    if "mask" in named:
        _check_dtype("mask", named["mask"], ("bool",), " (True = may attend)")
    if "bias" in named:
        _check_dtype("bias", named["bias"], DTYPES)
    for name in ("mask", "bias"):
        if name in named and not _broadcasts(named[name].shape, full):
            raise ValueError(f"`{name}` has shape {named[name].shape}, expected one that "
                             f"broadcasts to (batch, heads, Nq, Nk) = {full}")
    slopes = named.get("alibi_slopes")
    if slopes is not None:
        _check_dtype("alibi_slopes", slopes, ("float32", "float64"))
        if slopes.shape not in ((heads_q,), (batch, heads_q)):
            raise ValueError(f"`alibi_slopes` has shape {slopes.shape}, expected ({heads_q},) or "
                             f"({batch}, {heads_q}): one per query head, or per batch entry and "
                             "head")
    for name in ("q_lens", "kv_lens"):
        if name in named:
            _check_dtype(name, named[name], ("int32",))
            if named[name].shape != (batch,):
                raise ValueError(f"`{name}` has shape {named[name].shape}, expected ({batch},): "
                                 "one per batch entry")


def _broadcasts(shape, full):
    """Whether an array of this shape broadcasts to `full`, and to nothing larger."""
    try:
        return np.broadcast_shapes(shape, full) == full
    except ValueError:
        return False


def _check_results(named):
    """What backward takes from forward, and the gradients that reach it."""
    q, v = named["q"], named["v"]
    rows = q.shape[:-1]
    accumulator = np.dtype(accumulator_of(q.dtype.name))
    for name in ("dout", "out"):
        _check_array(name, named[name], (*rows, v.shape[-1]), (q.dtype, accumulator))
    for name in ("lse", "dlse"):
        if name in named:
            _check_array(name, named[name], rows, (accumulator,))


def _check_result_buffer(name, x, shape, dtype):
    if x.dtype != dtype or not x.dtype.isnative:
        raise TypeError(f"`{name}` has dtype {x.dtype}, expected {dtype}: results are not cast")
    if x.shape != shape:
        raise ValueError(f"`{name}` has shape {x.shape}, expected {shape}")


def _check_place(name, x, q):
    """Arrays are on one device that counts their rows, elements on borders (NumPy: `aligned`)."""
    if x.gpu != q.gpu:
        raise ValueError(f"`{name}` is on GPU {x.gpu}, but `q` is on GPU {q.gpu}: all arrays must "
                         "be on the same GPU")
    if x.gpu is not None and name in ("q", "k") and x.shape[-2] > MAX_GPU_ROWS:
        raise ValueError(f"`{name}` has {x.shape[-2]} rows (shape {x.shape}), expected at most "
                         f"{MAX_GPU_ROWS}: a GPU counts them in 32 bits")
    if x.offset % x.dtype.itemsize:
        raise ValueError(f"`{name}` starts at an address that is no multiple of its "
                         f"{x.dtype.itemsize}-byte elements, expected one: pass a copy")
    if x.aligned and any(n > 1 and s % x.dtype.itemsize
                         for n, s in zip(x.shape, x.strides, strict=True)):
        raise ValueError(f"`{name}` has strides {x.strides}, expected multiples of its "
                         f"{x.dtype.itemsize}-byte elements: pass a copy")


def _check_lens(name, lens, extent):
    """On a GPU the lengths are not read: the kernels clamp them."""
    if isinstance(lens, np.ndarray):
        outside = np.flatnonzero((lens < 0) | (lens > extent))
        if outside.size:
            b = int(outside[0])
            raise ValueError(f"`{name}`[{b}] is {int(lens[b])}, expected 0 to {extent}")


def _softcap(softcap):
    value = _real("softcap", softcap)
    if value < 0:
        raise ValueError(f"`softcap` is {value}, expected a positive number, or None or 0 for none")
    return value


def _real(name, value):
    """A finite number on the host as a Python float, whatever it was spelled as."""
    host = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if isinstance(value, np.ndarray):
        host = value.ndim == 0 and value.dtype.kind in "iuf"
    if not host:
        raise TypeError(f"`{name}` is a {type(value).__module__}.{type(value).__qualname__}, "
                        "expected a number on the host (an array on a GPU would have to be waited "
                        "for)")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"`{name}` is {value}, expected a finite number")
    return number


def _integer(name, value, low, high):
    """An integer of Python or NumPy in [low, high]."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` is {value!r} of type {type(value).__qualname__}, expected an "
                        "integer") from None
    if not low <= number <= high:
        raise ValueError(f"`{name}` is {number}, expected {low} to {high}")
    return number


def _check_flag(name, value):
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"`{name}` is {value!r} of type {type(value).__qualname__}, expected a "
                        "bool")


def _positions(options):
    """Left, right and offset of the visible keys; causal is right = 0."""
    _check_flag("causal", options.causal)
    left = right = UNLIMITED
    if options.window is not None:
        window = options.window
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise TypeError(f"`window` is {window!r}, expected (left, right), each an integer or "
                            "None")
        left, right = (UNLIMITED if side is None else _integer("window", side, 0, UNLIMITED)
                       for side in window)
    offset = options.q_offset
    if offset is not None:
        offset = _integer("q_offset", offset, -UNLIMITED, UNLIMITED)
    return left, 0 if options.causal else right, offset


def _result_dtype(name, wanted):
    """(name, dtype) of the results, None for that of q; what is no dtype stays as it is."""
    if wanted is None:
        return name, None
    try:
        return name, np.dtype(wanted)
    except TypeError:
        return name, repr(wanted)


def _allowed_result(name, wanted, dtype):
    """The dtype of the results: that of q, or the accumulator's."""
    if wanted is None:
        return np.dtype(dtype)
    allowed = dict.fromkeys((dtype, accumulator_of(dtype)))
    if isinstance(wanted, str) or wanted.name not in allowed or not wanted.isnative:
        raise TypeError(f"`{name}` is {wanted}, expected None or {' or '.join(allowed)} for "
                        f"{dtype} inputs")
    return wanted

"""From a call to a `Problem` and its `Operands`: all validation of the library, and only here.

Every message starts with the argument's name, then says what came and what is expected.
"""

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .arrays import check_buffer, check_families, empty_rows_like, take, unit_stride
from .problem import UNLIMITED, Mask, Operands, Problem, accumulator_of

DTYPES = ("float16", "bfloat16", "float32", "float64")
MAX_HEAD_DIM = 256
_ARRAY_OPTIONS = ("mask", "bias", "alibi_slopes", "q_lens", "kv_lens")


@dataclass(frozen=True)
class Options:
    """What may be said beside q, k, v; the words of `cupy_flash.attention`."""

    scale: Any = None
    causal: bool = False
    q_offset: int | None = None
    window: tuple | None = None
    mask: Any = None
    bias: Any = None
    softcap: float | None = None
    alibi_slopes: Any = None
    q_lens: Any = None
    kv_lens: Any = None
    precision: str | None = None


def bind_forward(q, k, v, options, out=None, out_dtype=None):
    """Problem and operands of a forward call.

    Returns
    -------
    problem : Problem
    operands : Operands
    """
    arrays = _take_all(options, q=q, k=k, v=v, out=out)
    problem, operands = _bind_common(arrays, options)
    dtype = _result_dtype("out_dtype", out_dtype, problem)
    problem = replace(problem, out_dtype=dtype.name)
    if out is not None:
        shape = (*arrays["q"].shape[:-1], problem.d_v)
        check_buffer("out", arrays["out"], shape, dtype, _inputs(arrays, "out"))
        operands = operands._replace(out=_four_axes(arrays["out"]))
    return problem, operands


def bind_backward(dout, q, k, v, out, lse, options, *, dlse=None, deterministic=False,
                  grad_dtype=None, dq=None, dk=None, dv=None):
    """Problem and operands of a backward call; see `bind_forward`."""
    buffers = {"dq": dq, "dk": dk, "dv": dv}
    arrays = _take_all(options, q=q, k=k, v=v, dout=dout, out=out, lse=lse, dlse=dlse, **buffers)
    problem, operands = _bind_common(arrays, options)
    _check_flag("deterministic", deterministic)
    rows = arrays["q"].shape[:-1]
    accumulator = np.dtype(problem.accumulator)
    for name in ("dout", "out"):
        allowed = (arrays["q"].dtype, accumulator)
        _check_array(name, arrays[name], (*rows, problem.d_v), allowed)
    for name in ("lse", "dlse"):
        if arrays.get(name) is not None:
            _check_array(name, arrays[name], rows, (accumulator,))
    grad = None if grad_dtype is None else _result_dtype("grad_dtype", grad_dtype, problem)
    problem = replace(problem, out_dtype=(grad or arrays["q"].dtype).name,
                       has_dlse=dlse is not None)
    if grad is not None and problem.bias_shape:
        problem = replace(problem, dbias_dtype=grad.name)
    for name, buffer in buffers.items():
        if buffer is not None:
            like = arrays[name[1]]
            others = _inputs(arrays, name)
            check_buffer(name, arrays[name], like.shape, grad or like.dtype, others)
    dense, copied = _dense({name: arrays[name] for name in ("dout", "out")})
    problem = replace(problem, copied=problem.copied + copied)
    given = {name: _four_axes(x) for name, x in arrays.items() if name in buffers}
    return problem, operands._replace(
        dout=_four_axes(dense["dout"]), out=_four_axes(dense["out"]), lse=_three_axes(arrays["lse"]),
        dlse=None if dlse is None else _three_axes(arrays["dlse"]), **given,
    )


def _take_all(options, **arrays):
    """All arrays of the call by name, as NumPy arrays; absent ones are left out."""
    arrays |= {name: getattr(options, name) for name in _ARRAY_OPTIONS}
    required = ("q", "k", "v", "dout", "lse")
    named = {name: x for name, x in arrays.items() if x is not None or name in required}
    check_families(named)
    return {name: take(name, x) for name, x in named.items()}


def _bind_common(arrays, options):
    """What both passes share: q, k, v and the options."""
    q, k, v = (arrays[name] for name in "qkv")
    _check_dtypes(q, k, v)
    batch, heads_q, heads_k = _check_shapes(q, k, v)
    extents = {"batch": batch, "heads_q": heads_q, "heads_k": heads_k, "Nq": q.shape[-2],
               "Nk": k.shape[-2], "d": q.shape[-1], "d_v": v.shape[-1]}
    full = (batch, heads_q, q.shape[-2], k.shape[-2])
    mask, bias, slopes = (arrays.get(name) for name in ("mask", "bias", "alibi_slopes"))
    bias_shape = None
    if mask is not None:
        _check_dtype("mask", mask, ("bool",), " (True = may attend)")
        mask = _broadcast("mask", mask, full)
    if bias is not None:
        _check_dtype("bias", bias, DTYPES)
        bias_shape = (1,) * (4 - bias.ndim) + bias.shape
        bias = _broadcast("bias", bias, full)
    if slopes is not None:
        slopes = _slopes(slopes, batch, heads_q)
    lens = {name: _lens(name, arrays.get(name), batch, extents[extent])
            for name, extent in (("q_lens", "Nq"), ("kv_lens", "Nk"))}
    dense, copied = _dense({"q": q, "k": k, "v": v})
    problem = Problem(
        **extents, dtype=q.dtype.name, out_dtype=q.dtype.name,
        precision=_precision(options.precision, q.dtype), scale=_scale(options.scale, q.shape[-1]),
        softcap=_softcap(options.softcap), mask=_mask(options), bias_shape=bias_shape,
        dbias_dtype=None if bias is None else bias.dtype.name,
        has_mask=mask is not None, has_alibi=slopes is not None, copied=copied,
        **{f"has_{name}": x is not None for name, x in lens.items()},
    )
    four = {name: _four_axes(x) for name, x in dense.items()}
    return problem, Operands(**four, mask=mask, bias=bias, slopes=slopes, **lens)


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
            raise ValueError(f"`{name}` has head dim {x.shape[-1]} (shape {x.shape}), expected 1 to "
                             f"{MAX_HEAD_DIM}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"`k` has head dim {k.shape[-1]}, but `q` has {q.shape[-1]}: both must be "
                         f"equal (q {q.shape}, k {k.shape}; {layout})")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"`v` has shape {v.shape}, but `k` has {k.shape}: all axes but the last "
                         f"must be equal, {layout}")
    (batch, heads_q), (batch_k, heads_k) = (((1, 1) + x.shape[:-2])[-2:] for x in (q, k))
    if batch_k != batch:
        raise ValueError(f"`k` has batch {batch_k} (shape {k.shape}), but `q` has {batch} (shape "
                         f"{q.shape}): both must be equal, {layout}")
    if heads_q != heads_k and (heads_k == 0 or heads_q % heads_k):
        raise ValueError(f"`q` has {heads_q} heads and `k` has {heads_k} (q {q.shape}, k {k.shape}): "
                         f"the query heads must be a multiple of the key heads, {layout}")
    return batch, heads_q, heads_k


def _check_array(name, x, shape, dtypes):
    _check_dtype(name, x, tuple(dict.fromkeys(t.name for t in dtypes)))
    if x.shape != shape:
        raise ValueError(f"`{name}` has shape {x.shape}, expected {shape}")


def _broadcast(name, x, full):
    try:
        if x.ndim > 4:
            raise ValueError
        return np.broadcast_to(x, full)
    except ValueError:
        raise ValueError(f"`{name}` has shape {x.shape}, expected one that broadcasts to "
                         f"(batch, heads, Nq, Nk) = {full}") from None


def _slopes(slopes, batch, heads_q):
    _check_dtype("alibi_slopes", slopes, ("float32", "float64"))
    if slopes.shape not in ((heads_q,), (batch, heads_q)):
        raise ValueError(f"`alibi_slopes` has shape {slopes.shape}, expected ({heads_q},) or "
                         f"({batch}, {heads_q}): one per query head, or per batch entry and head")
    return np.broadcast_to(slopes, (batch, heads_q))


def _lens(name, lens, batch, extent):
    if lens is None:
        return None
    _check_dtype(name, lens, ("int32",))
    if lens.shape != (batch,):
        raise ValueError(f"`{name}` has shape {lens.shape}, expected ({batch},): one per batch entry")
    outside = np.flatnonzero((lens < 0) | (lens > extent))
    if outside.size:
        b = int(outside[0])
        raise ValueError(f"`{name}`[{b}] is {int(lens[b])}, expected 0 to {extent}")
    return np.ascontiguousarray(lens)


def _scale(scale, d):
    return d**-0.5 if scale is None else _real("scale", scale)


def _softcap(softcap):
    value = 0.0 if softcap is None else _real("softcap", softcap)
    if value < 0:
        raise ValueError(f"`softcap` is {value}, expected a positive number, or None or 0 for none")
    return value


def _real(name, value):
    """A finite number on the host as a Python float, whatever it was spelled as."""
    host = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if isinstance(value, np.ndarray):
        host = value.ndim == 0 and value.dtype.kind in "iuf"
    if not host:
        raise TypeError(f"`{name}` is a {type(value).__module__}.{type(value).__qualname__}, expected "
                        "a number on the host (an array on a GPU would have to be waited for)")
    if not math.isfinite(value):
        raise ValueError(f"`{name}` is {value}, expected a finite number")
    return float(value)


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
        raise TypeError(f"`{name}` is {value!r} of type {type(value).__qualname__}, expected a bool")


def _mask(options):
    _check_flag("causal", options.causal)
    window = (None, None) if options.window is None else options.window
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"`window` is {window!r}, expected (left, right), each an integer or None")
    left, right = (UNLIMITED if side is None else _integer("window", side, 0, UNLIMITED)
                   for side in window)
    offset = options.q_offset
    if offset is not None:
        offset = _integer("q_offset", offset, -UNLIMITED, UNLIMITED)
    return Mask(left, 0 if options.causal else right, offset)


def _precision(precision, dtype):
    if dtype != np.float32:
        if precision is not None:
            raise ValueError(f"`precision` is {precision!r} for {dtype} inputs, expected None: it "
                             "applies to float32 only")
        return None
    if precision not in (None, "tf32x3", "tf32"):
        raise ValueError(f"`precision` is {precision!r}, expected 'tf32x3' (the default) or 'tf32'")
    return precision or "tf32x3"


def _result_dtype(name, wanted, problem):
    allowed = dict.fromkeys((problem.dtype, problem.accumulator))
    try:
        dtype = np.dtype(problem.dtype if wanted is None else wanted)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in allowed or not dtype.isnative:
        raise TypeError(f"`{name}` is {wanted!r}, expected None or {' or '.join(allowed)} for "
                        f"{problem.dtype} inputs")
    return dtype


def _dense(arrays):
    """Arrays that kernels can read, and the names of those that had to be copied for it."""
    copied = tuple(name for name, x in arrays.items() if not unit_stride(x))
    dense = dict(arrays)
    for name in copied:
        dense[name] = empty_rows_like(arrays[name], arrays[name].shape[-1], arrays[name].dtype)
        dense[name][...] = arrays[name]
    return dense, copied


def _inputs(arrays, name):
    return {other: x for other, x in arrays.items() if other != name}


def _four_axes(x):
    return x[(None,) * (4 - x.ndim)]


def _three_axes(x):
    return x[(None,) * (3 - x.ndim)]

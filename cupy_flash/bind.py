"""From a call to a `Problem` and its arrays: all validation of the library, and only here.

`intake` takes the objects in, `scalars` looks at numbers and words, `checks` at layouts. Every
message starts with the argument's name, then says what came, what is expected and what to do. What
can be said without looking at an element is said about layouts, by `_problem`, which remembers: a
repeated call is recognised by its layouts and numbers, and nothing else of it is looked at again.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .arrays import Layout, check_buffer, dense_copy, layouts, on_device_of, result_layout
from .checks import (
    check_dtypes,
    check_lens,
    check_options,
    check_order,
    check_place,
    check_result_buffer,
    check_results,
    check_shapes,
)
from .intake import take_all
from .problem import Mask, Problem
from .scalars import allowed_result, check_flag, numbers, result_dtype

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


def describe(q, k, v, options, wanted=("out_dtype", None)):
    """Problem of a forward call; nothing is copied. `wanted` as in `_bind`."""
    arrays = _take_all({"q": q, "k": k, "v": v}, options)
    return _describe("forward", arrays, options, wanted, True, False)[0]


def describe_both(arrays, options, *, out_dtype=None, returns_lse=False, deterministic=False,
                  grad_dtype=None):
    """Problems of a forward call and of the backward call after it; nothing is copied.

    `arrays` has q, k and v by name, and ``out, dout, lse, dlse, dq, dk, dv``, None where not given.
    `out` is the buffer of the one call and an argument of the other. What the backward call lacks
    gets the layout that a forward call would give it.
    """
    check_flag("return_lse", returns_lse)
    check_flag("deterministic", deterministic)
    given = {name: x for name, x in arrays.items() if x is not None or name in ("q", "k", "v")}
    taken = _take_all(given, options)
    backwards = ("dout", "lse", "dlse", *_BUFFERS)
    ahead = {name: x for name, x in taken.items() if name not in backwards}
    forward, _ = _describe("forward", ahead, options, ("out_dtype", out_dtype), bool(returns_lse),
                           False)
    _check_buffers(forward, ahead)
    q, dtype = forward.layouts[0], ahead["q"].dtype if out_dtype is None else forward.out_dtype
    missing = {"dout": result_layout("dout", q, forward.d_v, dtype),
               "out": result_layout("out", q, forward.d_v, dtype),
               "lse": result_layout("lse", q, None, forward.accumulator)}
    named = missing | {entry[0]: entry for entry in layouts(taken)[0]}
    backward = _problem("backward", tuple(named.values()), numbers(options),
                        result_dtype("grad_dtype", grad_dtype), False, bool(deterministic))
    _check_buffers(backward, taken)
    return forward, backward


def check_pullback(q, k, v, options, deterministic, grad_dtype):
    """What a pullback will be called with, looked at before the forward pass is computed."""
    check_flag("deterministic", deterministic)
    if grad_dtype is not None:
        describe(q, k, v, options, ("grad_dtype", grad_dtype))


def bind_backward(dout, q, k, v, out, lse, options, dlse=None, deterministic=False, grad_dtype=None,
                  dq=None, dk=None, dv=None):
    """What a backward call asks for, and of which arrays; see `bind_forward`."""
    check_flag("deterministic", deterministic)
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
    _check_buffers(problem, arrays)
    if problem.copied:
        with on_device_of(arrays["q"]):
            arrays |= {name: dense_copy(arrays[name]) for name in problem.copied}
        addresses = layouts(arrays)[1]
    if problem.has_alibi:
        arrays = {"slopes" if name == "alibi_slopes" else name: x for name, x in arrays.items()}
    return problem, arrays, addresses


def _check_buffers(problem, arrays):
    """Buffers that are writable and lie apart from all other arrays of the call."""
    for name in problem.buffers:
        check_buffer(name, arrays[name], {o: x for o, x in arrays.items() if o != name})


def _describe(direction, arrays, options, wanted, returns_lse, deterministic):
    """The problem, made or remembered, and the addresses; lengths in CPU memory are looked at."""
    named, addresses = layouts(arrays)
    problem = _problem(direction, named, numbers(options), result_dtype(*wanted), returns_lse,
                       deterministic)
    if problem.has_q_lens:
        check_lens("q_lens", arrays["q_lens"], problem.Nq)
    if problem.has_kv_lens:
        check_lens("kv_lens", arrays["kv_lens"], problem.Nk)
    return problem, addresses


def _take_all(arrays, options):
    """All arrays of the call by name, as NumPy or CuPy arrays; absent options are left out."""
    o = options
    if not o.mask is o.bias is o.alibi_slopes is o.q_lens is o.kv_lens is None:
        given = zip(_ARRAY_OPTIONS, o, strict=False)
        arrays |= {name: x for name, x in given if x is not None}
    return take_all(arrays)


@lru_cache(maxsize=4096)
def _problem(direction, arrays, values, wanted, returns_lse, deterministic):
    """The `Problem` of a call, after every check that needs no element."""
    scale, softcap, left, right, q_offset, precision = values
    wanted_name, wanted = wanted
    named = {name: Layout(*fields) for name, *fields in arrays}
    q, k, v = (named[name] for name in "qkv")
    if direction == "backward":
        check_order(named)
    check_dtypes(q, k, v)
    batch, heads_q, heads_k = check_shapes(q, k, v)
    check_options(named, (batch, heads_q, q.shape[-2], k.shape[-2]), heads_k)
    if precision is not None and q.dtype != np.float32:
        raise ValueError(f"`precision` is {precision!r} for {q.dtype} inputs, expected None, for "
                         "it applies to float32 only: leave it out")
    if q.dtype == np.float32:
        precision = precision or "tf32x3"
    dtype = allowed_result(wanted_name, wanted, q.dtype.name)
    bias = named.get("bias")
    if direction == "forward":
        buffers = {"out": (*q.shape[:-1], v.shape[-1])}
    else:
        check_results(named)
        buffers = {name: named[name[1]].shape for name in _BUFFERS}
    buffers = {name: shape for name, shape in buffers.items() if name in named}
    for name, shape in buffers.items():
        check_result_buffer(name, named[name], shape, dtype)
    for name, x in named.items():
        check_place(name, x, q)
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

"""From a call to a `Problem` and its arrays: all validation of the library, and only here.

`intake` takes the objects in, `scalars` looks at numbers and words, `checks` at layouts. Every
message starts with the argument's name, then says what came, what is expected and what to do. What
can be said without looking at an element is said about layouts, by `_problem`, which remembers: a
repeated call is recognised by its layouts and numbers, and nothing else of it is looked at again.
"""

from collections import namedtuple
from functools import lru_cache
from operator import is_not

import numpy as np

from .arrays import (
    Arrays,
    Layout,
    Layouts,
    address_of,
    check_buffer,
    dense_copy,
    layouts,
    on_device_of,
)
from .checks import (
    check_dtypes,
    check_lens,
    check_options,
    check_order,
    check_place,
    check_result_buffer,
    check_results,
    check_shapes,
    gradients,
)
from .intake import take_all
from .options import ARRAYS, OPTIONS
from .problem import WRT, Mask, Problem
from .results import possible
from .scalars import allowed_result, check_flag, numbers, operand_names, result_dtype

_BUFFERS = ("dq", "dk", "dv")
_NO_ARRAYS = (None,) * len(ARRAYS)      # the beginning of `Options`

Options = namedtuple("Options", [option.name for option in OPTIONS],
                     defaults=[option.default for option in OPTIONS])
Options.__doc__ = "What may be said beside q, k, v, arrays first; the words of `attention`."


def bind_forward(q, k, v, options, out=None, out_dtype=None, returns_lse=True):
    """What a forward call asks for, and of which arrays.

    Returns
    -------
    problem : Problem
    arrays : Arrays
        Those that the kernels cannot read, copied.
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
                  grad_dtype=None, wrt=None):
    """Problems of a forward call and of the backward call after it; nothing is copied.

    `arrays` has q, k and v by name, and ``out, dout, lse, dlse, dq, dk, dv``, None where not given.
    `out` is the buffer of the one call and an argument of the other. What the backward call lacks
    gets the layout that a forward call would give it.
    """
    check_flag("return_lse", returns_lse)
    check_flag("deterministic", deterministic)
    wrt = operand_names(wrt)
    given = {name: x for name, x in arrays.items() if x is not None or name in ("q", "k", "v")}
    taken = _take_all(given, options)
    backwards = ("dout", "lse", "dlse", *_BUFFERS)
    ahead = {name: x for name, x in taken.items() if name not in backwards}
    forward, _ = _describe("forward", ahead, options, ("out_dtype", out_dtype), bool(returns_lse),
                           False)
    _check_buffers(forward, ahead)
    results = possible("forward", forward)
    missing = [results[like].layout(name, forward.gpu)
               for name, like in (("dout", "out"), ("out", "out"), ("lse", "lse"))]
    named = {entry[0]: entry for entry in (*missing, *layouts(taken)[0])}
    backward = _problem("backward", tuple(named.values()), numbers(options),
                        result_dtype("grad_dtype", grad_dtype), False, bool(deterministic), wrt)
    _check_buffers(backward, taken)
    return forward, backward


def check_pullback(q, k, v, options, deterministic, grad_dtype, wrt):
    """What a pullback will be called with, looked at before the forward pass is computed."""
    check_flag("deterministic", deterministic)
    wrt = operand_names(wrt)
    if grad_dtype is not None:
        describe(q, k, v, options, ("grad_dtype", grad_dtype))
    if wrt is not None:
        given = {"q", "k", "v", *(name for name in ARRAYS if getattr(options, name) is not None)}
        gradients(given, wrt)


def bind_backward(dout, q, k, v, out, lse, options, dlse=None, deterministic=False, grad_dtype=None,
                  dq=None, dk=None, dv=None, wrt=None):
    """What a backward call asks for, and of which arrays; see `bind_forward`."""
    check_flag("deterministic", deterministic)
    arrays = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}
    if dlse is not None:
        arrays["dlse"] = dlse
    if not dq is dk is dv is None:
        given = zip(_BUFFERS, (dq, dk, dv), strict=True)
        arrays |= {name: x for name, x in given if x is not None}
    return _bind("backward", arrays, options, ("grad_dtype", grad_dtype), False,
                 bool(deterministic), operand_names(wrt))


def _bind(direction, arrays, options, wanted, returns_lse, deterministic, wrt=None):
    """Both passes; `wanted` is the argument that names the results' dtype, and its value."""
    arrays = _take_all(arrays, options)
    problem, addresses = _describe(direction, arrays, options, wanted, returns_lse,
                                   deterministic, wrt)
    _check_buffers(problem, arrays)
    if problem.copied:
        with on_device_of(arrays["q"]):
            copies = {name: dense_copy(arrays[name]) for name in problem.copied}
        arrays = arrays | copies
        addresses |= {name: address_of(x) for name, x in copies.items()}
    return problem, Arrays(arrays, addresses)


def _check_buffers(problem, arrays):
    """Buffers that are writable and lie apart from all other arrays of the call."""
    for name in problem.buffers:
        check_buffer(name, arrays[name], {o: x for o, x in arrays.items() if o != name})


def _describe(direction, arrays, options, wanted, returns_lse, deterministic, wrt=None):
    """The problem, made or remembered, and the addresses; lengths in CPU memory are looked at."""
    named, addresses = layouts(arrays)
    problem = _problem(direction, named, numbers(options), result_dtype(*wanted), returns_lse,
                       deterministic, wrt)
    for option in problem.lengths:
        check_lens(option, arrays[option.name], problem.scores)
    return problem, addresses


def _take_all(arrays, options):
    """All arrays of the call by name, as NumPy or CuPy arrays; absent options are left out."""
    if any(map(is_not, _NO_ARRAYS, options)):       # which takes no longer than a loop begins
        given = zip(ARRAYS, options, strict=False)
        arrays |= {name: x for name, x in given if x is not None}
    return take_all(arrays)


@lru_cache(maxsize=4096)
def _problem(direction, arrays, values, wanted, returns_lse, deterministic, wrt):
    """The `Problem` of a call, after every check that needs no element."""
    scale, softcap, left, right, q_offset, precision = values
    wanted_name, wanted = wanted
    named = {name: Layout(name, *fields) for name, *fields in arrays}
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
    if direction == "forward":
        wrt = WRT
        buffers = {"out": (*q.shape[:-1], v.shape[-1])}
    else:
        check_results(named)
        wrt = gradients(named, wrt)
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
        mask=Mask(left, right, q_offset), returns_lse=returns_lse, deterministic=deterministic,
        grad_dtype=dtype.name if direction == "backward" and wanted is not None else None,
        wrt=wrt, layouts=Layouts(named.values()),
    )

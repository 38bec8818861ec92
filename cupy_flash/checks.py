"""What is wrong with the arrays of a call, from their layouts alone: shapes, dtypes, devices.

A message names the argument, says what came and what is expected, and ends with the next step. That
step is looked for among the few mistakes that are usual; no check depends on it.
"""

from math import prod

import numpy as np

from .options import ARRAYS, DTYPES, shape_of
from .problem import GRADIENT_OF, accumulator_of

MAX_HEAD_DIM, MAX_GPU_ROWS = 256, 2**30 - 1
LAYOUT = "(N, d), (H, N, d) or (B, H, N, d)"
_AXES = {"b": "batch", "h": "heads", "q": "Nq", "k": "Nk"}
_COLUMNS = "keys are rows, not columns: pass `k.swapaxes(-1, -2)`"
_ORDER = "attention_backward(dout, q, k, v, out, lse): the first argument is dout"


def check_dtypes(q, k, v):
    """One element type for q, k and v."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dtype(name, x.dtype, DTYPES)
        if x.dtype != q.dtype:
            raise TypeError(f"`{name}` has dtype {x.dtype}, but `q` has {q.dtype}, expected the "
                            f"same for q, k and v: pass `{name}.astype(q.dtype)`")


def check_dtype(name, dtype, allowed, at=""):
    """A dtype among the names in `allowed`, of the machine's byte order; `at` is an index."""
    x = name + at
    if dtype.name not in allowed:
        raise TypeError(f"`{name}`{at} has dtype {dtype}, expected {_listed(allowed)}: "
                        f"{_cast(x, dtype, allowed)}")
    if not dtype.isnative:
        raise TypeError(f"`{name}`{at} has byte order {dtype.str}, expected the native one: pass "
                        f'`{x}.astype({x}.dtype.newbyteorder("="))`')


def _listed(names):
    """Names as a sentence has them."""
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _cast(name, dtype, allowed):
    """How an array of this dtype becomes one that is allowed."""
    if allowed == ("bool",):
        if dtype.kind == "f" or dtype.name == "bfloat16":
            return (f"added to the scores, it is `bias=`; otherwise pass `{name} != 0`, where True "
                    "= may attend")
        return (f"pass `{name} != 0` if a 1 may be seen, `{name} == 0` if a 1 hides (True = may "
                "attend)")
    if dtype.kind == "b":
        return ("a boolean array of which keys may be seen is `mask=`" if name == "bias"
                else f"pass `{name}.astype(np.float32)`")
    if dtype.kind == "c":
        return f"pass `{name}.real`, or real and imaginary parts side by side on the last axis"
    if dtype.itemsize == 2 and dtype.kind in "iuV" and "bfloat16" in allowed:
        return (f"bits of bfloat16 are passed as `{name}.view(ml_dtypes.bfloat16)`, numbers as "
                f"`{name}.astype(np.float32)`")
    if len(allowed) == 1 and dtype.kind in "iu":
        return f"pass `{name}.astype(np.{allowed[0]})`"
    wide = "float64" if dtype.itemsize > 8 and "float64" in allowed else "float32"
    target = wide if wide in allowed else allowed[0]
    return f"pass `{name}.astype(np.{target})`"


def check_shapes(q, k, v):
    """Batch, query heads and key heads."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not 2 <= x.ndim <= 4:
            step = {0: "one number is no array of rows", 1: f"one row is `{name}[None]`"}.get(
                x.ndim, f"join axes, as in `{name}.reshape(-1, *{name}.shape[-3:])`")
            raise ValueError(f"`{name}` has {x.ndim} axes (shape {x.shape}), expected "
                             f"{LAYOUT}: {step}")
        if x.ndim != q.ndim:
            step = (f"`{name}[None]` has one more" if x.ndim < q.ndim
                    else f"`{name}[0]` or `q[None]` has one less or more")
            raise ValueError(f"`{name}` has {x.ndim} axes (shape {x.shape}), but `q` has {q.ndim} "
                             f"(shape {q.shape}), expected as many in all three, which are "
                             f"{LAYOUT}: {step}")
        if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(f"`{name}` has head dim {x.shape[-1]} (shape {x.shape}), expected 1 "
                             f"to {MAX_HEAD_DIM}: {_head_dim_step(name, x, q)}")
    if k.shape[-1] != q.shape[-1]:
        step = "both are measured along the last axis"
        if k.shape[-2] == q.shape[-1]:
            step = _COLUMNS
        raise ValueError(f"`k` has head dim {k.shape[-1]}, but `q` has {q.shape[-1]}, expected the "
                         f"same (q {q.shape}, k {k.shape}; arrays are {LAYOUT}): {step}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"`v` has shape {v.shape}, but `k` has {k.shape}, expected the same but "
                         f"for the last axis (arrays are {LAYOUT}): {_values_step(v, k)}")
    (batch, heads_q), (batch_k, heads_k) = map(_batch_and_heads, (q.shape, k.shape))
    if batch_k != batch:
        raise ValueError(f"`k` has batch {batch_k} (shape {k.shape}), but `q` has {batch} (shape "
                         f"{q.shape}), expected the same (arrays are {LAYOUT}): "
                         f"{_batch_step(batch, batch_k)}")
    if not _heads_fit(heads_q, heads_k):
        raise ValueError(f"`q` has {heads_q} heads and `k` has {heads_k} (q {q.shape}, k "
                         f"{k.shape}), expected the query heads to be a multiple of the key heads "
                         f"(arrays are {LAYOUT}): {_heads_step(q.shape, k.shape)}")
    return batch, heads_q, heads_k


def _head_dim_step(name, x, q):
    """What may be wrong with the last axis of q, k or v."""
    if not x.shape[-1]:
        return "a column of ones gives all keys the same weight"
    if name == "k" and x.shape[-2] == q.shape[-1]:
        return _COLUMNS
    step = "cut `v` along its last axis and join the results"
    if name != "v":
        step = "the last axis is d, this version has no kernel for more"
    if x.ndim == 3:
        step += f"; heads side by side are split as `{name}.reshape(B, N, H, d).swapaxes(1, 2)`"
    return step


def _batch_and_heads(shape):
    """The axes before the last two, 1 where there is none."""
    return (1, 1, *shape[:-2])[-2:]


def _heads_fit(heads_q, heads_k):
    """Whether query heads can share key heads evenly."""
    return heads_q == heads_k or (heads_k > 0 and heads_q % heads_k == 0)


def _values_step(v, k):
    """What may be wrong with v beside k."""
    n = v.ndim
    for first, second in ((n - 3, n - 2), (n - 2, n - 1)):
        if first >= 0 and _swapped(v.shape, first, second)[:-1] == k.shape[:-1]:
            return f"pass `v.swapaxes({first}, {second})`"
    if v.ndim == 4 and v.shape[0] == 1 and v.shape[1:-1] == k.shape[1:-1]:
        return "one for all is `np.broadcast_to(v, (len(k), *v.shape[1:]))`, without a copy"
    return "k and v have the same heads and rows, one value for each key"


def _batch_step(batch, batch_k):
    """What may be wrong with the batch of k."""
    if batch_k == 1:
        return ("keys for all are `np.broadcast_to(k, (len(q), *k.shape[1:]))`, without a copy, "
                "and v likewise")
    if batch == 1:
        return ("queries for all are `np.broadcast_to(q, (len(k), *q.shape[1:]))`, without a copy")
    return "arrays stored as (N, B, H, d) are passed as `x.transpose(1, 2, 0, 3)`"


def _heads_step(q, k):
    """What may be wrong with the heads of arrays of these shapes: rows in the place of heads."""
    if len(q) > 2:
        turned_q, turned_k = (_swapped(x, -3, -2) for x in (q, k))
        for a, b, which in ((turned_q, turned_k, "x.swapaxes{} for q, k and v"),
                            (q, turned_k, "k.swapaxes{} and v.swapaxes{}"),
                            (turned_q, k, "q.swapaxes{}")):
            if _heads_fit(a[-3], b[-3]):
                axes = (len(q) - 3, len(q) - 2)
                stored = "(B, N, H, d)" if len(q) == 4 else "(N, H, d)"
                code = which.split(" ")[0].format(axes)
                rest = which.format(axes, axes)[len(code):]
                return f"arrays stored as {stored} are passed as views, `{code}`{rest}"
    heads_q, heads_k = (_batch_and_heads(shape)[1] for shape in (q, k))
    if heads_q and heads_k % heads_q == 0 and heads_k:
        return f"pass `np.repeat(q, {heads_k // heads_q}, axis=-3)`, or q and k the other way round"
    return "make one call for the heads that share the same key heads"


def _swapped(shape, first, second):
    """A shape with two axes exchanged."""
    shape = list(shape)
    shape[first], shape[second] = shape[second], shape[first]
    return tuple(shape)


def check_options(named, scores, heads_k):
    """The arrays of options beside scores of this shape."""
    accumulator = accumulator_of(named["q"].dtype.name)
    for option in ARRAYS.values():
        if option.name in named:
            x = named[option.name]
            check_dtype(option.name, x.dtype, option.allowed(accumulator))
            if option.forms:
                _check_form(option, x.shape, scores, heads_k)
            else:
                _check_broadcast(option, x.shape, scores, heads_k)


def _check_broadcast(option, shape, scores, heads_k):
    """A shape that broadcasts to the axes of an option."""
    full = shape_of(option.axes, scores)
    if not _broadcasts(shape, full):
        axes = ", ".join(_AXES[axis] for axis in option.axes)
        raise ValueError(f"`{option.name}` has shape {shape}, expected one that broadcasts to "
                         f"({axes}) = {full}: {_broadcast_step(option.name, shape, full, heads_k)}")


def _check_form(option, shape, scores, heads_k):
    """A shape that is one of the forms of an option."""
    wanted = [shape_of(form, scores) for form in option.forms]
    if shape in wanted:
        return
    batch, heads_q = scores[:2]
    step = option.step
    if "h" in option.forms and shape == (heads_k,):
        step = f"pass `np.repeat({option.name}, {heads_q // heads_k})`"
    elif option.counts and shape == (batch + 1,):
        step = f"of cumulative lengths pass `np.diff({option.name})`, and the sequences padded"
    elif prod(shape) in map(prod, wanted):
        step = "reshape it"
    raise ValueError(f"`{option.name}` has shape {shape}, expected {_listed([*map(str, wanted)])}, "
                     f"{option.each}: {step}")


def _broadcasts(shape, full):
    """Whether an array of this shape broadcasts to `full`, and to nothing larger."""
    try:
        return np.broadcast_shapes(shape, full) == full
    except ValueError:
        return False


def _broadcast_step(name, shape, full, heads_k):
    """The view of a mask or bias that fits, if one of the usual ones does."""
    n, group = len(shape), full[1] // heads_k if heads_k else 1
    views = []
    if n >= 2:
        views += [(f"{name}[:, None, None, :]", (shape[0], 1, 1, *shape[1:])),
                  (f"{name}[:, None]", (shape[0], 1, *shape[1:])),
                  (f"{name}.swapaxes(-1, -2)", _swapped(shape, -1, -2))]
    if n >= 3 and group > 1:
        repeated = (*shape[:-3], shape[-3] * group, *shape[-2:])
        views.append((f"np.repeat({name}, {group}, axis=-3)", repeated))
    for code, turned in views:
        if _broadcasts(turned, full):
            return f"pass `{code}`"
    return "axes of 1 are broadcast, as in a (B, Nk) array `x[:, None, None, :]`"


def check_results(named):
    """What backward takes from forward, and the gradients that reach it."""
    q, v = named["q"], named["v"]
    rows = q.shape[:-1]
    accumulator = np.dtype(accumulator_of(q.dtype.name))
    outs = tuple(dict.fromkeys((q.dtype.name, accumulator.name)))
    for name in ("dout", "out"):
        step = f"it has the shape of the result; the order is {_ORDER}"
        _check_result(name, named[name], (*rows, v.shape[-1]), outs, step)
    for name in ("lse", "dlse"):
        if name in named:
            step = ("pass it as `attention` returned it" if name == "lse"
                    else "it has the shape of `lse`")
            _check_result(name, named[name], rows, (accumulator.name,), step)


def _check_result(name, x, shape, dtypes, step):
    """One array of the shape that follows from q, k and v."""
    check_dtype(name, x.dtype, dtypes)
    if x.shape != shape:
        raise ValueError(f"`{name}` has shape {x.shape}, expected {shape}: {step}")


def check_order(named):
    """The arrays of a backward call, for the mistake of passing q first."""
    out, lse = named["out"], named["lse"]
    if out.ndim + 1 == lse.ndim:
        raise ValueError(f"`out` has {out.ndim} axes (shape {out.shape}) and `lse` has {lse.ndim} "
                         f"(shape {lse.shape}), expected one more in out: the order is {_ORDER}")
    dout, q, k, v = (named[name].shape for name in ("dout", "q", "k", "v"))
    if min(map(len, (dout, q, k, v))) < 2:
        return
    right, moved = (f[:-1] == a[:-1] and f[-1] == c[-1] and b[:-1] == c[:-1] and a[-1] == b[-1]
                    for f, a, b, c in ((dout, q, k, v), (v, dout, q, k)))
    if moved and not right:
        raise ValueError(f"`dout` has shape {dout} and `v` has {v}, expected them the other way "
                         f"round (q {q}, k {k}): the order is {_ORDER}")


def gradients(named, wrt):
    """The gradients that are asked for: of all operands that there are, or of those in `wrt`."""
    if wrt is not None:
        for name in wrt:
            if name not in named:
                rest = tuple(other for other in wrt if other in named)
                step = f"pass `{rest}`" if rest else f"pass `{name}=` as well"
                raise ValueError(f"`wrt` has {name!r}, but the call has no `{name}`, expected "
                                 f"names of operands that are given: {step}")
        for name in GRADIENT_OF:
            buffer = GRADIENT_OF[name]
            if buffer in named and name not in wrt:
                raise ValueError(f"`{buffer}` is given, but `wrt` is {wrt}, expected buffers for "
                                 f"what is wanted alone: leave it out, or add {name!r} to `wrt`")
    return tuple(gradient for name, gradient in GRADIENT_OF.items()
                 if name in named and (wrt is None or name in wrt))


def check_result_buffer(name, x, shape, dtype):
    """A buffer of the shape and dtype of its result."""
    element = f"{'ml_dtypes' if dtype.name == 'bfloat16' else 'np'}.{dtype}"
    empty = "np.empty" if x.gpu is None else "cupy.empty"
    step = f"pass `{empty}({shape}, {element})`, or leave `{name}` out"
    if x.dtype != dtype or not x.dtype.isnative:
        raise TypeError(f"`{name}` has dtype {x.dtype.str if x.dtype == dtype else x.dtype}, "
                        f"expected {dtype}, for results are not cast: {step}")
    if x.shape != shape:
        raise ValueError(f"`{name}` has shape {x.shape}, expected {shape}: {step}")


def check_place(name, x, q):
    """Arrays are on one GPU, which can count their rows, and elements are aligned to their size."""
    if x.gpu != q.gpu:
        raise ValueError(f"`{name}` is on GPU {x.gpu}, but `q` is on GPU {q.gpu}, expected all "
                         "arrays on the same GPU: pass a copy made under "
                         f"`with cupy.cuda.Device({q.gpu}):`")
    if x.gpu is not None and name in ("q", "k") and x.shape[-2] > MAX_GPU_ROWS:
        step = ("cut the queries into several calls" if name == "q"
                else "cut the keys into several calls and `merge` their results")
        raise ValueError(f"`{name}` has {x.shape[-2]} rows (shape {x.shape}), expected at most "
                         f"{MAX_GPU_ROWS}, for a GPU counts them in 32 bits: {step}")
    if x.offset % x.dtype.itemsize:
        raise ValueError(f"`{name}` starts at an address that is no multiple of its "
                         f"{x.dtype.itemsize}-byte elements, expected one: pass `{name}.copy()`")
    if x.aligned and any(n > 1 and s % x.dtype.itemsize
                         for n, s in zip(x.shape, x.strides, strict=True)):
        raise ValueError(f"`{name}` has strides {x.strides}, expected multiples of its "
                         f"{x.dtype.itemsize}-byte elements: pass `{name}.copy()`")


def check_lens(option, lens, scores):
    """Lengths in CPU memory; on a GPU they are not read: the kernels clamp them."""
    if isinstance(lens, np.ndarray):
        (extent,) = shape_of(option.counts, scores)
        outside = np.flatnonzero((lens < 0) | (lens > extent))
        if outside.size:
            b = int(outside[0])
            raise ValueError(f"`{option.name}`[{b}] is {int(lens[b])}, expected 0 to {extent}, the "
                             f"rows of the padded `{option.counts}`: pad it to the longest, or "
                             "`np.clip` the lengths")


def check_sink(sink):
    """Sinks in CPU memory; on a GPU they are not read."""
    if isinstance(sink, np.ndarray):
        infinite = np.flatnonzero(sink == np.inf)
        if infinite.size:
            raise ValueError(f"`sink`[{int(infinite[0])}] is inf, expected less: -inf is no sink, "
                             "and for all the weight on it pass `np.minimum(sink, 1e30)`")

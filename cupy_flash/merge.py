"""Merging results over disjoint sets of keys into the result over all of them.

NumPy's functions hand CuPy arrays on to CuPy, so that one text serves both. Nothing in it waits for
the device.
"""

from contextlib import nullcontext

import numpy as np

from .checks import check_dtype
from .intake import instead, library, no_array
from .options import DTYPES
from .words import kind_of

_CALL = "merge([out1, out2], [lse1, lse2])"


def merge(outs, lses):
    """Attention over all keys from attention over parts of them.

    Parameters
    ----------
    outs : sequence of ndarray (..., N, d_v)
        Partial results as `attention` returns them, all of one shape and dtype (float16, bfloat16,
        float32 or float64), all NumPy or all CuPy arrays of one GPU; float32 parts (``out_dtype``)
        lose nothing.
    lses : sequence of ndarray (..., N)
        Their log-sum-exps, natural logarithm, float32 or float64. -inf marks a row that is
        fully masked in that part, and so does +inf, as some libraries write it; the partial result
        there is not looked at.

    Returns
    -------
    out : ndarray (..., N, d_v)
        ``sum_s exp(lse_s - lse) out_s`` in the dtype of the parts; 0 where all parts are empty.
    lse : ndarray (..., N)
        ``ln sum_s exp(lse_s)``; -inf where all parts are empty.

    Raises
    ------
    TypeError
        Parts that are neither NumPy nor CuPy arrays, some of each, of other or of different dtypes,
        or of a class that adds a meaning (units, masks).
    ValueError
        No parts, unequal numbers of parts, shapes that do not fit, or parts on different GPUs.

    Notes
    -----
    Dao, "FlashAttention-2" (2023), section 2.3.1, as a sum over any number of parts. Associative up
    to rounding; the result of an empty part is the neutral element.

    A `sink` goes to exactly one of the parts, forward and backward, for it is in the `lse` of the
    part that has it: with the merged `out` and `lse`, `attention_backward` of that part has dsink.

    Examples
    --------
    >>> import numpy as np, cupy_flash as cf
    >>> x = np.random.default_rng(0).standard_normal((100, 64), dtype=np.float32)
    >>> out1, lse1 = cf.attention(x, x[:40], x[:40], return_lse=True)
    >>> out2, lse2 = cf.attention(x, x[40:], x[40:], return_lse=True)
    >>> out, lse = cf.merge([out1, out2], [lse1, lse2])
    >>> bool(np.allclose(out, cf.attention(x, x, x), atol=1e-6))
    True
    """
    outs, lses = _checked(outs, lses)
    # That a weight becomes 0 is no error, however strict the caller's np.errstate is.
    with (nullcontext() if isinstance(lses[0], np.ndarray) else lses[0].device,
          np.errstate(under="ignore", divide="ignore")):
        return _merged(outs, lses)


def _merged(outs, lses):
    """The merge of checked parts."""
    accumulator = lses[0].dtype
    lses = [np.where(np.isposinf(lse), -np.inf, lse).astype(accumulator) for lse in lses]
    m = lses[0]
    for lse in lses[1:]:
        m = np.maximum(m, lse)
    zero = accumulator.type(0)
    m_ref = np.where(np.isneginf(m), zero, m)
    l = np.zeros_like(m)
    total = np.zeros_like(outs[0], dtype=accumulator)
    for out, lse in zip(outs, lses, strict=True):
        with np.errstate(over="ignore"):        # of a difference, to -inf
            weight = np.exp(lse - m_ref)
        l += weight
        seen = np.where(np.isneginf(lse)[..., None], zero, out.astype(accumulator, copy=False))
        total += weight[..., None] * seen
    lse = m_ref + np.log(l)
    total /= np.where(l == 0, accumulator.type(1), l)[..., None]
    return total.astype(outs[0].dtype, copy=False), lse


def _checked(outs, lses):
    """The parts as lists, all of one shape and type."""
    outs, lses = _parts("outs", outs), _parts("lses", lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(f"`outs` has {len(outs)} parts and `lses` has {len(lses)}, expected as "
                         f"many of both, at least one: the call is {_CALL}")
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        at = f"[{i}]"
        for name, x, first in (("outs", out, outs[0]), ("lses", lse, lses[0])):
            _check_kind(name, at, x, outs[0])
            check_dtype(name, x.dtype, DTYPES if name == "outs" else DTYPES[2:], at)
            if x.dtype != first.dtype:
                raise TypeError(f"`{name}`{at} has dtype {x.dtype}, but `{name}`[0] has "
                                f"{first.dtype}, expected the same: pass "
                                f"`{name}{at}.astype({name}[0].dtype)`")
            if x.shape != first.shape:
                raise ValueError(f"`{name}`{at} has shape {x.shape}, but `{name}`[0] has "
                                 f"{first.shape}, expected the same, for the parts differ in keys "
                                 "and not in queries: results for other queries are joined by "
                                 "`np.concatenate`")
        if not out.ndim or lse.shape != out.shape[:-1]:
            raise ValueError(f"`lses`{at} has shape {lse.shape}, expected that of `outs`{at}, "
                             f"{out.shape}, without the last axis: the call is {_CALL}")
    return outs, lses


def _parts(name, parts):
    """The parts as a list."""
    try:
        return list(parts)
    except TypeError:
        raise TypeError(f"`{name}` is a {kind_of(parts)}, expected a sequence of arrays: the call "
                        f"is {_CALL}") from None


def _check_kind(name, at, x, first):
    """A NumPy or CuPy array, like the first of all, and on its GPU."""
    kind, wanted = library(type(x)), library(type(first))
    if kind is None:
        raise TypeError(f"{no_array(name, x, at)}, expected a NumPy or CuPy array: "
                        f"{instead(name + at, x)}")
    if kind != wanted:
        step = "cupy.asarray" if kind == "numpy" else "cupy.asnumpy"
        raise TypeError(f"`{name}`{at} is a {kind} array, but `outs`[0] is of {wanted}, expected "
                        f"all on the same side: pass `{step}({name}{at})`")
    if kind == "cupy" and x.device.id != first.device.id:
        raise ValueError(f"`{name}`{at} is on GPU {x.device.id}, but `outs`[0] is on GPU "
                         f"{first.device.id}, expected all on the same GPU: pass a copy made under "
                         f"`with cupy.cuda.Device({first.device.id}):`")

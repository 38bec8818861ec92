"""Merging results over disjoint sets of keys into the result over all of them.

NumPy's functions hand CuPy arrays on to CuPy, so that one text serves both. Nothing in it waits for
the device.
"""

from contextlib import nullcontext

import numpy as np


def merge(outs, lses):
    """Attention over all keys from attention over parts of them.

    Parameters
    ----------
    outs : sequence of ndarray (..., N, d_v)
        Partial results, all of one shape and dtype, all NumPy or all CuPy arrays of one GPU;
        float32 parts (``out_dtype``) lose nothing.
    lses : sequence of ndarray (..., N)
        Their log-sum-exps, natural logarithm. -inf marks a row of a part that saw no key, and so
        does +inf, as some libraries write it; the partial result there is not looked at.

    Returns
    -------
    out : ndarray (..., N, d_v)
        ``sum_s exp(lse_s - lse) out_s`` in the dtype of the parts; 0 where all parts are empty.
    lse : ndarray (..., N)
        ``ln sum_s exp(lse_s)``; -inf where all parts are empty.

    Raises
    ------
    TypeError
        Parts that are neither NumPy nor CuPy arrays, some of each, or of different dtypes.
    ValueError
        No parts, unequal numbers of parts, shapes that do not fit, or parts on different GPUs.

    Notes
    -----
    Dao, "FlashAttention-2" (2023), section 2.3.1, as a sum over any number of parts. Associative up
    to rounding; the result of an empty part is the neutral element.
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
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(f"`outs` has {len(outs)} parts and `lses` has {len(lses)}, expected as "
                         "many of both, at least one")
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        for name, x, first in (("outs", out, outs[0]), ("lses", lse, lses[0])):
            _check_kind(f"`{name}`[{i}]", x, outs[0])
            if x.dtype != first.dtype:
                raise TypeError(f"`{name}`[{i}] has dtype {x.dtype}, but `{name}`[0] has "
                                f"{first.dtype}")
            if x.shape != first.shape:
                raise ValueError(f"`{name}`[{i}] has shape {x.shape}, but `{name}`[0] has "
                                 f"{first.shape}")
        if lse.shape != out.shape[:-1]:
            raise ValueError(f"`lses`[{i}] has shape {lse.shape}, expected {out.shape[:-1]}: "
                             f"`outs`[{i}] without its last axis")
        if lse.dtype not in (np.float32, np.float64):
            raise TypeError(f"`lses`[{i}] has dtype {lse.dtype}, expected float32 or float64")
    return outs, lses


def _check_kind(name, x, first):
    """A NumPy or CuPy array, like the first of all, and on its GPU."""
    kinds = [_library(array) for array in (x, first)]
    if kinds[0] not in ("numpy", "cupy"):
        raise TypeError(f"{name} is a {type(x).__module__}.{type(x).__qualname__}, expected a "
                        "NumPy or CuPy array")
    if kinds[0] != kinds[1]:
        raise TypeError(f"{name} is a {kinds[0]} array, but `outs`[0] is of {kinds[1]}: all must "
                        "be on the same side")
    if kinds[0] == "cupy" and x.device.id != first.device.id:
        raise ValueError(f"{name} is on GPU {x.device.id}, but `outs`[0] is on GPU "
                         f"{first.device.id}: all must be on the same GPU")


def _library(x):
    """The name of the package that an array belongs to; CuPy is not imported for it."""
    return "numpy" if isinstance(x, np.ndarray) else type(x).__module__.partition(".")[0]

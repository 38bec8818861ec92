"""Merging results over disjoint sets of keys into the result over all of them."""

import numpy as np


def merge(outs, lses):
    """Attention over all keys from attention over parts of them.

    Parameters
    ----------
    outs : sequence of ndarray (..., N, d_v)
        Partial results, all of one shape and dtype; float32 parts (``out_dtype``) lose nothing.
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
        Parts that are no NumPy arrays, or of different dtypes.
    ValueError
        No parts, unequal numbers of parts, or shapes that do not fit.

    Notes
    -----
    Dao, "FlashAttention-2" (2023), section 2.3.1, as a sum over any number of parts. Associative up
    to rounding; the result of an empty part is the neutral element.
    """
    outs, lses = _checked(outs, lses)
    accumulator = lses[0].dtype
    lses = [np.where(np.isposinf(lse), -np.inf, lse).astype(accumulator) for lse in lses]
    m = np.maximum.reduce(lses)
    m_ref = np.where(np.isneginf(m), 0, m)
    l = np.zeros_like(m)
    total = np.zeros(outs[0].shape, accumulator)
    for out, lse in zip(outs, lses, strict=True):
        weight = np.exp(lse - m_ref)
        l += weight
        seen = np.where(np.isneginf(lse)[..., None], 0, out.astype(accumulator, copy=False))
        total += weight[..., None] * seen
    with np.errstate(divide="ignore"):
        lse = m_ref + np.log(l)
    total /= np.where(l == 0, 1, l)[..., None]
    return total.astype(outs[0].dtype, copy=False), lse


def _checked(outs, lses):
    """The parts as lists, all of one shape and type."""
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(f"`outs` has {len(outs)} parts and `lses` has {len(lses)}, expected as many of "
                         "both, at least one")
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        for name, x, first in (("outs", out, outs[0]), ("lses", lse, lses[0])):
            if not isinstance(x, np.ndarray):
                raise TypeError(f"`{name}`[{i}] is a {type(x).__qualname__}, expected a NumPy array")
            if x.dtype != first.dtype:
                raise TypeError(f"`{name}`[{i}] has dtype {x.dtype}, but `{name}`[0] has {first.dtype}")
            if x.shape != first.shape:
                raise ValueError(f"`{name}`[{i}] has shape {x.shape}, but `{name}`[0] has {first.shape}")
        if lse.shape != out.shape[:-1]:
            raise ValueError(f"`lses`[{i}] has shape {lse.shape}, expected {out.shape[:-1]}: `outs`[{i}] "
                             "without its last axis")
        if lse.dtype not in (np.float32, np.float64):
            raise TypeError(f"`lses`[{i}] has dtype {lse.dtype}, expected float32 or float64")
    return outs, lses

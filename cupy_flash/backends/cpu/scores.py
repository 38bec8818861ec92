"""From Q K^T to the scores S that enter the softmax: softcap, ALiBi, bias, masks, in this order."""

import numpy as np
from numba import carray

from .dtypes import BFLOAT16, FLOAT16, FLOAT32, widen
from .elementary import tanh
from .jit import as_pointer, tile_function
from .mask import entry_address, forget_unseen_keys, hide_by_mask, hide_by_range
from .micro_kernel import matmul


@tile_function
def score_tile(S, k_tile, v_tile, q_t, p, rows, key0, keys):
    """S^T = scale K Q^T, capped, with bias and masks: the scores of `keys` keys from key0.

    The scale multiplies the sum, once: folded into q it could overflow where no score does. Keys
    that a mask or bias hides from every row are zeroed in k_tile and v_tile.
    """
    matmul(S, k_tile, q_t, keys, rows.lanes, p.d, S.dtype.type(p.scale))
    if p.softcap != 0:
        _cap(S, keys, rows.lanes, S.dtype.type(p.softcap))
    if p.slopes.address != 0:
        _add_alibi(S, p.slopes, rows, key0, keys)
    if p.bias.address != 0:
        _add_bias(S, p.bias, rows, key0, keys)
    if p.mask.address != 0:
        hide_by_mask(S, p.mask, rows, key0, keys)
    hide_by_range(S, rows, key0, keys)
    if p.mask.address != 0 or p.bias.address != 0:
        forget_unseen_keys(S, rows, keys, k_tile, v_tile)


@tile_function
def _cap(S, keys, lanes, cap):
    """S = cap tanh(S / cap)."""
    for j in range(keys):
        for i in range(lanes):
            S[j, i] = cap * tanh(S[j, i] / cap)


@tile_function
def through_cap(dS, k_tile, q_t, U, p, keys, lanes):
    """dS *= 1 - tanh^2(U / cap), with U the scores before the cap, computed once more.

    S itself holds P by now, and log(P) does not give tanh back where P is tiny.
    """
    matmul(U, k_tile, q_t, keys, lanes, p.d, U.dtype.type(p.scale))
    cap = dS.dtype.type(p.softcap)
    for j in range(keys):
        for i in range(lanes):
            t = tanh(U[j, i] / cap)
            slope = 1 - t * t
            # A hidden key's U may be NaN; its dS is 0 and stays 0.
            dS[j, i] = dS[j, i] * slope if dS[j, i] != 0 else dS[j, i]


@tile_function
def _add_alibi(S, slopes, rows, key0, keys):
    """S -= slope of the head * |position of the query - key|."""
    width = np.zeros(rows.lanes, S.dtype)
    base = slopes.address + rows.b * slopes.b
    for r in range(rows.rows):
        head = rows.head0 + (rows.row0 + r) % rows.group
        width[r] = _scalar(base + head * slopes.h, slopes.kind)
    position = rows.position
    for j in range(keys):
        key = key0 + j
        for i in range(rows.lanes):
            S[j, i] -= width[i] * S.dtype.type(abs(position[i] - key))


@tile_function
def _scalar(address, kind):
    if kind == FLOAT32:
        return np.float64(carray(as_pointer(address), (1,), np.float32)[0])
    return carray(as_pointer(address), (1,), np.float64)[0]


@tile_function
def _add_bias(S, bias, rows, key0, keys):
    if bias.kind == FLOAT16:
        _add_bias_of(S, bias, rows, key0, keys, np.uint16)
    elif bias.kind == BFLOAT16:
        _add_bias_of(S, bias, rows, key0, keys, np.int16)
    elif bias.kind == FLOAT32:
        _add_bias_of(S, bias, rows, key0, keys, np.float32)
    else:
        _add_bias_of(S, bias, rows, key0, keys, np.float64)


@tile_function
def _add_bias_of(S, bias, rows, key0, keys, dtype):
    """S += bias; -inf hides the key even if its score is NaN."""
    step = bias.c
    for r in range(rows.rows):
        address = entry_address(bias, rows, r, key0)
        for j in range(keys):
            x = S.dtype.type(widen(carray(as_pointer(address + j * step), (1,), dtype)[0]))
            S[j, r] = S[j, r] + x if x != -np.inf else x

"""The recurrence of the online softmax, and the probabilities rebuilt in the backward pass.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), algorithm 3;
Dao, "FlashAttention-2" (2023), algorithm 1. Rows are lanes: every step is lane-wise.
"""

import numpy as np

from ...plan.cpu import CHAIN, SLICE, VECTOR_BYTES
from .elementary import exp
from .jit import tile_function
from .sums import add_row, two_sum


@tile_function
def softmax_step(S, m, l, rest, alpha, m_ref, part, total, keys, lanes, lazy):
    """One key tile: S becomes P; m, l move on; True if any alpha is not 1.

    m_new = max(m, rowmax(S)); m_ref = 0 if m_new == -inf else m_new; alpha = exp(m - m_ref);
    P = exp(S - m_ref); l = alpha l + rowsum(P), kept as l + rest.
    The reference is lazy: it moves only when the maximum passes it by `lazy`. The division by l at
    the end cancels any common reference; P stays below exp(lazy). An error of l is common to a row
    of out, and delta = rowsum(dO * O) adds it up d_v times: so l is summed as sums.py says.
    m_ref, part, total: room for a row of lanes.
    """
    for i in range(lanes):
        m_ref[i] = -np.inf
    for j in range(keys):
        for i in range(lanes):
            m_ref[i] = S[j, i] if S[j, i] > m_ref[i] else m_ref[i]  # a NaN shows up in P
    moved = False
    for i in range(lanes):
        m_new = m_ref[i] if m_ref[i] > m[i] + lazy else m[i]
        m_ref[i] = 0 if m_new == -np.inf else m_new  # rows with nothing visible yet
        alpha[i] = exp(m[i] - m_ref[i])
        moved = moved or alpha[i] != 1
        m[i] = m_new
    if moved:
        for i in range(lanes):
            l[i] *= alpha[i]
            rest[i] *= alpha[i]
    for start in range(0, keys, SLICE):
        exponentiate(S, m_ref, start, min(start + SLICE, keys), lanes, total, part)
        add_row(l, rest, total, lanes)
    return moved


@tile_function
def exponentiate(S, m_ref, start, end, lanes, total, part):
    """S = exp(S - m_ref) for the keys start ... end; total = their sum. part: room for a row."""
    for i in range(lanes):
        total[i] = 0
    for j0 in range(start, end, CHAIN):
        for i in range(lanes):
            part[i] = 0
        for j in range(j0, min(j0 + CHAIN, end)):
            for i in range(lanes):
                p = exp(S[j, i] - m_ref[i])
                S[j, i] = p
                part[i] += p
        for i in range(lanes):
            total[i] += part[i]


@tile_function
def softmax_row_step(s, m, l, rest, alpha, lane, part, r, keys, lazy):
    """`softmax_step` for row r alone, with its keys along the lanes: s[r, :keys] becomes P.

    True if alpha is not 1. lane, part: room for a row of lanes.
    """
    width = VECTOR_BYTES // s.itemsize
    padded = (keys + width - 1) // width * width
    s[r, keys:padded] = -np.inf
    for i in range(width):
        lane[i] = -np.inf
    for j in range(0, padded, width):
        for i in range(width):
            lane[i] = s[r, j + i] if s[r, j + i] > lane[i] else lane[i]
    top = lane[0]
    for i in range(1, width):
        top = lane[i] if lane[i] > top else top
    m_new = top if top > m[r] + lazy else m[r]
    m_ref = s.dtype.type(0) if m_new == -np.inf else m_new
    alpha[r] = exp(m[r] - m_ref)
    m[r] = m_new
    for j in range(padded):
        s[r, j] = exp(s[r, j] - m_ref)
    for i in range(width):
        lane[i] = 0
    for j0 in range(0, padded, CHAIN * width):
        for i in range(width):
            part[i] = 0
        for j in range(j0, min(j0 + CHAIN * width, padded), width):
            for i in range(width):
                part[i] += s[r, j + i]
        for i in range(width):
            lane[i] += part[i]
    total = lane[0]
    for i in range(1, width):
        total += lane[i]
    l[r], lost = two_sum(alpha[r] * l[r], total)
    rest[r] = alpha[r] * rest[r] + lost
    return alpha[r] != 1


@tile_function
def scale_rows(acc, alpha, rows, columns):
    """acc = diag(alpha) acc."""
    for i in range(rows):
        for c in range(columns):
            acc[i, c] *= alpha[i]


@tile_function
def softmax_backward(S, dP, lse, share, delta, keys, lanes):
    """S becomes P = exp(S - lse), dP becomes dS = P * (dP - delta), 0 wherever S is -inf.

    Dao et al., "FlashAttention" (2022), appendix B.2. The select keeps a NaN of a hidden key out.
    share: a factor of P, 1 but in the rows of normalise.py.
    """
    for j in range(keys):
        for i in range(lanes):
            hidden = S[j, i] == -np.inf
            p = exp(S[j, i] - lse[i])
            ds = p * (dP[j, i] - delta[i])
            S[j, i] = p
            dP[j, i] = 0 if hidden else ds
    normal = True
    for i in range(lanes):
        normal = normal and share[i] == 1
    if normal:
        return
    for j in range(keys):
        for i in range(lanes):
            S[j, i] *= share[i]
            dP[j, i] *= share[i]

"""The recurrence of the online softmax, and the probabilities rebuilt in the backward pass.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), algorithm 3;
Dao, "FlashAttention-2" (2023), algorithm 1. Rows are lanes: every step is lane-wise.
"""

import numpy as np

from ...plan.cpu import VECTOR_BYTES
from .elementary import exp
from .jit import tile_function

CHAIN = 16  # probabilities that are added in one chain


@tile_function
def softmax_step(S, m, l, alpha, m_ref, part, keys, lanes, lazy):
    """One key tile: S becomes P; m, l move on; True if any alpha is not 1.

    m_new = max(m, rowmax(S)); m_ref = 0 if m_new == -inf else m_new; alpha = exp(m - m_ref);
    P = exp(S - m_ref); l = alpha l + rowsum(P).
    The reference is lazy: it moves only when the maximum passes it by `lazy`. The division by l at
    the end cancels any common reference; P stays below exp(lazy). An error of l is common to a row
    of out, and delta = rowsum(dO * O) adds it up d_v times: so l is summed in short chains.
    part, m_ref: room for a row of lanes.
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
        l[i] = alpha[i] * l[i]
    for j0 in range(0, keys, CHAIN):
        for i in range(lanes):
            part[i] = 0
        for j in range(j0, min(j0 + CHAIN, keys)):
            for i in range(lanes):
                p = exp(S[j, i] - m_ref[i])
                S[j, i] = p
                part[i] += p
        for i in range(lanes):
            l[i] += part[i]
    return moved


@tile_function
def softmax_row_step(s, m, l, alpha, lane, r, keys, lazy):
    """`softmax_step` for row r alone, with its keys along the lanes: s[r, :keys] becomes P.

    lane: room for a row of lanes. True if alpha is not 1.
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
    for i in range(width):
        lane[i] = 0
    for j in range(0, padded, width):
        for i in range(width):
            p = exp(s[r, j + i] - m_ref)
            s[r, j + i] = p
            lane[i] += p
    total = lane[0]
    for i in range(1, width):
        total += lane[i]
    l[r] = alpha[r] * l[r] + total
    return alpha[r] != 1


@tile_function
def scale_rows(acc, alpha, rows, columns):
    """acc = diag(alpha) acc."""
    for i in range(rows):
        for c in range(columns):
            acc[i, c] *= alpha[i]


@tile_function
def softmax_backward(S, dP, lse, delta, keys, lanes):
    """S becomes P = exp(S - lse), dP becomes dS = P * (dP - delta), 0 wherever S is -inf.

    Dao et al., "FlashAttention" (2022), appendix B.2. The select keeps a NaN of a hidden key out.
    """
    for j in range(keys):
        for i in range(lanes):
            hidden = S[j, i] == -np.inf
            p = exp(S[j, i] - lse[i])
            ds = p * (dP[j, i] - delta[i])
            S[j, i] = p
            dP[j, i] = 0 if hidden else ds

"""The sink: one more score of each row, whose value is 0, and its gradient.

It joins m and l where all keys have been seen: at the end of a row, or where splits are merged. In
backward lse has it, so that P = exp(S - lse) is right as it stands. But an lse is no longer -inf
where a row sees no key, and that has to be looked up.
"""

import numpy as np
from numba import carray

from ...plan.cpu import CHAIN
from .dtypes import BFLOAT16, FLOAT16, FLOAT32, widen
from .elementary import exp
from .jit import as_pointer, kernel, next_task, tile_function
from .mask import entry_address
from .sums import joined, two_sum
from .team import enter, leave, stopped
from .tiles import row_value, store_row


@tile_function
def sink_of(p, head, like):
    """The sink of a query head, which has the accumulators' type."""
    return carray(as_pointer(p.sink), (p.heads_q,), like.dtype)[head]


@tile_function
def join_sink(p, head, m, l, like):
    """m and l of a row with the sink of its head, and the factor for what was summed without it.

    One step of the recurrence in softmax.py, over a single score.
    """
    sink = sink_of(p, head, like)
    m_new = sink if sink > m else m  # a NaN shows up in l
    m_ref = m_new if m_new != -np.inf else like.dtype.type(0)
    alpha = exp(m - m_ref)
    return m_new, alpha * l + exp(sink - m_ref), alpha


@tile_function
def join_sinks(p, rows, m, l):
    """`join_sink` for the rows of a tile of which nothing else was summed."""
    for r in range(rows.rows):
        head = rows.head0 + (rows.row0 + r) % rows.group
        m[r], l[r], _ = join_sink(p, head, m[r], l[r], m)


@tile_function
def sees_key(p, rows, r, like):
    """Whether the tile's row r sees a key: by its position, then by its mask and bias."""
    first, end = rows.first[r], rows.end[r]
    if p.mask.address == 0 and p.bias.address == 0:
        return first < end
    for key in range(first, end):
        visible = True
        if p.mask.address != 0:
            entry = entry_address(p.mask, rows, r, key)
            visible = carray(as_pointer(entry), (1,), np.uint8)[0] != 0
        if visible and p.bias.address != 0:
            bias = _number(entry_address(p.bias, rows, r, key), p.bias.kind)
            visible = like.dtype.type(bias) != -np.inf  # as rounded where it is added
        if visible:
            return True
    return False


@tile_function
def _number(address, kind):
    """An element of any of the four types."""
    at = as_pointer(address)
    if kind == FLOAT16:
        return np.float64(widen(carray(at, (1,), np.uint16)[0]))
    if kind == BFLOAT16:
        return np.float64(widen(carray(at, (1,), np.int16)[0]))
    if kind == FLOAT32:
        return np.float64(carray(at, (1,), np.float32)[0])
    return carray(at, (1,), np.float64)[0]


@tile_function
def forget_unread(dout, out, columns):
    """Zero what a row's dO has where its O is 0, as it is in all of a fully masked row.

    So a NaN of that dO does not reach delta, and a part of the keys in which the row sees none
    still has the delta of the whole.
    """
    for c in range(columns):
        dout[c] = 0 if out[c] == 0 else dout[c]


@tile_function
def keep_terms(p, rows, lse, share, delta):
    """Leave each row's P_sink * (dlse - D) to `dsink`; lse is +inf where it sees no key."""
    terms = carray(as_pointer(p.sink_terms), (p.batch, p.heads_q, p.Nq), lse.dtype)
    for r in range(rows.rows):
        row = rows.row0 + r
        head = rows.head0 + row % rows.group
        sink = sink_of(p, head, lse)
        total = lse[r] if lse[r] != np.inf else row_value(p.lse, rows, row, lse)
        term = -(exp(sink - total) * share[r]) * delta[r]
        terms[rows.b, head, row // rows.group] = term if sink != -np.inf else 0


@kernel
def dsink(params, slab, shared, worker):
    """One worker: takes heads until none is left. Sums their terms, over batch and queries."""
    if not enter(shared, worker):
        return
    p = params[0]
    terms = carray(as_pointer(p.sink_terms), (p.batch, p.heads_q, p.Nq), slab.dtype)
    zero = slab.dtype.type(0)
    head = next_task(shared)
    while head < p.heads_q and not stopped(shared, worker):
        total, rest = zero, zero
        for b in range(p.batch):
            for start in range(0, p.Nq, CHAIN):
                part = zero
                for i in range(start, min(start + CHAIN, p.Nq)):
                    part += terms[b, head, i]
                total, lost = two_sum(total, part)
                rest += lost
        slab[0] = joined(total, rest)
        address = p.dsink.address + head * p.dsink.b  # its only axis is the first
        store_row(p.dsink, address, slab, 1, slab.dtype.type(1))
        head = next_task(shared)
    leave(shared, worker)

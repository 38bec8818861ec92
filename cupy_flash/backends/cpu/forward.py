"""The forward kernel. Dao, "FlashAttention-2" (2023), algorithm 1."""

from collections import namedtuple

import numpy as np
from numba import carray
from numpy.lib.stride_tricks import as_strided

from ...plan.cpu import FEW_ROWS, NEAR_KEYS, SURPLUS_ROWS
from .jit import as_pointer, inlined, kernel, next_task, tile_function
from .mask import hide_row_by_range, key_range, open_rows
from .micro_kernel import add_matmul, few_products, few_scores
from .scores import score_tile
from .sink import join_sink
from .softmax import scale_rows, softmax_row_step, softmax_step
from .sums import gather, join_row, move
from .team import enter, leave, stopped
from .tiles import (
    carve,
    load_keys,
    load_tile,
    packed_address,
    round_tile,
    store_row,
    transpose_tile,
    zero_rows,
)

# Scratch of one worker. S: [key, query]; q_t: [d, query]; acc: [query, d_v], and over many keys
# what has left it: far, far_rest (see sums.py); the rest: [query].
# Where K and V are read in place, s: [query, key] and q: [query, d] stand for k, v, S and q_t.
Tiles = namedtuple("Tiles", "k v S s q_t q acc far far_rest m l l_rest alpha m_ref part total")


@tile_function
def carve_tiles(slab, p):
    """All tiles of a worker."""
    start = np.int64(0)  # no literal: see load_keys
    few = FEW_ROWS if p.in_place else 0
    keys = 0 if p.in_place else p.Bc + SURPLUS_ROWS
    d = 0 if p.in_place else p.d
    far_rows = p.Br if p.Nk > NEAR_KEYS else 0
    k, end = carve(slab, start, keys, p.d)
    v, end = carve(slab, end, keys, p.d_v)
    S, end = carve(slab, end, keys, p.Br)
    q_t, end = carve(slab, end, d, p.Br)
    s, end = carve(slab, end, few, p.Bc)
    q, end = carve(slab, end, few, p.d)
    acc, end = carve(slab, end, p.Br + SURPLUS_ROWS, max(p.d, p.d_v))
    far, end = carve(slab, end, far_rows, p.d_v)
    far_rest, end = carve(slab, end, far_rows, p.d_v)
    x, end = carve(slab, end, np.int64(7), p.Br)
    return Tiles(
        k, v, S, s, q_t, q, acc, far, far_rest, x[0], x[1], x[2], x[3], x[4], x[5], x[6]
    )


@kernel
def forward(params, slab, shared, worker):
    """One worker: takes tiles of query rows until none is left. slab: its scratch, zeroed."""
    if not enter(shared, worker):
        return
    p = params[0]
    t = carve_tiles(slab, p)
    tiles = (p.group * p.Nq + p.Br - 1) // p.Br
    count = p.batch * p.heads_k * tiles * p.splits
    task = next_task(shared)
    while task < count and not stopped(shared, worker):
        split = task % p.splits
        tile = tiles - 1 - task // p.splits % tiles  # the longest causal rows first
        sequence = task // (p.splits * tiles)
        b, head_k = sequence // p.heads_k, sequence % p.heads_k
        forward_tile(p, t, b, head_k, tile * p.Br, split, shared, worker)
        task = next_task(shared)
    leave(shared, worker)


@inlined
def forward_tile(p, t, b, head_k, row0, split, shared, worker):
    """The packed rows row0 ... row0 + Br of one key head, over the keys of one split."""
    rows = open_rows(p, b, head_k * p.group, p.group, row0, t.S)
    load_queries(p, t, rows)
    k_base = p.k.address + b * p.k.b + head_k * p.k.h
    v_base = p.v.address + b * p.v.b + head_k * p.v.h
    first, last = key_range(rows)
    first = max(first, split * p.split_keys)
    last = min(last, (split + 1) * p.split_keys)
    lazy = t.S.dtype.type(p.lazy)
    near = 0
    for key0 in range(first, last, p.Bc):
        if stopped(shared, worker):
            break
        keys = min(p.Bc, last - key0)
        if near >= NEAR_KEYS:
            move(t.acc, t.far, t.far_rest, rows.rows, p.d_v)
            near = 0
        near += keys
        if p.in_place:
            few_rows_step(p, t, rows, k_base, v_base, key0, keys)
            continue
        load_keys(t.k, p.k, k_base, key0, keys, p.d)
        load_keys(t.v, p.v, v_base, key0, keys, p.d_v)
        round_tile(t.k, keys, p.d, p.round_inputs)
        round_tile(t.v, keys, p.d_v, p.round_inputs)
        score_tile(t.S, t.k, t.v, t.q_t, p, rows, key0, keys)
        if softmax_step(
            t.S, t.m, t.l, t.l_rest, t.alpha, t.m_ref, t.part, t.total, keys, rows.lanes, lazy
        ):
            scale_rows(t.acc, t.alpha, rows.rows, p.d_v)
            if len(t.far) > 0:
                scale_rows(t.far, t.alpha, rows.rows, p.d_v)
                scale_rows(t.far_rest, t.alpha, rows.rows, p.d_v)
        round_tile(t.S, keys, rows.lanes, p.round_P)
        add_matmul(t.acc, t.S.T, t.v, rows.rows, p.d_v, keys)  # acc += P V
    if len(t.far) > 0:
        gather(t.acc, t.far, t.far_rest, rows.rows, p.d_v)
    join_row(t.l, t.l_rest, rows.rows)
    store_result(p, t.acc, t.m, t.l, rows, split)


@tile_function
def load_queries(p, t, rows):
    """q_t (or q, if K is read in place); acc, m and l as they start."""
    base = p.q.address + rows.b * p.q.b + rows.head0 * p.q.h
    load_tile(t.acc, p.q, base, rows.row0, rows.rows, p.d, p.group)
    round_tile(t.acc, rows.rows, p.d, p.round_inputs)
    if p.in_place:
        for r in range(rows.rows):
            for c in range(p.d):
                t.q[r, c] = t.acc[r, c]
    else:
        transpose_tile(t.q_t, t.acc, rows.rows, p.d, rows.lanes)
    t.acc[:] = 0
    zero_rows(t.far, 0, len(t.far))
    zero_rows(t.far_rest, 0, len(t.far))
    t.m[:] = -np.inf
    t.l[:] = 0
    t.l_rest[:] = 0


@tile_function
def few_rows_step(p, t, rows, k_base, v_base, key0, keys):
    """One key tile for few rows, with the keys along the lanes."""
    k = view(p.k, k_base, key0, keys, p.d, t.S)
    v = view(p.v, v_base, key0, keys, p.d_v, t.S)
    few_scores(t.s.T, k, t.q, rows.rows, keys, p.d, t.s.dtype.type(p.scale))
    for r in range(rows.rows):
        hide_row_by_range(t.s, rows, r, key0, keys)
        if softmax_row_step(
            t.s, t.m, t.l, t.l_rest, t.alpha, t.total, t.part, r, keys, t.s.dtype.type(p.lazy)
        ):
            alpha = t.alpha[r]
            for c in range(p.d_v):
                t.acc[r, c] *= alpha
            for c in range(p.d_v if len(t.far) > 0 else 0):
                t.far[r, c] *= alpha
                t.far_rest[r, c] *= alpha
    few_products(t.acc, t.s, v, rows.rows, p.d_v, keys)


@tile_function
def view(tensor, base, key0, keys, columns, like):
    """Keys key0 ... key0 + keys of a tensor in the user's memory."""
    start = carray(as_pointer(base + key0 * tensor.n), (1, 1), like.dtype)
    return as_strided(start, (keys, columns), (tensor.n, like.itemsize))


@tile_function
def store_result(p, acc, m, l, rows, split):
    """out = acc / l, lse = m + ln l, with the sink in both.

    Rows that see no key: 0, and the sink or -inf; rows behind q_lens: 0 and -inf.
    """
    out = p.out.address + rows.b * p.out.b + rows.head0 * p.out.h
    lse = p.lse.address + rows.b * p.lse.b + rows.head0 * p.lse.h
    for r in range(min(p.Br, rows.group * p.Nq - rows.row0)):
        row = rows.row0 + r
        seen = r < rows.rows and l[r] != 0
        if not seen:
            l[r] = 0
            acc[r, :] = 0  # selected, not multiplied: scratch may hold a NaN
            m[r] = -np.inf
        if p.sink != 0 and p.splits == 1 and r < rows.rows:  # of splits, `combine` adds it
            head = rows.head0 + row % rows.group
            m[r], l[r], alpha = join_sink(p, head, m[r], l[r], acc)
            for c in range(p.d_v):
                acc[r, c] *= alpha
        if seen:
            for c in range(p.d_v):
                acc[r, c] /= l[r]
        if p.splits > 1:
            store_partial(p, acc[r], m[r], l[r], rows, row, split)
            continue
        store_row(p.out, packed_address(p.out, out, row, rows.group), acc[r], p.d_v, 1)
        if p.lse.address != 0:
            m[r] += np.log(l[r])
            store_row(p.lse, packed_address(p.lse, lse, row, rows.group), m[r:], 1, 1)


@tile_function
def store_partial(p, values, m, l, rows, row, split):
    """The row's share of one split, for `combine`: [splits, batch, heads_q, Nq, (d_v or m, l)]."""
    shape = (p.splits, p.batch, p.heads_q, p.Nq)
    head, i = rows.head0 + row % rows.group, row // rows.group
    out_partial = carray(as_pointer(p.out_partial), (*shape, p.d_v), values.dtype)
    sums_partial = carray(as_pointer(p.sums_partial), (*shape, 2), values.dtype)
    sums_partial[split, rows.b, head, i, 0] = m
    sums_partial[split, rows.b, head, i, 1] = l
    for c in range(p.d_v):
        out_partial[split, rows.b, head, i, c] = values[c]

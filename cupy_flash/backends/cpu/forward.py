"""The forward kernel. Dao, "FlashAttention-2" (2023), algorithm 1."""

import numpy as np
from numba import carray

from .jit import as_pointer, kernel, next_task, tile_function
from .mask import key_range, open_rows
from .micro_kernel import matmul
from .scores import score_tile
from .softmax import scale_rows, softmax_step
from .tiles import carve, load_tile, packed_address, round_tile, store_row, transpose_tile


@kernel
def forward(params, slab, tasks):
    """One worker: takes tiles of query rows until none is left. slab: its scratch, zeroed."""
    p = params[0]
    tiles = (p.group * p.Nq + p.Br - 1) // p.Br
    count = p.batch * p.heads_k * tiles * p.splits
    task = next_task(tasks)
    while task < count:
        split = task % p.splits
        tile = tiles - 1 - task // p.splits % tiles            # the longest causal rows first
        sequence = task // (p.splits * tiles)
        b, head_k = sequence // p.heads_k, sequence % p.heads_k
        forward_tile(p, slab, b, head_k, tile * p.Br, split)
        task = next_task(tasks)


@tile_function
def forward_tile(p, slab, b, head_k, row0, split):
    """The packed rows row0 ... row0 + Br of one key head, over the keys of one split."""
    k_tile, end = carve(slab, 0, p.Bc + 6, p.d)
    v_tile, end = carve(slab, end, p.Bc + 6, p.d_v)
    S, end = carve(slab, end, p.Bc + 6, p.Br)
    q_t, end = carve(slab, end, p.d, p.Br)
    acc, end = carve(slab, end, p.Br + 6, max(p.d, p.d_v))
    state, end = carve(slab, end, 4, p.Br)
    m, l, alpha, m_ref = state[0], state[1], state[2], state[3]

    rows = open_rows(p, b, head_k * p.group, p.group, row0, slab)
    load_tile(acc, p.q, p.q.address + b * p.q.b + rows.head0 * p.q.h, row0, rows.rows, p.d, p.group)
    round_tile(acc, rows.rows, p.d, p.round_inputs)
    transpose_tile(q_t, acc, rows.rows, p.d, rows.lanes, slab.dtype.type(p.scale))
    acc[:] = 0
    m[:] = -np.inf
    l[:] = 0
    k_base = p.k.address + b * p.k.b + head_k * p.k.h
    v_base = p.v.address + b * p.v.b + head_k * p.v.h
    first, last = key_range(rows)
    first = max(first, split * p.split_keys)
    last = min(last, (split + 1) * p.split_keys)
    for key0 in range(first, last, p.Bc):
        keys = min(p.Bc, last - key0)
        load_tile(k_tile, p.k, k_base, key0, keys, p.d, 1)
        load_tile(v_tile, p.v, v_base, key0, keys, p.d_v, 1)
        round_tile(k_tile, keys, p.d, p.round_inputs)
        round_tile(v_tile, keys, p.d_v, p.round_inputs)
        score_tile(S, k_tile, v_tile, q_t, p, rows, key0, keys)
        if softmax_step(S, m, l, alpha, m_ref, keys, rows.lanes, slab.dtype.type(p.lazy)):
            scale_rows(acc, alpha, rows.rows, p.d_v)
        round_tile(S, keys, rows.lanes, p.round_P)
        matmul(acc, S.T, v_tile, rows.rows, p.d_v, keys, True)             # acc += P V
    store_result(p, acc, m, l, rows, split)


@tile_function
def store_result(p, acc, m, l, rows, split):
    """out = acc / l and lse = m + ln l; rows behind q_lens, and rows that see no key: 0 and -inf."""
    out = p.out.address + rows.b * p.out.b + rows.head0 * p.out.h
    lse = p.lse.address + rows.b * p.lse.b + rows.head0 * p.lse.h
    for r in range(min(p.Br, rows.group * p.Nq - rows.row0)):
        row = rows.row0 + r
        inverse = 1 / l[r] if r < rows.rows and l[r] != 0 else acc.dtype.type(0)
        m[r] = m[r] + np.log(l[r]) if r < rows.rows else -np.inf
        if p.splits == 1:
            store_row(p.out, packed_address(p.out, out, row, rows.group), acc[r], p.d_v, inverse)
            store_row(p.lse, packed_address(p.lse, lse, row, rows.group), m[r:], 1, 1)
        else:
            store_partial(p, acc[r], m[r], inverse, rows, row, split)


@tile_function
def store_partial(p, values, lse, inverse, rows, row, split):
    """The row's share of one split, for `combine`: [splits, batch, heads_q, Nq, (d_v)]."""
    shape = (p.splits, p.batch, p.heads_q, p.Nq)
    head, i = rows.head0 + row % rows.group, row // rows.group
    out_partial = carray(as_pointer(p.out_partial), (*shape, p.d_v), values.dtype)
    lse_partial = carray(as_pointer(p.lse_partial), shape, values.dtype)
    lse_partial[split, rows.b, head, i] = lse
    for c in range(p.d_v):
        out_partial[split, rows.b, head, i, c] = values[c] * inverse

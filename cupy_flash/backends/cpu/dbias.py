"""The gradient of the bias, summed over the axes along which it was broadcast.

A task owns one tile of dbias and walks everything that was added with it, so that each element has
one writer and a fixed order of sums. The scores are computed once more for it (two products beside
the five of `backward`), which keeps the workspace O(1) for every shape of bias.
"""

import numpy as np

from .backward import carve_tiles, gradient_tile, load_key_tiles, load_rows
from .jit import kernel, next_task, tile_function
from .mask import key_range, open_rows
from .team import enter, leave, stopped
from .tiles import carve, store_row, zero_rows


@kernel
def dbias(params, slab, shared, worker):
    """One worker: takes tiles of dbias until none is left. slab: its scratch, zeroed."""
    if not enter(shared, worker):
        return
    p = params[0]
    t, end = carve_tiles(slab, p)
    acc, end = carve(slab, end, p.Bc, p.Br)  # [key, query], one line if broadcast
    tiles_q = (p.Nbias_q + p.Br - 1) // p.Br
    tiles_k = (p.Nbias_k + p.Bc - 1) // p.Bc
    count = p.batch_bias * p.heads_bias * tiles_q * tiles_k
    task = next_task(shared)
    while task < count and not stopped(shared, worker):
        key0 = task % tiles_k * p.Bc
        row0 = task // tiles_k % tiles_q * p.Br
        head = task // (tiles_k * tiles_q) % p.heads_bias
        b = task // (tiles_k * tiles_q * p.heads_bias)
        zero_rows(acc, np.int64(0), p.Bc)
        for b_in in range(b, p.batch if p.batch_bias == 1 else b + 1):
            for head_in in range(head, p.heads_q if p.heads_bias == 1 else head + 1):
                add_head(p, t, acc, b_in, head_in, row0, key0, shared, worker)
        store_tile(p, t, acc, b, head, row0, key0)
        task = next_task(shared)
    leave(shared, worker)


@tile_function
def add_head(p, t, acc, b, head, row0, key0, shared, worker):
    """acc += dS of one head, of the rows and keys that meet this tile."""
    row_end = p.Nq if p.Nbias_q == 1 else min(row0 + p.Br, p.Nq)
    key_end = p.Nk if p.Nbias_k == 1 else min(key0 + p.Bc, p.Nk)
    k_base = p.k.address + b * p.k.b + head // p.group * p.k.h
    v_base = p.v.address + b * p.v.b + head // p.group * p.v.h
    for row in range(row0, row_end, p.Br):
        if stopped(shared, worker):
            break
        rows = open_rows(p, b, head, np.int64(1), row, t.S)
        load_rows(p, t, rows)
        first, last = key_range(rows)
        for key in range(key0, key_end, p.Bc):
            if stopped(shared, worker):
                break
            keys = min(p.Bc, key_end - key)
            if key < last and first < key + keys:
                load_key_tiles(p, t, k_base, v_base, key, keys)
                gradient_tile(p, t, rows, key, keys)
                add_tile(p, acc, t.dP, rows.rows, keys)


@tile_function
def add_tile(p, acc, dS, rows, keys):
    """acc += dS, folded onto the first line of a broadcast axis.

    A tile is summed before it is added: a sum over all rows and keys keeps its last digits.
    """
    zero = acc.dtype.type(0)
    if p.Nbias_q == 1:
        tile_total = zero
        for j in range(keys):
            total = zero
            for r in range(rows):
                total += dS[j, r]
            tile_total += total
            if p.Nbias_k != 1:
                acc[j, 0] += total
        if p.Nbias_k == 1:
            acc[0, 0] += tile_total
    elif p.Nbias_k == 1:
        for r in range(rows):
            total = zero
            for j in range(keys):
                total += dS[j, r]
            acc[0, r] += total
    else:
        for j in range(keys):
            for r in range(rows):
                acc[j, r] += dS[j, r]


@tile_function
def store_tile(p, t, acc, b, head, row0, key0):
    """The tile of dbias from acc."""
    keys = min(p.Bc, p.Nbias_k - key0)
    line = t.U.reshape(t.U.size)
    for r in range(min(p.Br, p.Nbias_q - row0)):
        for j in range(keys):
            line[j] = acc[j, r]
        address = (
            p.dbias.address
            + b * p.dbias.b
            + head * p.dbias.h
            + (row0 + r) * p.dbias.n
            + key0 * p.dbias.c
        )
        store_row(p.dbias, address, line, keys, acc.dtype.type(1))

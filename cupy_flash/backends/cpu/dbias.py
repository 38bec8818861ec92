"""The gradient of the bias, summed over the axes along which it was broadcast.

A task owns one tile of dbias and walks everything that was added with it, so that each element has
one writer and a fixed order of sums. The scores are computed once more for it (two products beside
the five of `backward`), which keeps the workspace O(1) for every shape of bias.
"""

import numpy as np

from ...plan.cpu import CHAIN
from .backward import carve_tiles, gradient_tile, load_key_tiles, load_rows
from .jit import kernel, next_task, tile_function
from .mask import key_range, open_rows
from .normalise import load_normalisers
from .sums import add_row, add_rows, join_rows, sum_line
from .team import enter, leave, stopped
from .tiles import carve, store_row, zero_rows


@kernel
def dbias(params, slab, shared, worker):
    """One worker: takes tiles of dbias until none is left. slab: its scratch, zeroed."""
    if not enter(shared, worker):
        return
    p = params[0]
    t, end = carve_tiles(slab, p)
    acc, end = carve(slab, end, p.Bc, p.Br)  # [key, query]; one key if broadcast
    rest, end = carve(slab, end, p.Bc, p.Br)
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
        if folded(p):
            zero_rows(rest, np.int64(0), p.Bc)
        for b_in in range(b, p.batch if p.batch_bias == 1 else b + 1):
            for head_in in range(head, p.heads_q if p.heads_bias == 1 else head + 1):
                add_head(p, t, acc, rest, b_in, head_in, row0, key0, shared, worker)
        store_tile(p, t, acc, rest, b, head, row0, key0)
        task = next_task(shared)
    leave(shared, worker)


@tile_function
def folded(p):
    """Whether an element of dbias is the sum of several elements of dS."""
    whole = p.batch_bias == p.batch and p.heads_bias == p.heads_q and p.Nbias_q == p.Nq
    return not (whole and p.Nbias_k == p.Nk)


@tile_function
def add_head(p, t, acc, rest, b, head, row0, key0, shared, worker):
    """acc + rest += dS of one head, of the rows and keys that meet this tile."""
    row_end = p.Nq if p.Nbias_q == 1 else min(row0 + p.Br, p.Nq)
    key_end = p.Nk if p.Nbias_k == 1 else min(key0 + p.Bc, p.Nk)
    k_base = p.k.address + b * p.k.b + head // p.group * p.k.h
    v_base = p.v.address + b * p.v.b + head // p.group * p.v.h
    for row in range(row0, row_end, p.Br):
        if stopped(shared, worker):
            break
        rows = open_rows(p, b, head, np.int64(1), row, t.S)
        load_rows(p, t, rows)
        load_normalisers(p, rows, t.lse, t.share)
        first, last = key_range(rows)
        for key in range(key0, key_end, p.Bc):
            if stopped(shared, worker):
                break
            keys = min(p.Bc, key_end - key)
            if key < last and first < key + keys:
                load_key_tiles(p, t, k_base, v_base, key, keys)
                gradient_tile(p, t, rows, key, keys, True)
                add_tile(p, acc, rest, t.dP, t.U, rows, keys)


@tile_function
def add_tile(p, acc, rest, dS, U, rows, keys):
    """acc + rest += dS, summed over the keys if dbias has one for all. U: room for a tile."""
    if p.Nbias_k == 1:
        sum_keys(dS, keys, rows.lanes, U[0], U[1])
        add_row(acc[0], rest[0], U[0], rows.rows)
    elif folded(p):
        add_rows(acc, rest, dS, keys, rows.rows)
    else:
        for j in range(keys):
            for r in range(rows.rows):
                acc[j, r] = dS[j, r]


@tile_function
def sum_keys(dS, keys, lanes, total, part):
    """total = the sum of dS over its keys."""
    total[:lanes] = 0
    for j0 in range(0, keys, CHAIN):
        part[:lanes] = 0
        for j in range(j0, min(j0 + CHAIN, keys)):
            for i in range(lanes):
                part[i] += dS[j, i]
        for i in range(lanes):
            total[i] += part[i]


@tile_function
def store_tile(p, t, acc, rest, b, head, row0, key0):
    """The tile of dbias from acc + rest, summed over the rows if dbias has one for all."""
    keys = min(p.Bc, p.Nbias_k - key0)
    line = t.U.reshape(t.U.size)
    if folded(p):
        join_rows(acc, rest, keys, p.Br)
    for j in range(keys if p.Nbias_q == 1 else 0):
        acc[j, 0] = sum_line(acc[j], p.Br)
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

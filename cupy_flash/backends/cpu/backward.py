"""The backward kernel: dQ, dK, dV without atomics, in a fixed order of sums.

Dao et al., "FlashAttention" (2022), algorithm 4, with the query tiles in the outer loop. A chunk is
a key head, or one of several interleaved parts of its query tiles; it has accumulators for dK and
dV, in which the gradients of grouped heads add up too. A task is a chunk; or a single query tile,
and then the workers take turns at the chunk's accumulators, in the order in which one worker alone
would add.
"""

from collections import namedtuple

import numpy as np
from numba import carray

from ...plan.cpu import (
    CHAIN,
    KEY_BLOCK,
    NEAR_KEYS,
    NEAR_TILES,
    SURPLUS_ROWS,
    VECTOR_BYTES,
)
from .jit import as_pointer, inlined, kernel, next_task, tile_function
from .mask import key_range, open_rows
from .micro_kernel import MICRO_ROWS, add_matmul, matmul
from .normalise import find_large_rows, keep_normalisers, normalise
from .scores import score_tile, through_cap
from .sink import forget_unread, join_sinks, keep_terms, sees_key
from .softmax import softmax_backward, softmax_step
from .sums import add_lines, gather, join_row, move
from .team import enter, leave, stopped
from .tiles import (
    carve,
    load_keys,
    load_tile,
    packed_address,
    round_tile,
    row_value,
    store_row,
    transpose_tile,
    zero_rows,
)
from .turns import ALL_KEYS, Turns, end_turn, wait_for_turn

# Scratch of one worker. q_t, do_t: [d, query]; S, dP, U: [key, query]; dq, far, rest: [query, d],
# see sums.py; lse, share, delta and the 7 lines of state: [query].
Tiles = namedtuple("Tiles", "q q_t do do_t k v S dP U dq far rest o lse share delta state")

# dK and dV of a key head, and what has left them: see sums.py.
KeySums = namedtuple("KeySums", "dk dv dk_far dv_far")


@tile_function
def wants(gradient):
    """Whether a gradient is asked for; tiles and sums of those that are not have no rows."""
    return gradient.address != 0


@tile_function
def carve_tiles(slab, p):
    """All tiles of a worker, and where the rest of the slab starts."""
    d, d_v, Br, Bc = p.d, p.d_v, p.Br + SURPLUS_ROWS, p.Bc + SURPLUS_ROWS
    q, end = carve(slab, np.int64(0), Br, d)
    q_t, end = carve(slab, end, d, p.Br)
    do, end = carve(slab, end, Br, d_v)
    do_t, end = carve(slab, end, d_v, p.Br)
    k, end = carve(slab, end, Bc, d)
    v, end = carve(slab, end, Bc, d_v)
    S, end = carve(slab, end, Bc, p.Br)
    dP, end = carve(slab, end, Bc, p.Br)
    U, end = carve(slab, end, Bc, p.Br)
    dq, end = carve(slab, end, Br if wants(p.dq) else 0, d)
    far_rows = p.Br if wants(p.dq) and p.Nk > NEAR_KEYS else 0
    far, end = carve(slab, end, far_rows, d)
    rest, end = carve(slab, end, far_rows, d)
    o, end = carve(slab, end, np.int64(1), d_v)
    x, end = carve(slab, end, np.int64(3), p.Br)
    state, end = carve(slab, end, np.int64(7), p.Br)
    tiles = Tiles(q, q_t, do, do_t, k, v, S, dP, U, dq, far, rest, o, x[0], x[1], x[2], state)
    return tiles, end


@kernel
def backward(params, slab, shared, worker):
    """One worker: takes chunks or query tiles until none is left. slab: its scratch, zeroed."""
    if not enter(shared, worker):
        return
    p = params[0]
    t, end = carve_tiles(slab, p)
    heads, tiles = p.batch * p.heads_k, (p.group * p.Nq + p.Br - 1) // p.Br
    parts = tiles if p.by_tiles else p.chunks  # of a key head; the first of each head come first
    task = next_task(shared)
    while task < heads * parts and not stopped(shared, worker):
        sequence, part = task % heads, task // heads
        b, head_k = sequence // p.heads_k, sequence % p.heads_k
        sums = accumulators(p, slab[end:], sequence * p.chunks + part % p.chunks)
        if p.partial == 0:
            zero_keys(p, sums, shared, worker)
        for tile in range(part, tiles, parts):
            turns = Turns(p.turns + 8 * sequence * tiles, tile, p.chunks)
            backward_rows(p, t, b, head_k, tile * p.Br, sums, turns, shared, worker)
        if p.partial == 0:
            store_all_keys(p, sums, b, head_k, shared, worker)
        task = next_task(shared)
    leave(shared, worker)


@tile_function
def accumulators(p, own, chunk):
    """dK and dV of all keys: in the worker's slab, or in the chunk's part of the workspace."""
    lanes = VECTOR_BYTES // own.itemsize
    tiles = (p.group * p.Nq + p.Br - 1) // p.Br
    levels = 2 if (tiles + p.chunks - 1) // p.chunks > NEAR_TILES else 1
    k_lines = p.Nk + SURPLUS_ROWS if wants(p.dk) else 0
    v_lines = p.Nk + SURPLUS_ROWS if wants(p.dv) else 0
    k_far, v_far = (levels - 1) * k_lines, (levels - 1) * v_lines
    k_vectors, v_vectors = (p.d + lanes - 1) // lanes + 1, (p.d_v + lanes - 1) // lanes + 1
    size = levels * (k_lines * k_vectors + v_lines * v_vectors) * lanes
    if p.partial != 0:
        own = carray(as_pointer(p.partial + chunk * size * own.itemsize), (size,), own.dtype)
    dk, end = carve(own, np.int64(0), k_lines, p.d)
    dv, end = carve(own, end, v_lines, p.d_v)
    dk_far, end = carve(own, end, k_far, p.d)
    dv_far, end = carve(own, end, v_far, p.d_v)
    return KeySums(dk, dv, dk_far, dv_far)


@inlined
def backward_rows(p, t, b, head_k, row0, sums, turns, shared, worker):
    """One tile of packed rows: adds to dK and dV, writes its rows of dq."""
    rows = open_rows(p, b, head_k * p.group, p.group, row0, t.S)
    load_rows(p, t, rows)
    t.dq[:] = 0
    zero_rows(t.far, 0, len(t.far))
    zero_rows(t.rest, 0, len(t.far))
    k_base = p.k.address + b * p.k.b + head_k * p.k.h
    v_base = p.v.address + b * p.v.b + head_k * p.v.h
    first, last = key_range(rows)
    scored = wants(p.dq) or wants(p.dk)  # these take dS
    if find_large_rows(t.lse, rows.rows):
        sum_rows(p, t, rows, k_base, v_base, first, last, shared, worker)
        if p.sink != 0:
            join_sinks(p, rows, t.state[0], t.state[1])
        normalise(t.lse, t.share, t.state[0], t.state[1], rows.rows)
    if p.normalisers != 0:
        keep_normalisers(p, rows, t.lse, t.share)
    if wants(p.dsink):
        keep_terms(p, rows, t.lse, t.share, t.delta)
    # By the tile's number, so that sums do not depend on who computes which tile. Tiles that see a
    # key follow each other: never more than NEAR_TILES of them add to it between two moves.
    has_far = len(sums.dk_far) + len(sums.dv_far) > 0
    moves = has_far and turns.tile // p.chunks % NEAR_TILES == NEAR_TILES - 1
    near = 0
    for key0 in range(first, last if scored or wants(p.dv) else first, p.Bc):
        if stopped(shared, worker):
            break
        keys = min(p.Bc, last - key0)
        if wants(p.dq) and near >= NEAR_KEYS:
            move(t.dq, t.far, t.rest, rows.rows, p.d)
            near = 0
        near += keys
        load_key_tiles(p, t, k_base, v_base, key0, keys)
        gradient_tile(p, t, rows, key0, keys, scored)
        if p.softcap != 0 and scored:
            through_cap(t.dP, t.k, t.q_t, t.U, p, keys, rows.lanes)
        # The surplus rows of a product are real keys here.
        zero_rows(t.S, keys, keys + SURPLUS_ROWS)
        zero_rows(t.dP, keys, keys + SURPLUS_ROWS)
        round_tile(t.S, keys, rows.lanes, p.round_P)
        round_tile(t.dP, keys, rows.lanes, p.round_P)
        touched = key0 + (keys + MICRO_ROWS - 1) // MICRO_ROWS * MICRO_ROWS
        if p.by_tiles and not wait_for_turn(turns, touched, shared, worker):
            break
        if wants(p.dv):
            add_matmul(sums.dv[key0:], t.S, t.do, keys, p.d_v, rows.rows)  # dV += P^T dO
        if wants(p.dk):
            add_matmul(sums.dk[key0:], t.dP, t.q, keys, p.d, rows.rows)  # dK += dS^T Q
        if moves:
            move_lines(p, sums, key0, key0 + keys)
        if p.by_tiles:
            end_turn(turns, key0 + keys)
        if wants(p.dq):
            add_matmul(t.dq, t.dP.T, t.k, rows.rows, p.d, keys)  # dQ += dS K
    if p.by_tiles and wait_for_turn(turns, ALL_KEYS, shared, worker):
        end_turn(turns, ALL_KEYS)
    if wants(p.dq):
        store_queries(p, t, rows)


@tile_function
def store_queries(p, t, rows):
    """dq = scale dQ of the tile's rows, 0 of those that see no key."""
    b, row0 = rows.b, rows.row0
    if len(t.far) > 0:
        gather(t.dq, t.far, t.rest, rows.rows, p.d)
    base = p.dq.address + b * p.dq.b + rows.head0 * p.dq.h
    for r in range(min(p.Br, p.group * p.Nq - row0)):
        if r >= rows.rows or t.lse[r] == np.inf:
            t.dq[r, :] = 0  # selected, not multiplied: scratch may hold a NaN
        factor = t.dq.dtype.type(p.scale)
        store_row(p.dq, packed_address(p.dq, base, row0 + r, p.group), t.dq[r], p.d, factor)


@inlined
def load_rows(p, t, rows):
    """Q, dO and their transposes; lse (+inf for rows that see no key, so that P is 0) and delta.

    Rows that see no key are zeroed: 0 * NaN must not reach dK. delta = rowsum(dO * O) - dlse, with
    the dO of the products: a rounding of dO shifts all dP of a row, and cancels in dP - delta.
    """
    b, row0, n, group = rows.b, rows.row0, rows.rows, rows.group
    t.share[:] = 1
    load_tile(t.q, p.q, p.q.address + b * p.q.b + rows.head0 * p.q.h, row0, n, p.d, group)
    load_tile(
        t.do, p.dout, p.dout.address + b * p.dout.b + rows.head0 * p.dout.h, row0, n, p.d_v, group
    )
    round_tile(t.q, n, p.d, p.round_inputs)
    round_tile(t.do, n, p.d_v, p.round_inputs)
    out = p.out.address + b * p.out.b + rows.head0 * p.out.h
    for r in range(n):
        t.lse[r] = row_value(p.lse, rows, row0 + r, t.o)
        t.delta[r] = 0
        empty = t.lse[r] == -np.inf
        blind = empty or (p.sink != 0 and not sees_key(p, rows, r, t.o))
        if not empty:
            load_tile(t.o, p.out, out, row0 + r, np.int64(1), p.d_v, group)
            if blind:
                forget_unread(t.do[r], t.o[0], p.d_v)
            for c0 in range(0, p.d_v, CHAIN):  # as the micro-kernel does
                part = t.o.dtype.type(0)
                for c in range(c0, min(c0 + CHAIN, p.d_v)):
                    part += t.o[0, c] * t.do[r, c]
                t.delta[r] += part
            if p.dlse.address != 0:
                t.delta[r] -= row_value(p.dlse, rows, row0 + r, t.o)
        if blind:
            t.lse[r] = np.inf
            zero_rows(t.q, r, r + 1)
            zero_rows(t.do, r, r + 1)
    transpose_tile(t.q_t, t.q, n, p.d, rows.lanes)
    transpose_tile(t.do_t, t.do, n, p.d_v, rows.lanes)


@tile_function
def sum_rows(p, t, rows, k_base, v_base, first, last, shared, worker):
    """m and l of the rows as t.state[0] and t.state[1], m being the largest score."""
    m, l, rest, lazy = t.state[0], t.state[1], t.state[2], t.S.dtype.type(0)
    alpha, m_ref, part, total = t.state[3], t.state[4], t.state[5], t.state[6]
    m[:] = -np.inf
    l[:] = 0
    rest[:] = 0
    for key0 in range(first, last, p.Bc):
        if stopped(shared, worker):
            break
        keys = min(p.Bc, last - key0)
        load_key_tiles(p, t, k_base, v_base, key0, keys)
        score_tile(t.S, t.k, t.v, t.q_t, p, rows, key0, keys)
        softmax_step(t.S, m, l, rest, alpha, m_ref, part, total, keys, rows.lanes, lazy)
    join_row(l, rest, rows.rows)


@tile_function
def load_key_tiles(p, t, k_base, v_base, key0, keys):
    """K and V of one key tile."""
    load_keys(t.k, p.k, k_base, key0, keys, p.d)
    load_keys(t.v, p.v, v_base, key0, keys, p.d_v)
    round_tile(t.k, keys, p.d, p.round_inputs)
    round_tile(t.v, keys, p.d_v, p.round_inputs)


@tile_function
def gradient_tile(p, t, rows, key0, keys, scored):
    """S = P, and dP = P * (dP - delta): the gradient of the scores behind the softcap.

    Of dP only if `scored`; otherwise it holds nothing.
    """
    score_tile(t.S, t.k, t.v, t.q_t, p, rows, key0, keys)
    if scored:
        matmul(t.dP, t.v, t.do_t, keys, rows.lanes, p.d_v, t.dP.dtype.type(1))  # dP^T = V dO^T
    softmax_backward(t.S, t.dP, t.lse, t.share, t.delta, keys, rows.lanes)


@tile_function
def zero_keys(p, sums, shared, worker):
    """sums = 0, in blocks."""
    end = p.Nk + SURPLUS_ROWS
    for key0 in range(0, end, KEY_BLOCK):
        if stopped(shared, worker):
            break
        for x in sums:
            zero_rows(x, min(key0, x.shape[0]), min(key0 + KEY_BLOCK, x.shape[0]))


@tile_function
def store_all_keys(p, sums, b, head_k, shared, worker):
    """`join_keys` and `store_keys` for all keys of a head, in blocks."""
    for key0 in range(0, p.Nk, KEY_BLOCK):
        if stopped(shared, worker):
            break
        end = min(key0 + KEY_BLOCK, p.Nk)
        join_keys(sums, key0, end)
        store_keys(p, sums, b, head_k, key0, end)


@tile_function
def move_lines(p, sums, first, end):
    """What dk and dv of the keys first ... end have goes to their second level."""
    if wants(p.dk):
        add_lines(sums.dk_far, sums.dk, first, end)
    if wants(p.dv):
        add_lines(sums.dv_far, sums.dv, first, end)


@tile_function
def join_keys(sums, first, end):
    """dk and dv of the keys first ... end += what has left them."""
    if len(sums.dk_far) > 0:
        add_lines(sums.dk, sums.dk_far, first, end)
    if len(sums.dv_far) > 0:
        add_lines(sums.dv, sums.dv_far, first, end)


@tile_function
def store_keys(p, sums, b, head_k, first, end):
    """dk = scale dK and dv = dV of the keys first ... end of a key head."""
    dk = p.dk.address + b * p.dk.b + head_k * p.dk.h
    dv = p.dv.address + b * p.dv.b + head_k * p.dv.h
    one = sums.dv.dtype.type(1)
    if wants(p.dk):
        for j in range(first, end):
            store_row(p.dk, dk + j * p.dk.n, sums.dk[j], p.d, sums.dk.dtype.type(p.scale))
    if wants(p.dv):
        for j in range(first, end):
            store_row(p.dv, dv + j * p.dv.n, sums.dv[j], p.d_v, one)


@kernel
def reduce_chunks(params, slab, shared, worker):
    """dk and dv from the chunks' accumulators, block by block of keys.

    The chunks are added in pairs, these in pairs, and so on.
    """
    if not enter(shared, worker):
        return
    p = params[0]
    blocks = (p.Nk + KEY_BLOCK - 1) // KEY_BLOCK
    task = next_task(shared)
    while task < p.batch * p.heads_k * blocks and not stopped(shared, worker):
        head, key0 = task // blocks, task % blocks * KEY_BLOCK
        end = min(key0 + KEY_BLOCK, p.Nk)
        for chunk in range(p.chunks):
            join_keys(accumulators(p, slab, head * p.chunks + chunk), key0, end)
        step = 1
        while step < p.chunks:
            for chunk in range(0, p.chunks - step, 2 * step):
                total = accumulators(p, slab, head * p.chunks + chunk)
                other = accumulators(p, slab, head * p.chunks + chunk + step)
                if wants(p.dk):
                    add_lines(total.dk, other.dk, key0, end)
                if wants(p.dv):
                    add_lines(total.dv, other.dv, key0, end)
            step *= 2
        sums = accumulators(p, slab, head * p.chunks)
        store_keys(p, sums, head // p.heads_k, head % p.heads_k, key0, end)
        task = next_task(shared)
    leave(shared, worker)

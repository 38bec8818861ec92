"""Which keys a query sees: the one definition for forward, backward and dbias.

Query i of a sequence stands at position i + offset among the keys and sees the keys
position - left ... position + right that exist. Causal is right = 0; `offset` defaults to
kv_len - q_len, so that the newest query sees every key.
"""

from collections import namedtuple

import numpy as np
from numba import carray

from ...plan.cpu import VECTOR_BYTES
from .jit import as_pointer, tile_function

# One tile of packed rows (see tiles.py) of one sequence: everything that its tiles of scores share.
# rows: how many are real; lanes: rows rounded up to whole vectors; first, end: the half-open range
# of visible keys of each row; position: the row's place among the keys.
Rows = namedtuple("Rows", "b head0 group row0 rows lanes first end position")


@tile_function
def lengths(p, b):
    """True numbers of queries and keys of the batch entry."""
    q_len, kv_len = p.Nq, p.Nk
    if p.q_lens != 0:
        q_len = np.int64(carray(as_pointer(p.q_lens), (p.batch,), np.int32)[b])
    if p.kv_lens != 0:
        kv_len = np.int64(carray(as_pointer(p.kv_lens), (p.batch,), np.int32)[b])
    return q_len, kv_len


@tile_function
def visible_keys(p, position, kv_len):
    """Half-open range of the keys that a query at `position` sees; (0, 0) if none."""
    first = max(position - p.left, 0)
    end = min(position + p.right + 1, kv_len)
    return (first, end) if first < end else (0, 0)


@tile_function
def open_rows(p, b, head0, group, row0, dtype_like):
    """The rows row0 ... row0 + Br of the heads head0 ... head0 + group."""
    q_len, kv_len = lengths(p, b)
    offset = kv_len - q_len if p.aligned else p.q_offset
    rows = max(0, min(p.Br, group * q_len - row0))
    width = VECTOR_BYTES // dtype_like.itemsize
    lanes = (rows + width - 1) // width * width
    first = np.zeros(lanes, np.int64)
    end = np.zeros(lanes, np.int64)
    position = np.zeros(lanes, np.int64)
    for r in range(rows):
        position[r] = (row0 + r) // group + offset
        first[r], end[r] = visible_keys(p, position[r], kv_len)
    return Rows(b, head0, group, row0, rows, lanes, first, end, position)


@tile_function
def key_range(rows):
    """Half-open range of the keys that any row sees."""
    begin, end = 0, 0
    for r in range(rows.rows):
        if rows.first[r] < rows.end[r]:
            begin = rows.first[r] if end == 0 else min(begin, rows.first[r])
            end = max(end, rows.end[r])
    return begin, end


@tile_function
def hide_by_range(S, rows, key0, keys):
    """S = -inf where the row does not see the key; nothing to do inside the visible band."""
    inside = True
    for r in range(rows.rows):
        inside = inside and rows.first[r] <= key0 and key0 + keys <= rows.end[r]
    if inside:
        return
    first, end = rows.first, rows.end
    for j in range(keys):
        key = key0 + j
        for i in range(rows.lanes):
            S[j, i] = S[j, i] if first[i] <= key and key < end[i] else -np.inf


@tile_function
def hide_row_by_range(s, rows, r, key0, keys):
    """`hide_by_range` for row r of a tile s [query, key]."""
    for j in range(min(keys, rows.first[r] - key0)):
        s[r, j] = -np.inf
    for j in range(max(0, rows.end[r] - key0), keys):
        s[r, j] = -np.inf


@tile_function
def entry_address(tensor, rows, r, key0):
    """Address of the mask's or bias's entry for row r and key key0; strides may be 0."""
    packed = rows.row0 + r
    head, query = rows.head0 + packed % rows.group, packed // rows.group
    return tensor.address + rows.b * tensor.b + head * tensor.h + query * tensor.n + key0 * tensor.c


@tile_function
def hide_by_mask(S, mask, rows, key0, keys):
    """S = -inf where the boolean mask is False."""
    step = mask.c
    for r in range(rows.rows):
        address = entry_address(mask, rows, r, key0)
        for j in range(keys):
            visible = carray(as_pointer(address + j * step), (1,), np.uint8)[0]
            S[j, r] = S[j, r] if visible else -np.inf


@tile_function
def forget_unseen_keys(S, rows, keys, k_tile, v_tile):
    """Zero the keys and values that no row of the tile sees: whatever they hold must not matter.

    0 * NaN is NaN, so a probability of 0 is not enough to keep a poisoned value out of a product.
    """
    for j in range(keys):
        seen = False
        for i in range(rows.rows):
            seen = seen or S[j, i] != -np.inf
        if not seen:
            k_tile[j, :] = 0
            v_tile[j, :] = 0

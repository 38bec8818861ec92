"""Tiles: pieces of a worker's scratch slab, and how user arrays get into them and out again.

A row of a problem is "packed" when the query heads of one key head stand side by side:
packed row r is query r // group of head r % group. A tile of packed rows serves grouped heads with
one load of K and V, and puts a group's heads into the lanes when one query decodes.
"""

import numpy as np
from numba import carray

from ...plan.cpu import VECTOR_BYTES
from .dtypes import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    ROUND_NOT,
    round_to_tf32,
    to_bfloat16,
    to_float16,
    widen,
)
from .jit import as_pointer, tile_function


@tile_function
def carve(slab, start, rows, columns):
    """A tile [rows, pitch] of the slab and where the next one starts; see plan.cpu.tile_elements.

    The pitch is whole vectors and one to spare: rows 512 or 1024 bytes apart would compete for the
    same few sets of the L1 cache. Rows on 64-byte borders: a vector across two lines costs twice.
    """
    lanes = VECTOR_BYTES // slab.itemsize
    pitch = (columns + lanes - 1) // lanes * lanes + lanes
    end = start + rows * pitch
    return slab[start:end].reshape(rows, pitch), end


@tile_function
def packed_address(tensor, base, row, group):
    """Address of the packed row of a tensor whose batch and first head start at `base`."""
    return base + row // group * tensor.n + row % group * tensor.h


@tile_function
def _load(tile, tensor, base, row0, rows, columns, group, dtype):
    for r in range(rows):
        x = carray(as_pointer(packed_address(tensor, base, row0 + r, group)), (columns,), dtype)
        for c in range(columns):
            tile[r, c] = widen(x[c])


@tile_function
def load_tile(tile, tensor, base, row0, rows, columns, group):
    """tile[r, :columns] = packed row row0 + r of the tensor, widened, for r < rows.

    Rows and columns beyond keep what they held.
    """
    kind = tensor.kind
    if kind == FLOAT16:
        _load(tile, tensor, base, row0, rows, columns, group, np.uint16)
    elif kind == BFLOAT16:
        _load(tile, tensor, base, row0, rows, columns, group, np.int16)
    elif kind == FLOAT32:
        _load(tile, tensor, base, row0, rows, columns, group, np.float32)
    else:
        _load(tile, tensor, base, row0, rows, columns, group, np.float64)


@tile_function
def load_keys(tile, tensor, base, key0, keys, columns):
    """tile[j, :columns] = key (or value) key0 + j of the head at `base`, for j < keys."""
    alone = np.int64(1)  # no literal: Numba compiles a function anew for each literal argument
    load_tile(tile, tensor, base, key0, keys, columns, alone)


@tile_function
def row_value(tensor, rows, row, like):
    """The packed row's element of lse or dlse, which have the accumulators' type."""
    base = tensor.address + rows.b * tensor.b + rows.head0 * tensor.h
    return carray(as_pointer(packed_address(tensor, base, row, rows.group)), (1,), like.dtype)[0]


@tile_function
def transpose_tile(tile, source, rows, columns, lanes):
    """tile[c, r] = source[r, c]; lanes r >= rows are 0."""
    for r in range(rows):
        for c in range(columns):
            tile[c, r] = source[r, c]
    if lanes > rows:
        for c in range(columns):
            tile[c, rows:lanes] = 0


@tile_function
def zero_rows(tile, first, end):
    """tile[first:end] = 0."""
    for r in range(first, end):
        tile[r, :] = 0


@tile_function
def round_tile(tile, rows, columns, mode):
    """tile[:rows, :columns] rounded in place to float16, bfloat16 or TF32; ROUND_NOT: untouched."""
    if mode == ROUND_NOT:
        return
    for r in range(rows):
        if mode == FLOAT16:
            for c in range(columns):
                tile[r, c] = widen(to_float16(np.float32(tile[r, c])))
        elif mode == BFLOAT16:
            for c in range(columns):
                tile[r, c] = widen(to_bfloat16(np.float32(tile[r, c])))
        else:
            for c in range(columns):
                tile[r, c] = round_to_tf32(np.float32(tile[r, c]))


@tile_function
def store_row(tensor, address, values, columns, factor):
    """factor * values[:columns] to the row at `address`, rounded to the tensor's type."""
    kind, step = tensor.kind, tensor.c
    for c in range(columns):
        x = values[c] * factor
        at = as_pointer(address + c * step)
        if kind == FLOAT16:
            carray(at, (1,), np.uint16)[0] = to_float16(np.float32(x))
        elif kind == BFLOAT16:
            carray(at, (1,), np.int16)[0] = to_bfloat16(np.float32(x))
        elif kind == FLOAT32:
            carray(at, (1,), np.float32)[0] = x
        else:
            carray(at, (1,), np.float64)[0] = x

"""Rows whose lse cannot hold ln l: backward works out m and l of these once more.

P = exp(S - lse) carries the rounding error of lse, half a unit in its last place: 2^-24 |lse| in
float32. Beside a bias of -3.4e38 for every key, ln l is lost and P would be 1 for each of n keys.
From |lse| = 2^13 on, where P would lose more than float16 holds of it (2^-11), P = exp(S - m) / l.

The keys of a call may be a part of all keys, and lse that of the whole. So m and l count only if
they say the same as lse to its precision; otherwise P = exp(S - lse) stays.
"""

import numpy as np
from numba import carray

from .jit import as_pointer, tile_function

LARGE_LSE = 2.0**13


@tile_function
def find_large_rows(lse, rows):
    """Whether a row of the tile has an lse that is too large to give P; +inf is a hidden row."""
    found = False
    for r in range(rows):
        found = found or LARGE_LSE <= abs(lse[r]) < np.inf
    return found


@tile_function
def normalise(lse, share, m, l, rows):
    """m in the place of lse, and 1 / l for `share`, in large rows whose keys are all here."""
    tolerance = lse.dtype.type(2) * np.finfo(lse.dtype).eps
    for r in range(rows):
        difference = abs(m[r] + np.log(l[r]) - lse[r])
        if LARGE_LSE <= abs(lse[r]) < np.inf and difference <= tolerance * abs(lse[r]):
            lse[r] = m[r]
            share[r] = 1 / l[r]


@tile_function
def normalisers_of(p, rows, r, like):
    """Two numbers of the tile's row r in workspace: lse or m, and the share."""
    kept = carray(as_pointer(p.normalisers), (p.batch, p.heads_q, p.Nq, 2), like.dtype)
    row = rows.row0 + r
    return kept[rows.b, rows.head0 + row % rows.group, row // rows.group]


@tile_function
def keep_normalisers(p, rows, lse, share):
    """Leave them to `dbias`, which sees a few of a row's keys at a time."""
    for r in range(rows.rows):
        kept = normalisers_of(p, rows, r, lse)
        kept[0], kept[1] = lse[r], share[r]


@tile_function
def load_normalisers(p, rows, lse, share):
    """What `keep_normalisers` left."""
    for r in range(rows.rows):
        kept = normalisers_of(p, rows, r, lse)
        lse[r], share[r] = kept[0], kept[1]

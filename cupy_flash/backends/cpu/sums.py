"""Sums whose error does not grow with their length.

A chain of n additions may be off by n - 1 roundings, and is off by n / 6 of them where the terms
are alike. So a sum has levels, and the last one carries its own rounding errors along:

    16 terms in a chain            CHAIN: products and l, forward and backward
    6 (16) such chains             a tile of 96 keys, or a slice of 256 where few rows are read
    43 (16) of these               NEAR_KEYS: in the tile where a product adds up, like acc
    any number of these            far + rest, by `two_sum`: its own error is of second order

Together that is at most 65 roundings, whatever the number of keys. A BLAS product chains 256 to 512
terms. dK and dV have a line for each key, so that a rest for each would cost memory: their
second level is a plain sum of what NEAR_TILES tiles of rows add, 256 roundings and one for each
24,576 rows. l and dbias are small, and every tile goes to `two_sum` at once.
"""

from ...plan.cpu import CHAIN
from .jit import exact_function, tile_function
from .tiles import zero_rows


@exact_function
def two_sum(a, b):
    """a + b, and what its rounding lost (Knuth, The Art of Computer Programming 2, 4.2.2)."""
    total = a + b
    shift = total - a
    return total, (a - (total - shift)) + (b - shift)


@tile_function
def joined(total, rest):
    """total + rest; the rest of a sum that has become infinite is NaN."""
    return total + rest if rest == rest else total


@tile_function
def add_row(total, rest, row, columns):
    """total + rest += row, for vectors of which columns count."""
    for c in range(columns):
        x, lost = two_sum(total[c], row[c])
        total[c] = x
        rest[c] += lost


@tile_function
def add_rows(total, rest, tile, rows, columns):
    """total + rest += tile. Not row by row with `add_row`: cutting rows out takes longer."""
    for r in range(rows):
        for c in range(columns):
            x, lost = two_sum(total[r, c], tile[r, c])
            total[r, c] = x
            rest[r, c] += lost


@tile_function
def join_row(total, rest, columns):
    """total += rest."""
    for c in range(columns):
        total[c] = joined(total[c], rest[c])


@tile_function
def join_rows(total, rest, rows, columns):
    """total += rest."""
    for r in range(rows):
        for c in range(columns):
            total[r, c] = joined(total[r, c], rest[r, c])


@tile_function
def move(near, far, rest, rows, columns):
    """far + rest += near, near = 0."""
    add_rows(far, rest, near, rows, columns)
    zero_rows(near, 0, rows)


@tile_function
def gather(near, far, rest, rows, columns):
    """near += far + rest."""
    add_rows(far, rest, near, rows, columns)
    join_rows(far, rest, rows, columns)
    for r in range(rows):
        for c in range(columns):
            near[r, c] = far[r, c]


@tile_function
def add_lines(far, near, first, end):
    """far += near, near = 0, for the lines first ... end of two tiles."""
    for j in range(first, end):
        for c in range(far.shape[1]):
            far[j, c] += near[j, c]
    zero_rows(near, first, end)


@tile_function
def sum_line(line, n):
    """The sum of line[:n], in chains of CHAIN."""
    total = line.dtype.type(0)
    for start in range(0, n, CHAIN):
        part = line.dtype.type(0)
        for i in range(start, min(start + CHAIN, n)):
            part += line[i]
        total += part
    return total

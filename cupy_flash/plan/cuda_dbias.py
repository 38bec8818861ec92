"""How backward_sm80 sums dbias where it makes dS, in one pass; `cuda_src/attention/dbias_sums.cuh`
has the other half. What it leaves is computed by dbias_wmma, which makes all scores anew."""

from math import ceil

from .kernel import FRAGMENT
from .types import LAZY, Buffer, CudaConfig

# The kernel's constant `dbias`; 0: it does nothing for dbias.
STORED, ADDED, OVER_ROWS, OVER_KEYS = 1, 2, 3, 4
REASONS = {
    STORED: "writes dbias where dS is",
    ADDED: "adds dS to dbias",
    OVER_ROWS: "sums dbias over its rows",
    OVER_KEYS: "sums dbias over its keys",
}
# Sums of a row over keys, in float64, to which tiles of keys add in turns: fewer blocks add to one
# at a time. For narrower types they are as good as exact. Those of float64 over 2^16 terms of one
# sign, 16 added at a time, are off by one unit (a standard deviation), as are those of dbias_wmma.
KEY_SUMS = 8
MOST_KEYS = {"float64": 2**16}
# ADDED adds one dS after the other. Over batch and heads any other program does so, too. Over rows
# others add up tiles first: so up to the length at which a sum is off by a few units.
MOST_ROWS = 2**13
WARPS = 4                   # of dbias_sum
PIECE = 8                   # elements of a line of ADDED that a thread of it rounds
SECTOR = 8                  # keys: their float32 sums fill the 32 bytes that are added at once


def sum_of(problem):
    """One of the numbers above; and if it is 0 although dbias is asked for, the reason."""
    p = problem
    if not p.wants_dbias:
        return 0, ""
    if p.softcap:
        return 0, "dbias is dS behind the softcap, and backward_sm80 has dS before it"
    if 0 in p.scores:
        return 0, "there are no scores, and dbias is 0"
    batch, heads, rows, keys = p.bias_shape
    if p.bias_shape == p.scores:
        return STORED, ""
    if rows == 1 and (p.group == 1 or heads == 1):      # all rows of a tile share an element
        return OVER_ROWS, ""
    if keys == 1 and p.Nk <= MOST_KEYS.get(p.dtype, p.Nk):
        return OVER_KEYS, ""
    if keys > 1 and (rows > 1 or p.Nq * p.batch // batch <= MOST_ROWS):
        return ADDED, ""
    return 0, ("sums of backward_sm80 over so many keys would be less exact" if keys == 1 else
               "sums of backward_sm80 over so many rows of grouped heads would be less exact")


def constants(problem):
    """Those of backward_sm80."""
    how, _ = sum_of(problem)
    return ("dbias", how), *((("key_sums", KEY_SUMS),) if how == OVER_KEYS else ())


def cleared(main):
    """Those of `backward_preprocess` before a launch: it clears sums that blocks then add to."""
    known = dict(main.config.constants)
    if known.get("dbias") not in (ADDED, OVER_KEYS):
        return ()
    return tuple((name, known[name]) for name in ("dbias", "key_sums") if name in known)


def buffers(problem, main):
    """The sums in workspace, of a launch of backward_sm80; none if dbias itself will do."""
    p, known = problem, dict(main.config.constants)
    batch, heads, rows, _ = p.bias_shape
    how = known["dbias"]
    if how == STORED or (how == ADDED and p.dbias_dtype == p.accumulator):
        return []
    extent, dtype = {
        ADDED: (batch * heads * rows * ceil(p.Nk / SECTOR) * SECTOR, p.accumulator),
        OVER_ROWS: (main.splits * p.batch * p.heads_k * known["parts"] * p.Nk, "float64"),
        OVER_KEYS: (KEY_SUMS * p.batch * p.heads_q * p.Nq, "float64"),
    }[how]
    return [Buffer("dbias_sums", extent, dtype)]


def sum_launch(problem, main):
    """What dbias_sum is compiled for behind a launch of backward_sm80, its tasks and its shared
    memory."""
    p, known = problem, dict(main.config.constants)
    how = known["dbias"]
    kept = {ADDED: ("dbias",), OVER_ROWS: ("dbias", "parts"), OVER_KEYS: ("dbias", "key_sums")}[how]
    config = CudaConfig(p.accumulator, None, FRAGMENT, FRAGMENT, FRAGMENT, FRAGMENT, WARPS, (),
                        LAZY, tuple((name, known[name]) for name in kept))
    threads = 32 * WARPS
    batch, heads, rows, keys = p.bias_shape
    if how == ADDED:
        return config, batch * heads * rows * ceil(keys / (PIECE * threads)), 0
    columns = keys if how == OVER_ROWS else rows
    return config, batch * heads * ceil(columns / threads), threads * 8

"""Sums over many keys or rows on a GPU: when they leave the tensor cores, and when they are cut.

Tensor cores cut off what a sum cannot hold, all to one side: on an H200 a sum of n equal terms of
16 bits is off by 6e-9 n of itself. Rounded additions are off by a few units at 2^13 terms, and by
more where there are more. `cuda_src/attention/long_sums.cuh` has the other half.
"""

from dataclasses import replace
from math import ceil

# Terms of a sum that may stay in the tensor cores, by element type and whether the result is as
# wide as the sums. A baseline errs by the rounding of P, which averages out like 1 / sqrt(n):
# measured with values of mean 1, the rule holds up to twice as many.
IN_TENSOR_CORES = {("float16", True): 2**11, ("bfloat16", True): 2**13,
                   ("float16", False): 2**17, ("bfloat16", False): 2**20}
# Packed rows that dk and dv are summed over before they move on to sums in memory. Kernels add
# every 16 to 64 of them: with values of mean 1, float32 rows of dv are off by 4 units then, those
# of a baseline by 2 (H200).
PIECE = 2**11
FEW_TILES = 4               # rows are split if less than a quarter of the GPU has a tile of keys
ALIGNMENT = 128             # splits of the rows begin at tiles of every kernel


def is_fresh(problem, terms):
    """Whether 16-bit products over so many terms must be added up outside of the tensor cores."""
    wide = problem.out_dtype == problem.accumulator
    return terms > IN_TENSOR_CORES.get((problem.dtype, wide), terms)


def keys_of_a_row(problem):
    """The most keys that a query sees by its position."""
    return min(problem.Nk, problem.mask.left + problem.mask.right + 1)


def rows_of_a_key(problem):
    """The most packed rows that see a key by its position."""
    p = problem
    return p.group * min(p.Nq, p.mask.left + p.mask.right + 1)


def few_tiles(problem, Bc, device):
    """Whether keys are so few and rows so many that most multiprocessors would have no tile."""
    p = problem
    tiles = p.batch * p.heads_k * ceil(p.Nk / Bc)
    return rows_of_a_key(p) > 2 * PIECE and FEW_TILES * tiles < device.sms


def tuned(problem, config, device):
    """The configuration of a backward kernel, with what the length of its sums asks for."""
    rows = rows_of_a_key(problem)
    fresh = is_fresh(problem, rows)
    rounded = fresh or problem.dtype == problem.accumulator
    extra = (("fresh", 1),) if fresh else ()
    if (rounded and rows > 2 * PIECE) or few_tiles(problem, config.Bc, device):
        extra += (("pieces", PIECE),)
    return replace(config, constants=(*config.constants, *extra)) if extra else config


def splits(problem, offer, blocks):
    """Parts of the rows of a walk in pieces: as many as make so many blocks."""
    piece, tasks = dict(offer.config.constants).get("pieces", 0), offer.tasks
    rows = problem.group * problem.Nq
    if not piece or not tasks:
        return 1
    parts = max(1, min(blocks // tasks, ceil(rows / piece)))
    return ceil(rows / split_rows(rows, parts))             # none of them is empty


def split_rows(rows, parts):
    """Packed rows of each split, whole tiles."""
    return ceil(rows / parts / ALIGNMENT) * ALIGNMENT

"""The kernels without tensor cores, for heads so narrow that these would multiply zeros.

A thread owns whole rows (`forward_simt`, `dq_simt`, `normalise_simt`) or whole keys (`dkdv_simt`,
`dbias_simt`) in registers and walks over the others in shared memory, where one load serves all
that it owns. float32 is multiplied as it is. Every element has one writer.
"""

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from . import long_sums
from .kernel import (
    SCALES,
    SCORE_ROW,
    SPLIT_KEYS,
    Candidate,
    Offer,
    Parts,
    changes_scores,
    itemsize,
    total,
    wanted,
)
from .types import LAZY, CudaConfig

WIDEST = 8                  # head dim: half a fragment, and few enough registers
# Rows that dk and dv are summed over before they move on to sums in memory, where there are more of
# them: blocks can then have a part of the rows. Of MANY_ROWS there would be many pieces.
PIECE, MANY_ROWS = 512, 2**16
PADDED = 1.25               # rows or keys that a tile may have for each that there is
RANGE, PIECE_BYTES = 8, 16  # bytes of KeyRange, and of what one load brings


class Tile(NamedTuple):
    """A row of a table.

    A thread owns `own` rows or keys, of `warps` warps; `walked` keys or rows are in shared memory,
    and sums of `chunk` of them are added up at a time. `together` of the rows that `dkdv_simt` and
    `dbias_simt` walk over are in registers at once. It serves up to `columns` of q and v together.
    `blocks` of it are to run on a multiprocessor, half as many where options need registers;
    `plain`: it has none to spare for options.
    """

    own: int
    warps: int
    walked: int
    chunk: int
    together: int
    columns: int
    blocks: int
    reason: str
    plain: bool = False


FOUR, THREE, TWO = (f"each load serves {n}" for n in ("four", "three", "two"))
ONE, FEW = "a thread has one", "; small blocks, for few of them"
# The first row that is wide enough is taken if it has tiles for all multiprocessors and pads
# little, otherwise the last. Registers decide how many a thread owns.
ROW_TILES = {
    "float32": (
        Tile(4, 4, 256, 8, 1, 6, 4, f"{FOUR} rows"),
        Tile(4, 4, 256, 8, 1, 8, 3, f"{FOUR} rows"),
        Tile(3, 4, 128, 4, 1, 16, 3, f"{THREE} rows"),
        Tile(1, 2, 128, 8, 1, 16, 8, f"{ONE} row{FEW}"),
    ),
    "float64": (
        Tile(2, 4, 128, 4, 1, 7, 3, f"{TWO} rows"),
        Tile(2, 4, 128, 4, 1, 16, 2, f"{TWO} rows", plain=True),
        Tile(1, 2, 128, 4, 1, 16, 6, f"{ONE} row{FEW}"),
    ),
}
DQ_TILES = {
    "float32": (
        Tile(4, 4, 128, 8, 1, 5, 4, f"{FOUR} rows"),
        Tile(4, 4, 128, 4, 1, 8, 3, f"{FOUR} rows"),
        Tile(2, 4, 128, 4, 1, 16, 3, f"{TWO} rows"),
        Tile(1, 2, 128, 4, 1, 16, 6, f"{ONE} row{FEW}"),
    ),
    "float64": (
        Tile(2, 4, 128, 4, 1, 7, 3, f"{TWO} rows"),
        Tile(2, 4, 128, 4, 1, 14, 2, f"{TWO} rows", plain=True),
        Tile(2, 4, 128, 2, 1, 16, 2, f"{TWO} rows, few keys at a time", plain=True),
        Tile(1, 2, 128, 4, 1, 16, 4, f"{ONE} row{FEW}"),
    ),
}
# In float64 a sum may be as long as a tile: its chunk is.
KEY_TILES = {
    "float32": (
        Tile(4, 4, 128, 16, 4, 5, 3, f"{FOUR} keys"),
        Tile(4, 4, 128, 16, 2, 6, 3, f"{FOUR} keys"),
        Tile(4, 4, 128, 16, 1, 8, 3, f"{FOUR} keys"),
        Tile(2, 4, 128, 16, 1, 16, 3, f"{TWO} keys"),
        Tile(1, 2, 64, 16, 2, 16, 6, f"{ONE} key{FEW}"),
    ),
    "float64": (
        Tile(2, 4, 64, 64, 2, 5, 3, f"{TWO} keys"),
        Tile(2, 4, 64, 64, 1, 8, 3, f"{TWO} keys"),
        Tile(2, 4, 64, 64, 1, 16, 2, f"{TWO} keys"),
        Tile(1, 2, 64, 64, 1, 16, 4, f"{ONE} key{FEW}"),
    ),
}
# `walked` rows are those of a tile of dbias, whose sums lie in shared memory.
DBIAS_TILES = {
    "float32": (Tile(1, 4, 64, 1, 4, 16, 2, "a column of dbias of each thread"),),
    "float64": (Tile(1, 4, 32, 1, 2, 16, 2, "a column of dbias of each thread"),),
}


@dataclass(frozen=True, eq=False)
class SimtKernel(Candidate):
    """One of the kernels; `rows` is a table like `ROW_TILES`.

    Attributes
    ----------
    owns : {"rows", "keys", "dbias"}
        What the threads of a block have.
    """

    owns: str = "rows"

    def best(self, problem, device):
        """The first row that is wide enough, or the last if that is too large for the problem."""
        p = problem
        if p.dtype not in ("float32", "float64"):
            return "16-bit products are those of tensor cores"
        if p.precision == "tf32":
            return "precision 'tf32' asks for operands that are rounded, as tensor cores take them"
        if max(p.d, p.d_v) > WIDEST:
            return f"it keeps whole rows in registers, of d and d_v up to {WIDEST}"
        wide = [tile for tile in self.rows[p.dtype]
                if p.d + p.d_v <= tile.columns and not (tile.plain and p.has_features)]
        if not wide:
            return f"no tile for head dims {p.d} and {p.d_v}"
        tile = wide[0] if self.suits(p, wide[0], device) else wide[-1]
        config = self.config_of(p, tile)
        return Offer(config, smem_bytes(self, config), self.count_tasks(p, config), tile.reason)

    def blocks_of(self, config):
        """As many as there is room for: small ones wait for each other less."""
        return dict(config.constants)["blocks"]

    def suits(self, problem, tile, device):
        """Whether a tile is not much larger than the problem, and leaves no multiprocessor idle."""
        p, size = problem, 32 * tile.warps * tile.own
        owned, walked = p.group * p.Nq, p.Nk
        if self.owns != "rows":
            owned, walked = walked, owned
        tiles = ceil(owned / size)
        parts = max(1, walked // SPLIT_KEYS)
        return (tiles * size <= PADDED * owned
                and p.batch * p.heads_k * tiles * parts >= 2 * device.sms)

    def config_of(self, problem, tile):
        """What the kernel is compiled for. Head dims are the true ones: no column is padded."""
        p, size = problem, 32 * tile.warps * tile.own
        Br, Bc = (size, tile.walked) if self.owns == "rows" else (tile.walked, size)
        blocks = ceil(tile.blocks / 2) if p.has_features else tile.blocks
        constants = (("chunk", tile.chunk), ("blocks", blocks))
        options = p.compiled("backward", True)
        if self.direction == "forward" or self.entry == "normalise_simt":
            options = p.compiled("forward", True) + p.compiled("forward", False)
            constants += (("scaled", int(p.has_features
                                         or not SCALES[0] <= p.scale <= SCALES[1])),)
        if self.owns != "rows":
            constants += (("together", tile.together),)
        if self.entry == "dkdv_simt":
            constants += (("dbias", int(writes_dbias(p))), *wanted(p), *pieces(p))
        return CudaConfig(p.dtype, None, p.d, p.d_v, Br, Bc, tile.warps, options, LAZY, constants)

    def count_tasks(self, problem, config):
        """Tiles of packed query rows, of keys, or of dbias."""
        p = problem
        if self.owns == "dbias":
            b, h, n, c = p.bias_shape
            return b * h * ceil(n / config.Br) * ceil(c / config.Bc)
        tiles = (ceil(p.group * p.Nq / config.Br) if self.owns == "rows"
                 else ceil(p.Nk / config.Bc))
        return p.batch * p.heads_k * tiles

    def parameters(self, problem, launch):
        """How the keys of dq are split, in whole tiles."""
        if self.entry != "dq_simt":
            return {}
        tiles = ceil(ceil(problem.Nk / launch.splits) / launch.config.Bc)
        return {"key_splits": launch.splits, "split_keys": tiles * launch.config.Bc}


def pieces(problem):
    """The constant of a walk in pieces, if there is more than one."""
    rows = long_sums.rows_of_a_key(problem)
    return (("pieces", PIECE if rows <= MANY_ROWS else long_sums.PIECE),) if rows > PIECE else ()


def writes_dbias(problem):
    """Whether `dkdv_simt` writes dbias: each score has an element of its own."""
    p = problem
    return p.wants_dbias and p.bias_shape == (p.batch, p.heads_q, p.Nq, p.Nk)


def smem_bytes(kernel, config):
    """Dynamic shared memory of a block."""
    return total(smem_pieces(kernel, config))


def smem_pieces(kernel, config):
    """What a block has in shared memory, in the order of the kernel's tiles."""
    size, d, d_v, Br, Bc = itemsize(config.element), config.d, config.d_v, config.Br, config.Bc
    if kernel.owns == "rows":
        columns = d if kernel.entry == "normalise_simt" else d + d_v
        return (("K and V", Bc * columns * size),)
    constants = dict(config.constants)
    step = max(1, PIECE_BYTES // size // constants["together"])
    width = ceil((d + d_v + 2) / step) * step
    row = SCORE_ROW[size] if changes_scores(config) else RANGE
    tile = ("Q, dO, lse, delta", Br * width * size), ("rows", Br * row)
    if kernel.owns == "dbias":
        return *tile, ("sums", Br * Bc * size)
    return (*tile, ("dbias", Br * 8)) if constants["dbias"] else tile


FORWARD = SimtKernel("forward_simt", "simt/forward.cuh", "ForwardParams", direction="forward",
                     family="simt", splits=True, rows=ROW_TILES)
DKDV = SimtKernel("dkdv_simt", "simt/dkdv.cuh", "BackwardParams", direction="backward",
                  family="simt", rows=KEY_TILES, owns="keys",
                  parts=Parts("dq_simt", "dbias_simt", "normalise_simt"))
DQ = SimtKernel("dq_simt", "simt/dq.cuh", "DqParams", family="simt", splits=True, rows=DQ_TILES)
KERNELS = (FORWARD, DKDV, DQ,
           SimtKernel("dbias_simt", "simt/dbias.cuh", "BackwardParams", family="simt",
                      rows=DBIAS_TILES, owns="dbias"),
           SimtKernel("normalise_simt", "simt/normalise.cuh", "BackwardParams", family="simt",
                      rows=ROW_TILES))

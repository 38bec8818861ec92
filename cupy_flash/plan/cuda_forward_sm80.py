"""The tiles of the forward kernel that keeps scores, P and acc in registers, and when it serves.

It is fast because nothing but Q, K and V goes through shared memory.
"""

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from . import long_sums
from .kernel import (
    FRAGMENT,
    SCALES,
    SCORE_ROW,
    Candidate,
    Offer,
    changes_scores,
    itemsize,
    kind_of,
    total,
)
from .types import LAZY, CudaConfig


class Row(NamedTuple):
    """A row of the table.

    `width` is the widest head dim that it serves. `blocks` of it are to run on a multiprocessor;
    `keep_Q` has Q in registers, `split_Q` has its two parts for 3xTF32 in shared memory. With
    `pairs` two warps share their rows, each with half the columns of the output. `together`: one
    loop for all tiles of keys; without it those that all rows see have a loop of their own, which
    is up to 8 % faster, and takes up to 1 s longer to compile where a tile has many products.
    """

    Br: int
    Bc: int
    warps: int
    width: int
    reason: str
    blocks: int = 2
    keep_Q: bool = False
    pairs: bool = False
    split_Q: bool = False
    together: bool = False


# The first row that fits is taken.
ROWS = {
    "16-bit": (
        Row(128, 64, 4, 64, "each fragment of K and V feeds two products; Q in registers",
            keep_Q=True),
        Row(128, 48, 4, 128, "32 rows a warp, few keys beside the wide accumulator"),
        Row(128, 64, 8, 256, "a wide d_v: two warps share 32 rows, each has half the columns",
            blocks=1, pairs=True),
        Row(128, 64, 8, 256, "a wide d_v, not of 32 columns each: 16 rows a warp", blocks=1),
        Row(64, 48, 4, 256, "a wide d_v in 99 KiB: 16 rows a warp, few keys"),
    ),
    "tf32": (
        Row(128, 48, 4, 64, "32 rows a warp: each fragment of K and V feeds two products"),
        Row(128, 32, 4, 96, "32 rows a warp, few keys beside the wide accumulator"),
        Row(128, 32, 4, 128, "32 rows a warp, few keys; long code", together=True),
        # d = 256 on an H200: 1.5 times the speed of four warps, d = 192: 1.1 times.
        Row(128, 32, 8, 256, "a wide d_v: 16 rows a warp, eight warps share K and V", blocks=1,
            together=True),
        Row(64, 32, 4, 256, "a wide d_v in 130 KiB: 16 rows a warp fill the registers",
            together=True),
        Row(64, 16, 4, 256, "a wide d_v in 99 KiB: a fragment of keys", together=True),
    ),
    # Three products each: long code in every tile.
    "tf32x3": (
        Row(128, 32, 4, 64, "32 rows a warp, few keys; a block splits its operands once",
            split_Q=True, together=True),
        Row(128, 32, 4, 64, "32 rows a warp, few keys: operands come in two parts", together=True),
        Row(128, 64, 8, 96, "eight warps share K and V, which come in two parts", blocks=1,
            together=True),
        # N = 16384 on an H200: 59 TFLOP/s; with 32 keys and Q in two parts 56.
        Row(128, 48, 8, 128, "eight warps share K and V, which come in two parts", blocks=1,
            together=True),
        # d = 256 on an H200: 1.5 times the speed of four warps, d = 192: 1.2 times.
        Row(128, 32, 8, 192, "eight warps share K and V, few keys beside a wide d_v", blocks=1,
            together=True),
        Row(128, 16, 8, 256, "eight warps share K and V, a fragment of keys beside a wide d_v",
            blocks=1, together=True),
        Row(64, 16, 4, 256, "a wide d_v in 130 KiB: 16 rows a warp and a fragment of keys",
            together=True),
        Row(32, 16, 2, 256, "a wide d_v in 99 KiB: two warps and a fragment of keys",
            together=True),
    ),
    "float64": (
        # N = 16384 on an H200: 38 TFLOP/s, with 32 keys 37; d = 128: 44, with 64 x 16 41.
        Row(64, 48, 4, 64, "16 rows a warp; Q in registers would leave room for fewer keys"),
        Row(128, 32, 8, 128, "eight warps share K and V, few keys beside the wide accumulator",
            blocks=1),
        Row(64, 16, 4, 128, "16 rows a warp and a fragment of keys, in 163 KiB"),
        Row(64, 32, 8, 192, "a wide d_v: two warps share 16 rows, each has half the columns",
            blocks=1, pairs=True),
        Row(64, 16, 8, 256, "two warps share 16 rows, one of them has the scores of a fragment of "
            "keys", blocks=1, pairs=True),
        Row(32, 16, 4, 256, "half the rows and warps, in 163 KiB", blocks=1, pairs=True),
        Row(16, 16, 2, 256, "two warps with a fragment of rows and of keys, in 99 KiB", blocks=1,
            pairs=True),
    ),
}


@dataclass(frozen=True, eq=False)
class ForwardSm80(Candidate):
    """The kernel; `rows` is a table like `ROWS`."""

    def best(self, problem, device):
        """The first row that serves."""
        p = problem
        for row in self.rows[kind_of(p.dtype, p.precision)]:
            config = config_of(p, row)
            need = smem_bytes(config)
            # Splitting Q pays only where it leaves room for as many blocks.
            room = device.smem // (row.blocks if row.split_Q else 1)
            if (max(config.d, config.d_v) <= row.width and need <= room
                    and config.d_v % (FRAGMENT * (2 if row.pairs else 1)) == 0):
                tasks = p.batch * p.heads_k * ceil(p.group * p.Nq / config.Br)
                return Offer(config, need, tasks, row.reason)
        return f"no tile in registers for head dims {p.d} and {p.d_v}"


FORWARD = ForwardSm80("forward_sm80", "sm80/forward.cuh", "ForwardParams",
                           direction="forward", family="sm80", splits=True, rows=ROWS)
KERNELS = (FORWARD,)


def config_of(problem, row):
    """What the kernel is compiled for, to serve this problem with this row."""
    p = problem
    # In 16 bits there is a row for other d_v; in float64 both warps of a pair get whole fragments.
    step = 2 * FRAGMENT if row.pairs and p.dtype == "float64" else FRAGMENT
    d, d_v = ceil(p.d / FRAGMENT) * FRAGMENT, ceil(p.d_v / step) * step
    constants = (("blocks", row.blocks), ("keep_Q", int(row.keep_Q)),
                 ("pairs", int(row.pairs)), ("split_Q", int(row.split_Q)),
                 ("together", int(row.together)),
                 ("scaled", int(p.has_features or not SCALES[0] <= p.scale <= SCALES[1])))
    if long_sums.is_fresh(p, long_sums.keys_of_a_row(p)):
        constants += (("fresh", 1),)
    return CudaConfig(p.dtype, p.precision, d, d_v, row.Br, row.Bc, row.warps,
                      p.compiled("forward", True) + p.compiled("forward", False), LAZY,
                      constants)


def smem_bytes(config):
    """Dynamic shared memory of a block."""
    return total(smem_pieces(config))


def smem_pieces(config):
    """What a block has in shared memory, in the order of the kernel's tiles."""
    size, constants = itemsize(config.element), dict(config.constants)
    d, d_v, Br, Bc = config.d, config.d_v, config.Br, config.Bc
    pad = 8 if size == 2 else 4
    keys = 2 * Bc if config.precision == "tf32x3" else Bc      # in two parts
    rows = 2 * Br if constants["split_Q"] else Br
    tiles = (("Q, then out", rows * (max(d, d_v) + pad) * size), ("K", keys * (d + pad) * size),
             ("V", keys * (d_v + 16 // size) * size))
    if constants["pairs"]:      # what two warps say of their rows
        sums = 2 * Br * max(4, size)
        tiles += ("P", Br * (Bc + pad) * size), ("top", sums), ("l", sums)
    if changes_scores(config):
        tiles += ("rows", Br * SCORE_ROW[max(4, size)]), ("seen", 16 * config.warps)
    return tiles

"""The backward kernels for sm_90a: their tiles, and when they serve.

They multiply by wgmma and load by the TMA unit, like the forward kernel of `cuda_hopper`, and stand
between the same two small kernels as the fused kernel for every GPU.
"""

from dataclasses import replace
from math import ceil
from typing import NamedTuple

from . import long_sums
from .cuda_fused import CONSTANTS
from .cuda_hopper import MOST_ROWS, PANEL, obstacle_in, obstacle_to_wgmma
from .cuda_tiles import lazy
from .types import CudaConfig

WARPS = 12                  # of a block: two consumers and a producer
# Warps, roles, parts, stages, blocks of the kernels around, which are those of the fused kernel.
AROUND = 4, (1, 1, 1, 2)


class Row(NamedTuple):
    """A row of the table: kernel, rows and keys of a tile, and the widest head dim it serves."""

    entry: str
    Br: int
    Bc: int
    d: int
    reason: str


ROWS = (
    Row("hopper_backward", 128, 128, 64,
        "two consumers of 64 keys; each has dQ of half the rows"),
    Row("hopper_backward", 64, 128, 128,
        "two consumers of 64 keys, whose dK and dV take half of the registers; each has dQ of half "
        "the columns"),
    Row("hopper_backward_wide", 64, 64, 256,
        "dK and dV of 64 keys take half of the registers of two consumers"),
)


def choose(problem, device):
    """(row, config, bytes of shared memory) of the row that serves; or None, and why not."""
    obstacle = obstacle_of(problem, device)
    if obstacle:
        return None, obstacle
    row = next(row for row in ROWS if max(problem.d, problem.d_v) <= row.d)
    config = config_of(problem, row)
    return (row, config, smem_bytes(row, config)), None


def obstacle_of(problem, device):
    """What the kernel cannot do of a problem, in words; None if it can do all."""
    p = problem
    obstacle = obstacle_to_wgmma(p, device)
    if obstacle:
        return obstacle
    if p.has_features:
        return "it knows no mask, bias, ALiBi or softcap"
    if p.deterministic:
        return "its atomic additions have no order"
    if not p.group or PANEL % p.group:
        return f"a group of {p.group} heads does not fill tiles of rows"
    rows = long_sums.rows_of_a_key(p)
    if long_sums.is_fresh(p, rows):
        return f"sums over {rows} rows in tensor cores lose digits that {p.out_dtype} has"
    if long_sums.few_tiles(p, ROWS[0].Bc, device):
        return f"the tiles of {p.Nk} keys leave most multiprocessors idle"
    if max(p.Nk, p.group * p.Nq) >= MOST_ROWS:
        return "the sequences are too long to count in 32 bits"
    return obstacle_in(p, ("q", "k", "v", "dout"))


def config_of(problem, row):
    """What the kernel is compiled for, to serve this problem with this row."""
    d = d_v = row.d
    if row.entry == "hopper_backward_wide":
        d, d_v = (ceil(x / PANEL) * PANEL for x in (problem.d, problem.d_v))
    return CudaConfig(problem.dtype, None, d, d_v, row.Br, row.Bc, WARPS, False, lazy(problem),
                      (("blocks", 1),))


def around(config):
    """What the kernels before and behind are compiled for."""
    warps, constants = AROUND
    return replace(config, Bc=PANEL, warps=warps,
                   constants=tuple(zip(CONSTANTS, constants, strict=True)))


def smem_bytes(row, config):
    """Dynamic shared memory of a block, as the kernel's traits add it up."""
    def tile(rows, columns):
        return rows * ceil(columns / PANEL) * 2 * PANEL

    keys = tile(config.Bc, config.d) + tile(config.Bc, config.d_v)
    stage = (tile(config.Br, config.d) + tile(config.Br, config.d_v) + tile(config.Bc, config.Br)
             + 2 * config.Br * 4)
    P = config.Bc * config.Br * 4 if row.entry == "hopper_backward_wide" else 0
    return 1024 + keys + 2 * stage + P + 2 * config.Br * 8

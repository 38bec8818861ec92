"""The backward kernel for sm_90a: its tiles, and when it serves.

It multiplies by wgmma and loads by the TMA unit, like the forward kernel of `cuda_hopper`, and
stands between the same two small kernels as the fused kernel for every GPU.
"""

from dataclasses import replace
from math import ceil
from typing import NamedTuple

from .cuda_fused import CONSTANTS
from .cuda_hopper import PANEL, obstacle_in, obstacle_to_wgmma
from .cuda_tiles import lazy
from .types import CudaConfig

KEYS, WARPS = 128, 12       # of a block: two consumers of 64 keys, and a producer
MOST_ROWS = 2**28           # packed rows, and keys: lse and delta of a head have 32-bit offsets
# Warps, roles, parts, stages, blocks of the kernels around, which are those of the fused kernel.
AROUND = 4, (1, 1, 1, 2)


class Row(NamedTuple):
    """A row of the table: rows of a tile, and the head dims to which narrower ones are padded."""

    Br: int
    d: int
    reason: str


ROWS = (
    Row(128, 64, "two consumers of 64 keys; each has dQ of half the rows"),
    Row(64, 128, "two consumers of 64 keys, whose dK and dV take half of the registers; each has "
        "dQ of half the columns"),
)


def choose(problem, device):
    """(config, bytes of shared memory, reason) of the row that serves; or None, and why not."""
    obstacle = obstacle_of(problem, device)
    if obstacle:
        return None, obstacle
    row = next(row for row in ROWS if max(problem.d, problem.d_v) <= row.d)
    config = config_of(problem, row)
    return (config, smem_bytes(config), row.reason), None


def obstacle_of(problem, device):
    """What the kernel cannot do of a problem, in words; None if it can do all."""
    p = problem
    obstacle = obstacle_to_wgmma(p, device)
    if obstacle:
        return obstacle
    if max(p.d, p.d_v) > ROWS[-1].d:
        return f"its head dims go up to {ROWS[-1].d}"
    if p.has_mask or p.bias_shape or p.has_alibi or p.softcap:
        return "it knows no mask, bias, ALiBi or softcap"
    if p.deterministic:
        return "its atomic additions have no order"
    if not p.group or PANEL % p.group:
        return f"a group of {p.group} heads does not fill tiles of rows"
    if max(p.Nk, p.group * p.Nq) >= MOST_ROWS:
        return "the sequences are too long to count in 32 bits"
    return obstacle_in(p, ("q", "k", "v", "dout"))


def config_of(problem, row):
    """What the kernel is compiled for, to serve this problem with this row."""
    return CudaConfig(problem.dtype, None, row.d, row.d, row.Br, KEYS, WARPS, False, lazy(problem),
                      (("blocks", 1),))


def around(config):
    """What the kernels before and behind are compiled for."""
    warps, constants = AROUND
    return replace(config, Bc=PANEL, warps=warps,
                   constants=tuple(zip(CONSTANTS, constants, strict=True)))


def smem_bytes(config):
    """Dynamic shared memory of a block, as the kernel's traits add it up."""
    def tile(rows, columns):
        return rows * ceil(columns / PANEL) * 2 * PANEL

    keys = 2 * tile(config.Bc, config.d)
    stage = 2 * tile(config.Br, config.d) + tile(config.Bc, config.Br) + 2 * config.Br * 4
    return 1024 + keys + 2 * stage + 2 * config.Br * 8

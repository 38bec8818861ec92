"""The backward kernels for sm_90a: their tiles, and when they serve.

They multiply by wgmma and load by the TMA unit, like the forward kernel of `cuda_forward_sm90`, and
stand between the same two small kernels as the fused kernel for every GPU.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from . import long_sums
from .cuda_backward_sm80 import around, count_tasks
from .cuda_forward_sm90 import (
    HEAD,
    MOST_ROWS,
    PANEL,
    box_of_keys,
    box_of_rows,
    tile_bytes,
    unsupported_arrays,
)
from .kernel import ONE_TASK, Candidate, Offer, total, wanted
from .types import LAZY, CudaConfig

CONSUMERS, WARPS = 2, 12    # of a block, with the producer's warps
STAGES = 2                  # tiles of rows that are in shared memory or on their way


class Row(NamedTuple):
    """A row of the table: rows and keys of a tile, and the widest head dim it serves."""

    Br: int
    Bc: int
    d: int
    reason: str


ROWS = (
    Row(128, 128, 64, "two consumers of 64 keys; each has dQ of half the rows"),
    Row(64, 128, 128, "two consumers of 64 keys, whose dK and dV take half of the registers; each "
        "has dQ of half the columns"),
)
WIDE_ROWS = (
    Row(64, 64, 256, "dK and dV of 64 keys take half of the registers of two consumers"),
)


@dataclass(frozen=True, eq=False)
class BackwardSm90(Candidate):
    """One of the kernels; `rows` is a table like `ROWS`.

    Attributes
    ----------
    wide : bool
        Whether P goes through shared memory, and each of d and d_v has its own width.
    """

    wide: bool = False

    def best(self, problem, device):
        """The first row that is wide enough."""
        p = problem
        reason = unsupported_reason(p, device)
        if reason:
            return reason
        for row in self.rows:
            if max(p.d, p.d_v) <= row.d:
                config = self.config_of(p, row)
                return Offer(config, self.smem_bytes(config), count_tasks(p, config), row.reason,
                             around(config))
        return "dK and dV of such wide heads fill its registers"

    def config_of(self, problem, row):
        """What the kernel is compiled for, to serve this problem with this row."""
        d = d_v = row.d
        if self.wide:
            d, d_v = (ceil(x / PANEL) * PANEL for x in (problem.d, problem.d_v))
        return CudaConfig(problem.dtype, None, d, d_v, row.Br, row.Bc, WARPS, (), LAZY,
                          (("blocks", 1), *wanted(problem)))

    def smem_bytes(self, config):
        """Dynamic shared memory of a block."""
        return total(self.smem_pieces(config))

    def smem_pieces(self, config):
        """What a block has in shared memory, in the order of the kernel's tiles."""
        Br, Bc, d, d_v = config.Br, config.Bc, config.d, config.d_v
        P = (("P", Bc * Br * 4),) if self.wide else ()
        return (("work, barriers", HEAD), ("K", tile_bytes(Bc, d)), ("V", tile_bytes(Bc, d_v)),
                ("Q", STAGES * tile_bytes(Br, d)), ("dO", STAGES * tile_bytes(Br, d_v)),
                ("dS", STAGES * tile_bytes(Bc, Br)), *P, ("lse, delta", STAGES * 2 * Br * 4),
                ("ranges", CONSUMERS * Br * 8))

    def boxes(self, problem, config):
        """Whole tiles of rows, of all heads of a group, and of keys."""
        rows, keys = box_of_rows(config.Br, problem.group), box_of_keys(config.Bc)
        return {"q": rows, "k": keys, "v": keys, "dout": rows}


def unsupported_reason(problem, device):
    """Why the kernels do not serve a problem on a device, in words; None if they do."""
    p = problem
    if p.dtype not in ("float16", "bfloat16"):
        return "its elements have 16 bits"
    if p.has_features:
        return "it knows no mask, bias, ALiBi or softcap"
    if p.deterministic:
        return "its atomic additions have no order"
    if not p.group or PANEL % p.group:
        return f"a group of {p.group} heads does not fill tiles of rows"
    if max(p.Nk, p.group * p.Nq) >= MOST_ROWS:
        return "the sequences are too long to count in 32 bits"
    rows = long_sums.rows_of_a_key(p)
    if long_sums.is_fresh(p, rows):
        return f"sums over {rows} rows in tensor cores lose digits that {p.out_dtype} has"
    if long_sums.few_tiles(p, ROWS[0].Bc, device):
        return f"the tiles of {p.Nk} keys leave most multiprocessors idle"
    return unsupported_arrays(p, ("q", "k", "v", "dout"))


BACKWARD = BackwardSm90("backward_sm90", "sm90/backward.cuh", "BackwardSm90Params",
                          ONE_TASK, "90a", ("q", "k", "v", "dout"), "backward", family="sm90",
                          rows=ROWS)
KERNELS = BACKWARD, replace(BACKWARD, entry="backward_sm90_wide", wide=True, rows=WIDE_ROWS,
                            header="sm90/backward_wide.cuh")

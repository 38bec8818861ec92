"""The kernels that multiply by wmma, on every GPU and for every problem, and their tiles."""

from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from . import long_sums
from .kernel import FRAGMENT, Candidate, Offer, itemsize, kind_of, total, wanted
from .types import LAZY, CudaConfig

# Accumulators of a thread, in 32-bit registers. Beside them a thread needs fragments, addresses
# and the lazy softmax; twice as many leave no room below the 255 that there are.
ACCUMULATOR_REGISTERS = 64
# `normalise` is compiled for the tiles of `forward`, whose sums it repeats.
FORWARD_ENTRIES = "forward_wmma", "normalise"


class Tile(NamedTuple):
    """A row of the table: packed query rows, keys, warps, and what it is for."""

    Br: int
    Bc: int
    warps: int
    reason: str


# The first row that fits in registers and shared memory is taken. Whatever the head dim up to 256,
# one row of each list fits in the 99 KiB of the smallest GPUs (sm_86, sm_89, sm_120).
FORWARD_TILES = {
    "16-bit": (
        Tile(64, 64, 4, "16 rows a warp, as many keys as rows"),
        Tile(64, 64, 8, "a wide d_v: twice the warps share the accumulator"),
        Tile(64, 32, 8, "half the keys, since the operands are wide for the shared memory"),
    ),
    "float32": (
        Tile(64, 64, 4, "16 rows a warp, as many keys as rows"),
        Tile(64, 32, 4, "half the keys, since the operands are wide for the shared memory"),
        Tile(64, 32, 8, "a wide d_v: twice the warps share the accumulator"),
        Tile(32, 16, 4, "half the rows too: the widest operands in 99 KiB"),
    ),
    "float64": (
        Tile(32, 32, 4, "an accumulator takes two registers: half the rows of float32"),
        Tile(32, 16, 4, "half the keys, since the operands are wide for the shared memory"),
        Tile(32, 16, 8, "a wide d_v: twice the warps share the accumulator"),
        Tile(16, 8, 4, "half the rows too: the widest operands in 99 KiB"),
    ),
}
BACKWARD_TILES = {
    "16-bit": (
        Tile(64, 64, 4, "as many keys as rows: Q, dO, K, V and the scores fill 99 KiB at d = 64"),
        Tile(64, 64, 8, "wide operands: twice the warps share the accumulators"),
        Tile(64, 32, 4, "half the keys, since the operands are wide for the shared memory"),
        Tile(64, 32, 8, "half the keys, and twice the warps share the accumulators"),
        Tile(32, 32, 4, "half the rows too: wide operands in 99 KiB"),
        Tile(32, 32, 8, "the same with twice the warps, for the accumulators of dk and dv"),
    ),
    "float32": (
        Tile(64, 64, 8, "as many keys as rows; with 4 warps compilation takes a third longer"),
        Tile(64, 32, 4, "half the keys, since the operands are wide for the shared memory"),
        Tile(32, 32, 4, "half the rows too: d = 128 in 99 KiB"),
        Tile(32, 32, 8, "wide operands: twice the warps share the accumulators"),
        Tile(16, 16, 4, "the widest operands in 99 KiB: one fragment a tile of scores"),
    ),
    "float64": (
        Tile(32, 32, 4, "an accumulator takes two registers: half the rows of float32"),
        Tile(32, 32, 8, "wide operands: twice the warps share the accumulators"),
        Tile(16, 16, 4, "half the rows, since the operands are wide for the shared memory"),
        Tile(16, 16, 8, "the widest operands: twice the warps share the accumulators"),
        Tile(8, 8, 4, "the widest operands in 99 KiB: one fragment a tile of scores"),
    ),
}


@dataclass(frozen=True, eq=False)
class WmmaKernel(Candidate):
    """One of the kernels; `rows` is a table like `FORWARD_TILES`."""

    def best(self, problem, device):
        """The first row that fits, where every problem has one on the GPUs that are served."""
        p, smallest = problem, None
        for tile in self.rows[kind_of(p.dtype)]:
            config = config_of(self.entry, p, tile)
            if self.entry == "dkdv_wmma":
                config = long_sums.tuned(p, config, device)
            need = smem_bytes(self.entry, config)
            registers = accumulator_registers(self.entry, config)
            if need <= device.smem and registers <= ACCUMULATOR_REGISTERS:
                return Offer(config, need, count_tasks(self.entry, p, config), tile.reason)
            smallest = min(need, smallest or need)
        return (f"`q` has head dim {p.d}, `v` {p.d_v}, in {p.dtype}: the smallest tile of "
                f"{self.entry} needs {smallest:,} bytes of shared memory, and a block of {device} "
                f"can have {device.smem:,}")


def count_tasks(entry, problem, config):
    """Tiles of packed query rows, of keys, or of dbias."""
    p = problem
    if entry == "dbias_wmma":
        b, h, n, c = p.bias_shape
        return b * h * ceil(n / config.Br) * ceil(c / config.Bc)
    tiles = (ceil(p.Nk / config.Bc) if entry == "dkdv_wmma"
             else ceil(p.group * p.Nq / config.Br))
    return p.batch * p.heads_k * tiles


def config_of(entry, problem, tile):
    """What the kernel is compiled for, to serve this problem with this tile."""
    p = problem
    d, d_v = (ceil(x / FRAGMENT) * FRAGMENT for x in (p.d, p.d_v))
    options = p.compiled("forward" if entry == "forward_wmma" else "backward", True)
    if entry in FORWARD_ENTRIES:
        options += p.compiled("forward", False)
    fresh = entry in FORWARD_ENTRIES and long_sums.is_fresh(p, long_sums.keys_of_a_row(p))
    constants = (("fresh", 1),) if fresh else wanted(p) if entry == "dkdv_wmma" else ()
    return CudaConfig(p.dtype, p.precision, d, d_v, tile.Br, tile.Bc, tile.warps, options, LAZY,
                      constants)


def smem_bytes(entry, config):
    """Dynamic shared memory of a block."""
    return total(smem_pieces(entry, config))


def smem_pieces(entry, config):
    """What a block has in shared memory, in the order of the kernel's tiles."""
    d, d_v, Br, Bc = config.d, config.d_v, config.Br, config.Bc
    E, A = _itemsizes(config)
    S = _tile_bytes(Br, Bc, A)
    P = _tile_bytes(Br, Bc, E) if E == 2 else 0     # wider types are rounded where the scores lie
    keys = ("K", _tile_bytes(Bc, d, E)), ("V", _tile_bytes(Bc, d_v, E))
    if entry in FORWARD_ENTRIES:
        return (("Q", _tile_bytes(Br, d, E)), *keys, ("S", S), ("P", P), ("alpha", Br * A),
                ("ranges", 8 * Br), ("seen", 4 * Bc))
    own = {"dkdv_wmma": (("P", P), ("dS", P)), "dq_wmma": (("dS", P),), "dbias_wmma": ()}[entry]
    rest = {"dkdv_wmma": (), "dq_wmma": (("seen", 4 * Bc),), "dbias_wmma": (("sums", S),)}[entry]
    return (("Q", _tile_bytes(Br, d, E)), ("dO", _tile_bytes(Br, d_v, E)), *keys, ("S", S),
            ("dP", S), *own, ("lse", Br * A), ("delta", Br * A), ("ranges", 8 * Br), *rest)


def accumulator_registers(entry, config):
    """32-bit registers that a thread needs for what it sums up."""
    rows = config.Br * config.d_v
    words = {"forward_wmma": rows, "normalise": rows, "dq_wmma": config.Br * config.d,
             "dkdv_wmma": config.Bc * (config.d + config.d_v), "dbias_wmma": 0}[entry]
    return words * _itemsizes(config)[1] // 4 // (32 * config.warps)


def _tile_bytes(rows, columns, itemsize):
    """A tile with its rows padded by 16 bytes (32 in float64), against bank conflicts."""
    return rows * (columns + (8 if itemsize == 2 else 4)) * itemsize


def _itemsizes(config):
    """Bytes of an element and of an accumulator."""
    element = itemsize(config.element)
    return element, max(4, element)


FORWARD = WmmaKernel("forward_wmma", "wmma/forward.cuh", "ForwardParams", direction="forward",
                     family="wmma", splits=True, rows=FORWARD_TILES)
DKDV = WmmaKernel("dkdv_wmma", "wmma/backward.cuh", "BackwardParams", direction="backward",
                  family="wmma", rows=BACKWARD_TILES)
KERNELS = (FORWARD, DKDV, replace(DKDV, entry="dq_wmma", direction=""),
           replace(DKDV, entry="dbias_wmma", direction="", header="wmma/dbias.cuh"),
           WmmaKernel("normalise", "wmma/normalise.cuh", "BackwardParams", family="wmma",
                      rows=FORWARD_TILES))

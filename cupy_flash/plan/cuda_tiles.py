"""The tiles of the CUDA kernels: a table, each row with its reason, and the choice of a row."""

from math import ceil, log
from typing import NamedTuple

from . import long_sums
from .types import CudaConfig

FRAGMENT = 16               # head dims are padded to whole fragments
# Accumulators of a thread, in 32-bit registers. Beside them a thread needs fragments, addresses
# and the lazy softmax; twice as many leave no room below the 255 that there are.
ACCUMULATOR_REGISTERS = 64


class Tile(NamedTuple):
    """A row of the table: packed query rows, keys, warps, and what it is for."""

    Br: int
    Bc: int
    warps: int
    reason: str


# The first row that fits in registers and shared memory is taken. Whatever the head dim up to 256,
# one row of each list fits in the 99 KiB of the smallest GPUs (sm_86, sm_89, sm_120).
TILES = {
    ("forward", "16-bit"): (
        Tile(64, 64, 4, "16 rows a warp, as many keys as rows"),
        Tile(64, 64, 8, "a wide d_v: twice the warps share the accumulator"),
        Tile(64, 32, 8, "half the keys, since the operands are wide for the shared memory"),
    ),
    ("forward", "float32"): (
        Tile(64, 64, 4, "16 rows a warp, as many keys as rows"),
        Tile(64, 32, 4, "half the keys, since the operands are wide for the shared memory"),
        Tile(64, 32, 8, "a wide d_v: twice the warps share the accumulator"),
        Tile(32, 16, 4, "half the rows too: the widest operands in 99 KiB"),
    ),
    ("forward", "float64"): (
        Tile(32, 32, 4, "an accumulator takes two registers: half the rows of float32"),
        Tile(32, 16, 4, "half the keys, since the operands are wide for the shared memory"),
        Tile(32, 16, 8, "a wide d_v: twice the warps share the accumulator"),
        Tile(16, 8, 4, "half the rows too: the widest operands in 99 KiB"),
    ),
    ("backward", "16-bit"): (
        Tile(64, 64, 4, "as many keys as rows: Q, dO, K, V and the scores fill 99 KiB at d = 64"),
        Tile(64, 64, 8, "wide operands: twice the warps share the accumulators"),
        Tile(64, 32, 4, "half the keys, since the operands are wide for the shared memory"),
        Tile(64, 32, 8, "half the keys, and twice the warps share the accumulators"),
        Tile(32, 32, 4, "half the rows too: wide operands in 99 KiB"),
        Tile(32, 32, 8, "the same with twice the warps, for the accumulators of dk and dv"),
    ),
    ("backward", "float32"): (
        Tile(64, 64, 8, "as many keys as rows; with 4 warps compilation takes a third longer"),
        Tile(64, 32, 4, "half the keys, since the operands are wide for the shared memory"),
        Tile(32, 32, 4, "half the rows too: d = 128 in 99 KiB"),
        Tile(32, 32, 8, "wide operands: twice the warps share the accumulators"),
        Tile(16, 16, 4, "the widest operands in 99 KiB: one fragment a tile of scores"),
    ),
    ("backward", "float64"): (
        Tile(32, 32, 4, "an accumulator takes two registers: half the rows of float32"),
        Tile(32, 32, 8, "wide operands: twice the warps share the accumulators"),
        Tile(16, 16, 4, "half the rows, since the operands are wide for the shared memory"),
        Tile(16, 16, 8, "the widest operands: twice the warps share the accumulators"),
        Tile(8, 8, 4, "the widest operands in 99 KiB: one fragment a tile of scores"),
    ),
}


def choose(entry, problem, device):
    """Config, bytes of shared memory and reason of a kernel: the first row that fits."""
    smallest = None
    for tile in rows_of(entry, problem.dtype):
        config = config_of(entry, problem, tile)
        need = smem_bytes(entry, config)
        if need <= device.smem and accumulator_registers(entry, config) <= ACCUMULATOR_REGISTERS:
            return config, need, tile.reason
        smallest = min(need, smallest or need)
    raise NotImplementedError(
        f"`q` has head dim {problem.d}, `v` {problem.d_v}, in {problem.dtype}: the smallest tile "
        f"of {entry} needs {smallest:,} bytes of shared memory, and a block of {device} can have "
        f"{device.smem:,}; pass NumPy arrays (cupy.asnumpy(x)) to compute on the CPU")


def rows_of(entry, dtype):
    """The rows of the table for a kernel and an element type."""
    kind = "16-bit" if dtype in ("float16", "bfloat16") else dtype
    return TILES["forward" if entry == "forward" else "backward", kind]


def config_of(entry, problem, tile):
    """What the kernel is compiled for, to serve this problem with this tile."""
    p = problem
    d, d_v = (ceil(x / FRAGMENT) * FRAGMENT for x in (p.d, p.d_v))
    fresh = entry == "forward" and long_sums.is_fresh(p, long_sums.keys_of_a_row(p))
    return CudaConfig(p.dtype, p.precision, d, d_v, tile.Br, tile.Bc, tile.warps, p.has_features,
                      lazy(p), (("fresh", 1),) if fresh else ())


def lazy(problem):
    """How far a row's maximum may pass its reference: a factor of 2^8, in float64 of 2^30."""
    return log(2) * (30 if problem.accumulator == "float64" else 8)


def smem_bytes(entry, config):
    """Dynamic shared memory of a block, tile for tile as the entry's traits add it up."""
    d, d_v, Br, Bc = config.d, config.d_v, config.Br, config.Bc
    E, A = _itemsizes(config)
    P = _tile_bytes(Br, Bc, E) if E == 2 else 0     # wider types are rounded where the scores lie
    if entry == "forward":
        tiles = _tile_bytes(Br, d, E) + _tile_bytes(Bc, d, E) + _tile_bytes(Bc, d_v, E)
        return tiles + _tile_bytes(Br, Bc, A) + P + Br * A + 8 * Br + 4 * Bc
    tiles = sum(_tile_bytes(n, width, E) for n in (Br, Bc) for width in (d, d_v))
    common = tiles + 2 * _tile_bytes(Br, Bc, A) + 2 * Br * A + 8 * Br
    return common + {"backward_dkdv": 2 * P, "backward_dq": P + 4 * Bc,
                     "dbias": _tile_bytes(Br, Bc, A)}[entry]


def accumulator_registers(entry, config):
    """32-bit registers that a thread needs for what it sums up."""
    words = {"forward": config.Br * config.d_v, "backward_dq": config.Br * config.d,
             "backward_dkdv": config.Bc * (config.d + config.d_v), "dbias": 0}[entry]
    return words * _itemsizes(config)[1] // 4 // (32 * config.warps)


def _tile_bytes(rows, columns, itemsize):
    """A tile with its rows padded by 16 bytes (32 in float64), against bank conflicts."""
    return rows * (columns + (8 if itemsize == 2 else 4)) * itemsize


def _itemsizes(config):
    """Bytes of an element and of an accumulator."""
    element = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[config.element]
    return element, max(4, element)

"""The fused backward pass on GPUs: which problems it serves, with which tiles.

One kernel recomputes the scores once for all three gradients: five products in the place of the
seven of `backward_dkdv` and `backward_dq`. dq is summed by atomic additions, so that its last bits
differ from run to run.
"""

from math import ceil
from typing import NamedTuple

from . import long_sums
from .cuda_tiles import lazy
from .types import CudaConfig

FRAGMENT = 16
CONSTANTS = ("roles", "parts", "stages", "blocks")


class FusedTile(NamedTuple):
    """A row of the table.

    `d` is the widest head dim that it serves. With two `roles`, half of the warps have P and dV,
    the others dP and dK; `parts` warps share a strip of keys, each with a part of the columns of dK
    and dV; `stages` tiles of rows are in shared memory or on their way; `blocks` are to run on a
    multiprocessor.
    """

    d: int
    Br: int
    Bc: int
    warps: int
    roles: int
    parts: int
    stages: int
    blocks: int
    reason: str


# The first row that is wide enough and fits in shared memory is taken. A warp owns 32 keys where
# registers allow it: each fragment of Q and dO that it loads then serves two products.
TILES = {
    "16-bit": (
        FusedTile(64, 64, 128, 4, 1, 1, 2, 2,
                  "dK and dV of 32 keys take half of a warp's registers; two blocks fill each "
                  "other's waits"),
        FusedTile(128, 64, 128, 8, 2, 1, 2, 1,
                  "dK or dV of 32 keys takes half of a warp's registers"),
        FusedTile(128, 64, 64, 4, 1, 2, 1, 2, "half the keys and one tile of rows, in 99 KiB"),
        FusedTile(256, 64, 64, 8, 2, 2, 2, 1,
                  "half the columns of dK or dV of 32 keys take half of a warp's registers"),
        FusedTile(256, 32, 64, 8, 2, 2, 1, 1, "half the rows, in 163 KiB"),
    ),
    "tf32": (
        FusedTile(64, 32, 64, 4, 1, 1, 2, 2, "16 keys a warp, two blocks fill each other's waits"),
        FusedTile(128, 32, 128, 8, 2, 1, 1, 1,
                  "dK or dV of 32 keys takes half of a warp's registers"),
        FusedTile(128, 32, 64, 4, 1, 1, 1, 1, "16 keys a warp, in 163 KiB"),
    ),
    "tf32x3": (
        FusedTile(64, 32, 64, 4, 1, 1, 1, 2, "16 keys a warp, two blocks fill each other's waits"),
        FusedTile(128, 32, 128, 8, 1, 1, 1, 1, "16 keys a warp, which leaves room for operands in "
                  "two parts"),
        FusedTile(128, 32, 64, 4, 1, 1, 1, 1, "16 keys a warp, in 163 KiB"),
    ),
    "float64": (
        FusedTile(64, 32, 64, 8, 1, 2, 1, 1, "two warps share 16 keys: eight warps in 163 KiB"),
        FusedTile(64, 32, 32, 4, 1, 2, 1, 1, "half the keys and warps, in 99 KiB"),
        FusedTile(128, 32, 64, 8, 1, 2, 1, 1, "two warps share 16 keys, in 227 KiB"),
        FusedTile(128, 32, 32, 4, 1, 2, 1, 1, "half the keys and warps, in 163 KiB"),
    ),
}


def choose(problem, device):
    """(config, bytes of shared memory, reason) of the fused kernel; config None: not served."""
    p = problem
    if p.deterministic:
        return None, 0, "not the fused kernel, whose atomic additions have no order"
    dtypes = [str(dtype) for name, _, _, dtype, *_ in p.layouts if name == "bias"]
    if "float64" in (*dtypes, p.dbias_dtype) and p.dtype != "float64":
        return None, 0, "not the fused kernel, which takes a float64 bias with float64 alone"
    for tile in TILES[kind_of(p)]:
        config = long_sums.tuned(p, "backward_fused", config_of(p, tile), device)
        need = smem_bytes(config)
        if max(p.d, p.d_v) > tile.d or need > device.smem:
            continue
        if config.features and tile.roles > 1:
            continue            # features take the registers of the twice as many scores
        return config, need, tile.reason
    return None, 0, "not the fused kernel, which has no tile for such wide heads here"


def writes_dbias(problem):
    """Whether the kernel writes dbias: each score has an element of its own, without a softcap."""
    p = problem
    return p.bias_shape == (p.batch, p.heads_q, p.Nq, p.Nk) and p.softcap == 0


def kind_of(problem):
    """The rows of the table that serve an element type."""
    if problem.dtype in ("float16", "bfloat16"):
        return "16-bit"
    return problem.precision or problem.dtype


def config_of(problem, tile):
    """What the kernels are compiled for. Head dims are padded to whole fragments of every warp."""
    step = FRAGMENT * max(tile.parts, warps_across(tile))
    d, d_v = (ceil(x / step) * step for x in (problem.d, problem.d_v))
    if tile.roles > 1:          # which then differ in nothing but addresses
        d = d_v = max(d, d_v)
    constants = tuple((name, getattr(tile, name)) for name in CONSTANTS)
    return CudaConfig(problem.dtype, problem.precision, d, d_v, tile.Br, tile.Bc, tile.warps,
                      problem.has_features, lazy(problem), constants)


def warps_across(tile):
    """Warps that stand beside each other over the columns of a tile of dQ."""
    down = tile.Br // FRAGMENT
    return tile.warps // (down if down < tile.warps // 2 else 2)


def smem_bytes(config):
    """Dynamic shared memory of a block, as `BackwardFusedTraits` adds it up."""
    size = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[config.element]
    roles, parts, stages, *_ = (value for _, value in config.constants)

    def tile(rows, columns):
        return rows * (columns + (8 if size == 2 else 4)) * size

    keys, rows = (tile(n, config.d) + tile(n, config.d_v) for n in (config.Bc, config.Br))
    rows *= 2 if config.precision == "tf32x3" else 1    # in two parts
    scores = tile(config.Bc, config.Br) * (2 if parts > 1 and roles == 1 and size < 8 else 1)
    scores += config.Bc * config.Br * max(4, size) if roles > 1 else 0
    state = config.Br * (2 * max(4, size) + 8 + ((40 + size // 8 * 8 + 8) * config.features))
    seen = 4 * parts * config.Bc if config.features else 0
    return keys + scores + stages * (rows + state) + seen + 18 * 8 + 4 * 8


def workspace(problem, config):
    """Elements of `state` and of `dq_sums`."""
    p = problem
    rows = p.batch * p.heads_k * ceil(p.group * p.Nq / config.Br) * config.Br
    return 2 * rows, rows * config.d

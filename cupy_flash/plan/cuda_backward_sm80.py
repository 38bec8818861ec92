"""The fused backward pass on GPUs: which problems it serves, with which tiles.

One kernel recomputes the scores once for all three gradients: five products in the place of the
seven of `dkdv_wmma` and `dq_wmma`. dq is summed by atomic additions, so that its last bits
differ from run to run.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from . import cuda_dbias, long_sums
from .kernel import FRAGMENT, SCORE_ROW, Candidate, Offer, itemsize, kind_of, total, wanted
from .types import LAZY, CudaConfig

RANGE, OWN_KEYS = 8, 144    # bytes of structs of the CUDA sources: KeyRange and SeenSpan, OwnKeys
CONSTANTS = ("roles", "parts", "stages", "blocks")
WARPS_AROUND = 4            # of the kernels before and behind
TWO_PASSES = 64             # columns of dQ that a warp adds in two passes, and more


class FusedTile(NamedTuple):
    """A row of the table.

    `d` is the widest head dim that it serves. With two `roles`, half of the warps have P and dV,
    the others dP and dK; `parts` warps share a strip of keys, each with a part of the columns of dK
    and dV; `stages` tiles of rows are in shared memory or on their way; `blocks` are to run on a
    multiprocessor. `split_late`: for 3xTF32 each warp splits what it reads of Q and dO, which takes
    half the shared memory.
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
    split_late: bool = False


# Of float32, with either precision.
FLOAT32_128 = (
    FusedTile(128, 32, 32, 4, 1, 2, 1, 1, "two warps share 16 keys, in 99 KiB", split_late=True),
)
FLOAT32_192 = (
    FusedTile(192, 32, 64, 8, 2, 1, 2, 1, "dK or dV of 16 keys; rows are copied a tile ahead",
              split_late=True),
    FusedTile(192, 32, 32, 8, 2, 2, 2, 1, "half the keys, half the columns a warp, in 163 KiB",
              split_late=True),
    FusedTile(192, 16, 32, 4, 2, 1, 1, 1, "few rows and keys, in 99 KiB", split_late=True),
)
FLOAT32_256 = (
    FusedTile(256, 32, 32, 8, 2, 2, 1, 1, "half the columns of dK or dV of 16 keys, in 163 KiB",
              split_late=True),
    FusedTile(256, 16, 16, 4, 2, 2, 1, 1, "a fragment of rows and of keys, in 99 KiB",
              split_late=True),
    # Reached with options alone.
    FusedTile(256, 32, 64, 8, 1, 2, 1, 1, "two warps share dK and dV of 16 keys, which leaves room "
              "for options", split_late=True),
    FusedTile(256, 32, 32, 4, 1, 2, 1, 1, "the same of half the keys, in 163 KiB",
              split_late=True),
)

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
        *FLOAT32_128,
        *FLOAT32_192,
        FusedTile(256, 32, 64, 8, 2, 1, 1, 1,
                  "dK or dV of 16 keys takes half of a warp's registers"),
        *FLOAT32_256,
    ),
    "tf32x3": (
        FusedTile(64, 32, 64, 4, 1, 1, 1, 2, "16 keys a warp, two blocks fill each other's waits"),
        FusedTile(128, 32, 128, 8, 1, 1, 1, 1, "16 keys a warp, which leaves room for operands in "
                  "two parts"),
        FusedTile(128, 32, 64, 4, 1, 1, 1, 1, "16 keys a warp, in 163 KiB"),
        *FLOAT32_128,
        *FLOAT32_192,
        FusedTile(256, 32, 32, 8, 2, 2, 2, 1, "half the columns of dK or dV of 16 keys leave room "
                  "for operands in two parts; rows are copied a tile ahead", split_late=True),
        *FLOAT32_256,
    ),
    "float64": (
        FusedTile(64, 32, 64, 8, 1, 2, 1, 1, "two warps share 16 keys: eight warps in 163 KiB"),
        FusedTile(64, 32, 32, 4, 1, 2, 1, 1, "half the keys and warps, in 99 KiB"),
        FusedTile(128, 32, 64, 8, 1, 2, 1, 1, "two warps share 16 keys, in 227 KiB"),
        FusedTile(128, 32, 32, 4, 1, 2, 1, 1, "half the keys and warps, in 163 KiB"),
        FusedTile(192, 32, 32, 8, 2, 2, 1, 1, "half the columns of dK or dV of 16 keys"),
        FusedTile(192, 32, 16, 4, 2, 2, 1, 1, "a fragment of keys and half the warps, in 163 KiB"),
        FusedTile(256, 16, 32, 8, 2, 2, 1, 1, "half the columns of dK or dV of 16 keys, a fragment "
                  "of rows"),
        FusedTile(256, 16, 16, 4, 2, 2, 1, 1, "a fragment of rows and of keys, in 163 KiB"),
        # Reached with options alone.
        FusedTile(192, 32, 32, 8, 1, 4, 1, 1, "four warps share 16 keys, of which one has scores"),
        FusedTile(256, 16, 32, 8, 1, 4, 1, 1, "the same with a fragment of rows"),
        FusedTile(256, 16, 16, 4, 1, 4, 1, 1, "the same with one of keys, too, in 163 KiB"),
    ),
}


@dataclass(frozen=True, eq=False)
class BackwardSm80(Candidate):
    """The kernel; `rows` is a table like `TILES`."""

    def best(self, problem, device):
        """The first row that is wide enough and fits."""
        p = problem
        if p.deterministic:
            return "its atomic additions have no order"
        refusal = "it has no tile for such wide heads here"
        for tile in self.rows[kind_of(p.dtype, p.precision)]:
            config = long_sums.tuned(p, config_of(p, tile), device)
            need = smem_bytes(config)
            if max(p.d, p.d_v) > tile.d or need > device.smem:
                continue
            if config.options and tile.roles > 1:
                # Options take the registers of the twice as many scores.
                refusal = "its tiles for such wide heads serve no options that change scores here"
                continue
            how = dict(config.constants)["dbias"]
            reason = f"{tile.reason}; {cuda_dbias.REASONS[how]}" if how else tile.reason
            return Offer(config, need, count_tasks(p, config), reason, around(config))
        return refusal


BACKWARD = BackwardSm80("backward_sm80", "sm80/backward.cuh", "BackwardParams",
                         direction="backward", family="sm80", rows=TILES)
KERNELS = (BACKWARD,)


def count_tasks(problem, config):
    """Tiles of keys."""
    return problem.batch * problem.heads_k * ceil(problem.Nk / config.Bc)


def config_of(problem, tile):
    """What the kernels are compiled for. Head dims are padded to whole fragments of every warp."""
    across = warps_across(tile)
    step = FRAGMENT * max(tile.parts, across)
    d, d_v = (ceil(x / step) * step for x in (problem.d, problem.d_v))
    if tile.parts > 1 and d >= TWO_PASSES * across:
        d = ceil(d / (2 * step)) * 2 * step
    if tile.roles > 1:          # which then differ in nothing but addresses
        d = d_v = max(d, d_v)
    constants = tuple((name, getattr(tile, name)) for name in CONSTANTS)
    if tile.split_late and problem.precision == "tf32x3":
        constants += (("split_late", 1),)
    return CudaConfig(problem.dtype, problem.precision, d, d_v, tile.Br, tile.Bc, tile.warps,
                      problem.compiled("backward", True), LAZY,
                      (*constants, *cuda_dbias.constants(problem), *wanted(problem)))


def around(config):
    """What the kernels before and behind are compiled for."""
    return replace(config, Bc=FRAGMENT, warps=WARPS_AROUND, options=(), constants=())


def warps_across(tile):
    """Warps that stand beside each other over the columns of a tile of dQ."""
    down = tile.Br // FRAGMENT
    return tile.warps // (down if down < tile.warps // 2 else 2)


def keys_of_a_lane(config):
    """Of the strip of keys that its warp has: every eighth."""
    return config.Bc * dict(config.constants)["parts"] // config.warps // 8


def smem_bytes(config):
    """Dynamic shared memory of a block."""
    return total(smem_pieces(config))


def smem_pieces(config):
    """What a block has in shared memory, in the order of the kernel's tiles."""
    size, constants = itemsize(config.element), dict(config.constants)
    roles, parts, stages = (constants[name] for name in ("roles", "parts", "stages"))
    Br, Bc, sums = config.Br, config.Bc, max(4, size)

    def tile(rows, columns):
        return rows * (columns + (8 if size == 2 else 4)) * size

    splits = config.precision == "tf32x3" and "split_late" not in constants
    rows = stages * (2 * Br if splits else Br)          # in two parts
    pieces = [("K", tile(Bc, config.d)), ("V", tile(Bc, config.d_v)), ("Q", tile(rows, config.d)),
              ("dO", tile(rows, config.d_v)), ("dS", tile(Bc, Br))]
    if parts > 1 and roles == 1 and size < 8:
        pieces.append(("P", tile(Bc, Br)))
    if roles > 1:
        pieces.append(("P of the other role", tile(Bc, Br) if size == 8 else Bc * Br * sums))
    pieces += [("lse, delta", stages * 2 * Br * sums), ("ranges", stages * Br * RANGE)]
    if config.options:
        pieces += [("rows", stages * Br * SCORE_ROW[sums]), ("dbias", stages * Br * 8),
                   ("seen keys", 4 * parts * Bc)]
    if constants["dbias"] == cuda_dbias.OVER_ROWS:
        pieces.append(("dbias of each thread", 32 * config.warps * keys_of_a_lane(config) * 8))
    return *pieces, ("own", OWN_KEYS), ("seen", 4 * RANGE)



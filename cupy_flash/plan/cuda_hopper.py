"""The tiles of the kernels for sm_90a, and when they serve.

They multiply by wgmma and load by the TMA unit, which sets conditions: 16-bit elements, strides of
whole 16 bytes (but any number of columns: it fills up with zeros). What they cannot do goes to the
kernels for every GPU, and the plan says why.
"""

from math import ceil, e, log2, prod
from typing import NamedTuple

from . import long_sums
from .cuda_tiles import FRAGMENT, lazy
from .types import CudaConfig

PANEL = 64                  # columns of a tile that lie together, 128 bytes
CONSUMER, WARP = 64, 16     # rows of a warpgroup and of a warp
MOST_ROWS = 2**30           # packed rows, keys, tasks: they are counted in 32 bits
FEWEST_ROWS = 64            # below, a tile of 128 rows is mostly empty
MANY_KEYS = 1024            # they are better split if there are few tiles of rows
SMEM = 227 << 10
BORDER = 16                 # bytes that the TMA unit counts in
CACHED = 32 << 20           # bytes of K and V that may stay in the L2 cache beside all else
# Scores stay q.k until the exponential, where one factor brings scale and base in, unless that is
# not positive, or near the ends of float32.
SCALES = 2.0**-60, 2.0**60


class Row(NamedTuple):
    """A row of the table: rows and keys of a tile, the widest head dims, and what it is for.

    `pace`: how many scores a multiprocessor gets done, in units of the other rows for these widths;
    `masked`: the same where the rows of a tile do not see the same keys.
    """

    Br: int
    Bc: int
    d: int
    d_v: int
    reason: str
    pace: float = 1.0
    masked: float = 1.0


# Among rows of the smallest widths that suffice, the one that is done first is taken. Rows of a
# tile: 64 for each consumer.
ROWS = (
    Row(192, 128, 64, 64, "three consumers: the accumulators of d_v = 64 leave room for them"),
    # Three consumers hide each other's softmax better than two, 587 against 486 TFLOP/s at 16,384
    # keys on an H200, but two take fewer exponentials of a tile that a diagonal crosses.
    Row(128, 128, 64, 64, "two consumers: tiles of 192 rows waste much of a short diagonal, and "
        "leave no registers for bias and mask", 0.85, 0.94),
    Row(128, 128, 128, 128, "two consumers, as many keys as rows"),
    Row(128, 128, 192, 128, "two consumers, as many keys as rows"),
    Row(128, 96, 192, 192, "two consumers, and the keys that fit in shared memory"),
    # 80 keys fit without results beside them: 0.89 of the speed at 1,024 keys, 0.99 at 16,384.
    Row(128, 64, 256, 256, "two consumers, and the keys that fit in shared memory"),
)


def choose(problem, device):
    """(config, bytes of shared memory, reason) of the row that serves; or None, and why not."""
    obstacle = obstacle_of(problem, device)
    if obstacle:
        return None, obstacle
    crowded = reads_scores(problem)
    row = min((row for row in ROWS if problem.d <= row.d and problem.d_v <= row.d_v),
              key=lambda row: (row.d, row.d_v, crowded and row.Br > 128,
                               scores_of(problem, row) / pace_of(problem, row)))
    config = config_of(problem, row)
    tasks = count_tasks(problem, config)
    if 2 * tasks < device.sms and problem.Nk > MANY_KEYS:
        return None, f"{tasks} tiles of {row.Br} rows leave most multiprocessors idle"
    if max(tasks, problem.Nk, problem.group * problem.Nq) >= MOST_ROWS:
        return None, "the sequences are too long to count in 32 bits"
    return (config, smem_bytes(config), row.reason), None


def obstacle_of(problem, device):
    """What the kernel cannot do of a problem, in words; None if it can do all."""
    p = problem
    obstacle = obstacle_to_wgmma(p, device)
    if obstacle:
        return obstacle
    if p.group * p.Nq < FEWEST_ROWS or p.Nk == 0:
        return f"fewer than {FEWEST_ROWS} rows for a key head"
    keys = long_sums.keys_of_a_row(p)
    if long_sums.is_fresh(p, keys):
        return f"sums over {keys} keys in tensor cores lose digits that {p.out_dtype} has"
    return obstacle_in(p, ("q", "k", "v"), stored=("out",))


def obstacle_to_wgmma(problem, device):
    """Why no kernel for sm_90a serves; None if one can."""
    if not device.wgmma:
        return "sm_90 and NVRTC 12.9 or newer have it"
    if problem.dtype not in ("float16", "bfloat16"):
        return "its elements have 16 bits"
    return None


def obstacle_in(problem, loaded, stored=()):
    """Why the TMA unit cannot move one of these arrays; None if it can move all.

    Results have other ways to memory, whatever their strides.
    """
    p = problem
    for name in (*loaded, *stored):
        if name in p.unaligned and name not in p.copied:
            return f"{name} does not begin on a border of 16 bytes"
    for name, shape, strides, dtype, *_ in p.layouts:
        if name not in loaded:
            continue
        if str(dtype) != p.dtype:
            return f"{name} has {dtype}"
        if not loadable(shape, dense_strides(shape) if name in p.copied else strides):
            return f"the strides of {name} are not positive multiples of 16 bytes"
    return None


def dense_strides(shape):
    """Bytes from one entry to the next of each axis of a dense array of 16-bit elements."""
    return tuple(2 * prod(shape[axis + 1:]) for axis in range(len(shape)))


def reads_scores(problem):
    """Whether bias or mask, which may hide any key, are read beside the products."""
    return problem.has_mask or problem.bias_shape is not None


def loadable(shape, strides):
    """Whether the TMA unit can walk an array, apart from its address."""
    return all(n == 1 or (s > 0 and s % 16 == 0)
               for n, s in zip(shape[:-1], strides[:-1], strict=True))


def narrow(problem):
    """How results are stored: 0 as wide as it goes, 1 by pairs, 2 one by one.

    Those of 16 bits leave by the TMA unit if it can walk their array and rows are whole 16 bytes:
    whatever lies behind a row must stay as it is. Pairs must lie on borders of their size.
    """
    size = 4 if problem.out_dtype == "float32" else 2
    row = problem.d_v * size
    steps = [row]
    for name, shape, strides, *_ in problem.layouts:
        if name == "out":
            steps = [s for n, s in zip(shape[:-1], strides[:-1], strict=True) if n > 1]
    if size == 2 and all(step > 0 and step % BORDER == 0 for step in (row, *steps)):
        return 0
    if any(step % (2 * size) for step in (row, *steps)):
        return 2
    return 0 if size == 4 else 1


def pack_of(problem, Br):
    """Query heads in a tile: the whole group if that makes far fewer tiles, otherwise one."""
    group, Nq = problem.group, problem.Nq
    packed = PANEL % group == 0 and ceil(group * Nq / Br) < 0.9 * group * ceil(Nq / Br)
    return group if packed else 1


def count_tasks(problem, config):
    """Tiles of query rows."""
    p = problem
    pack = pack_of(p, config.Br)
    return p.batch * p.heads_q // pack * ceil(pack * p.Nq / config.Br)


def sees_all(problem):
    """Whether no row has keys hidden behind it by its position."""
    return problem.mask.right >= problem.Nk


def pace_of(problem, row):
    """How many scores are done at a time."""
    return row.pace if sees_all(problem) else row.masked


def scores_of(problem, row):
    """Scores that a head's tiles compute: more than there are, at the ends of rows and keys."""
    p, Br, Bc = problem, row.Br, row.Bc
    tiles = ceil(p.Nq / Br)
    if sees_all(p):
        return tiles * Br * ceil(p.Nk / Bc) * Bc
    offset = p.Nk - p.Nq if p.mask.q_offset is None else p.mask.q_offset
    # In a moderate number of tiles, for what is left over at their ends matters in short rows only.
    some = range(0, tiles, ceil(tiles / 64))
    ends = (min((i + 1) * Br, p.Nq) + offset + p.mask.right for i in some)
    keys = sum(ceil(min(max(end, 0), p.Nk) / Bc) * Bc for end in ends)
    return tiles * Br * keys // len(some)


def section_of(problem, pack):
    """Heads that are worked on at a time; 0: one after the other, all tiles of a head.

    Where rows differ in their keys, the longest rows of all heads should come first, but then the
    keys of all heads are read at once: as many heads as the cache can hold the keys of.
    """
    p = problem
    if sees_all(p):
        return 0
    heads_k = max(1, CACHED // (2 * p.Nk * (p.d + p.d_v)))
    return min(heads_k * (p.group // pack), p.batch * p.heads_q // pack)


def extras(problem, config):
    """The kernel's parameters beside those of every forward kernel."""
    p, pack = problem, pack_of(problem, config.Br)
    return {"pack": pack, "section": section_of(p, pack), "lazy_2": config.lazy * log2(e),
            "unit": log2(e) if config.features else p.scale * log2(e),
            "qk_scale": p.scale, "cap": p.softcap, "per_cap": 1 / p.softcap if p.softcap else 0,
            "most": config.Bc // 4 * e**config.lazy}


def config_of(problem, row):
    """What the kernel is compiled for, to serve this problem with this row."""
    p = problem
    d, d_v = (ceil(x / FRAGMENT) * FRAGMENT for x in (p.d, p.d_v))
    holes = reads_scores(p)
    features = p.has_features or not SCALES[0] <= p.scale <= SCALES[1]
    return CudaConfig(p.dtype, None, d, d_v, row.Br, row.Bc, 4 * (row.Br // 64 + 1), features,
                      lazy(p), (("blocks", 1), ("wide", int(p.out_dtype != p.dtype)),
                               ("narrow", narrow(p)), ("holes", int(holes))))


def smem_bytes(config):
    """Dynamic shared memory of a block, as the kernel's traits add it up."""
    def tile(rows, columns):
        return rows * ceil(columns / PANEL) * 2 * PANEL

    Q, KV = tile(config.Br, config.d), tile(config.Bc, config.d) + tile(config.Bc, config.d_v)
    out = tile(config.Br, PANEL) if tiled(config) else 0
    choices = (1024 + stages * KV + tiles_Q * Q for stages, tiles_Q in ((4, 2), (2, 2), (2, 1)))
    loaded = next((bytes for bytes in choices if bytes + out <= SMEM), SMEM + 1)
    if loaded > SMEM or not out:
        return loaded
    return loaded + out * min(ceil(config.d_v / PANEL), (SMEM - loaded) // out)


def tiled(config):
    """Whether results leave through shared memory, by the TMA unit."""
    constants = dict(config.constants)
    return not constants["wide"] and constants["narrow"] == 0

"""The tiles of the kernels for sm_90a, and when they serve.

They multiply by wgmma and load by the TMA unit, which sets conditions: 16-bit elements, strides of
whole 16 bytes (but any number of columns: it fills up with zeros). What they cannot do goes to the
kernels for every GPU, and the plan says why.
"""

from dataclasses import dataclass
from math import ceil, e, log2, prod
from typing import NamedTuple

from . import long_sums
from .kernel import FRAGMENT, RESIDENT, SCALES, Box, Candidate, Offer, total
from .types import LAZY, CudaConfig

PANEL = 64                  # columns of a tile that lie together, 128 bytes
CONSUMER, WARP = 64, 16     # rows of a warpgroup and of a warp
MOST_ROWS = 2**30           # packed rows, keys, tasks: they are counted in 32 bits
FEWEST_ROWS = 64            # below, a tile of 128 rows is mostly empty
MANY_KEYS = 1024            # they are better split if there are few tiles of rows
SMEM = 227 << 10
HEAD = 1024                 # bytes before the tiles, which are aligned to so many
BORDER = 16                 # bytes that the TMA unit counts in
CACHED = 32 << 20           # bytes of K and V that may stay in the L2 cache beside all else


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


@dataclass(frozen=True, eq=False)
class ForwardSm90(Candidate):
    """The forward kernel; `rows` is a table like `ROWS`.

    Attributes
    ----------
    fewest_rows : int
        Packed rows for a key head, below which other kernels serve.
    many_keys : int
        So many keys at most, where the tiles of rows leave most multiprocessors idle.
    """

    fewest_rows: int = FEWEST_ROWS
    many_keys: int = MANY_KEYS

    def best(self, problem, device):
        """Of the rows with the smallest widths that suffice, the one that is done first."""
        p = problem
        reason = self.unsupported_reason(p)
        if reason:
            return reason
        crowded = reads_scores(p)
        row = min((row for row in self.rows if p.d <= row.d and p.d_v <= row.d_v),
                  key=lambda row: (row.d, row.d_v, crowded and row.Br > 128,
                                   scores_of(p, row) / pace_of(p, row)))
        config = config_of(p, row)
        tasks = count_tasks(p, config)
        if 2 * tasks < device.sms and p.Nk > self.many_keys:
            return f"{tasks} tiles of {row.Br} rows leave most multiprocessors idle"
        if max(tasks, p.Nk, p.group * p.Nq) >= MOST_ROWS:
            return "the sequences are too long to count in 32 bits"
        return Offer(config, smem_bytes(config), tasks, row.reason)

    def unsupported_reason(self, problem):
        """What the kernel cannot do of a problem, in words; None if it can do all."""
        p = problem
        if p.dtype not in ("float16", "bfloat16"):
            return "its elements have 16 bits"
        if p.group * p.Nq < self.fewest_rows or p.Nk == 0:
            return f"fewer than {self.fewest_rows} rows for a key head"
        keys = long_sums.keys_of_a_row(p)
        if long_sums.is_fresh(p, keys):
            return f"sums over {keys} keys in tensor cores lose digits that {p.out_dtype} has"
        return unsupported_arrays(p, ("q", "k", "v"), stored=("out",))

    def parameters(self, problem, launch):
        """The order of its tasks, and what scores and softmax need in base 2."""
        p, config = problem, launch.config
        pack = pack_of(p, config.Br)
        return {"pack": pack, "section": section_of(p, pack), "lazy_2": config.lazy * log2(e),
                "unit": log2(e) if dict(config.constants)["scaled"] else p.scale * log2(e),
                "qk_scale": p.scale, "cap": p.softcap, "per_cap": 1 / p.softcap if p.softcap else 0,
                "most": config.Bc // 4 * e**config.lazy}

    def boxes(self, problem, config):
        """Rows of each consumer and of each warp, whole tiles of keys."""
        pack, keys = pack_of(problem, config.Br), box_of_keys(config.Bc)
        return {"q": box_of_rows(CONSUMER, pack), "k": keys, "v": keys,
                "out": box_of_rows(WARP, pack) if tiled(config) else None}


FORWARD = ForwardSm90("forward_sm90", "sm90/forward.cuh", "ForwardSm90Params", RESIDENT,
                        "90a", ("q", "k", "v", "out"), "forward", family="sm90", rows=ROWS)
KERNELS = (FORWARD,)


def box_of_rows(count, pack):
    """So many packed rows; those of the heads in a pack lie side by side in a tile."""
    heads = min(pack, count)
    return Box((3, 1, 2, 0), (PANEL, heads, count // heads, 1))


def box_of_keys(count):
    """So many rows of a key head."""
    return Box((3, 2, 1, 0), (PANEL, count, 1, 1))


def unsupported_arrays(problem, loaded, stored=()):
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


def config_of(problem, row):
    """What the kernel is compiled for, to serve this problem with this row."""
    p = problem
    d, d_v = (ceil(x / FRAGMENT) * FRAGMENT for x in (p.d, p.d_v))
    options = p.compiled("forward", True) + p.compiled("forward", False)
    scaled = p.has_features or not SCALES[0] <= p.scale <= SCALES[1]
    return CudaConfig(p.dtype, None, d, d_v, row.Br, row.Bc, 4 * (row.Br // 64 + 1), options,
                      LAZY, (("blocks", 1), ("wide", int(p.out_dtype != p.dtype)),
                               ("narrow", narrow(p)), ("scaled", int(scaled))))


def tile_bytes(rows, columns):
    """Bytes of a tile of 16-bit elements, which lies in panels."""
    return rows * ceil(columns / PANEL) * 2 * PANEL


def smem_bytes(config):
    """Dynamic shared memory of a block."""
    return total(smem_pieces(config))


def smem_pieces(config):
    """What a block has in shared memory, in the order of the kernel's tiles."""
    Q, K, V = (tile_bytes(rows, columns) for rows, columns in (
        (config.Br, config.d), (config.Bc, config.d), (config.Bc, config.d_v)))
    out = tile_bytes(config.Br, PANEL) if tiled(config) else 0
    # Stages of K and V, and tiles of Q, beside one place for results: as many as there is room for.
    for stages, tiles_Q in ((4, 2), (2, 2), (2, 1)):
        loaded = HEAD + tiles_Q * Q + stages * (K + V)
        if loaded + out <= SMEM:
            break
    places = min(ceil(config.d_v / PANEL), (SMEM - loaded) // out) if out else 0
    return (("work, barriers, seen keys", HEAD), ("Q", tiles_Q * Q), ("K", stages * K),
            ("V", stages * V), ("out", places * out))


def tiled(config):
    """Whether results leave through shared memory, by the TMA unit."""
    constants = dict(config.constants)
    return not constants["wide"] and constants["narrow"] == 0

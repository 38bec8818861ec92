"""Plans for the CPU: how many tasks, how they are cut, how much scratch a worker needs."""

from dataclasses import dataclass, replace
from math import ceil

from .types import LAZY, Buffer, Launch, Plan

# 64 bytes are one register of AVX-512, two of AVX2, four of NEON: LLVM splits the vector.
VECTOR_BYTES = 64


@dataclass(frozen=True)
class MicroKernel:
    """A product whose sums stay in registers.

    `shapes` are its rows and vectors of 64 bytes, widest first: the further ones are for what is
    left of the columns. `Br` are the packed query rows of a tile, the columns of S^T: whole groups
    of vectors.
    """

    shapes: tuple[tuple[int, int], ...]
    Br: int

    @property
    def rows(self):
        """What rows are rounded up to."""
        return max(rows for rows, _ in self.shapes)


# An FMA takes 4 cycles and two start in each, so 8 sums or more must be under way, and must leave
# registers to the operands. 6 rows by 64 bytes are 12 sums in the 16 registers of AVX2 (99 % of
# the peak on Zen 4), 24 in the 32 of NEON. In the 32 of AVX-512 they are 6, and each element that
# is broadcast serves a single FMA; 4 x 4 are 16, and two FMAs for each load.
MICRO_KERNELS = {
    "6x1": MicroKernel(((6, 1),), Br=96),
    "4x4": MicroKernel(((4, 4), (8, 2), (8, 1)), Br=128),
}
FITTING = {128: "6x1", 256: "6x1", 512: "4x4"}      # by the bits of a vector register


def micro_kernel(device):
    """The `MicroKernel` that a device is asked to use, or that fits its vector registers."""
    name = device.micro_kernel or FITTING[device.vector_bits]
    if name not in MICRO_KERNELS:
        raise ValueError(f"the environment variable CUPY_FLASH_MICRO_KERNEL is {name!r}, expected "
                         f"one of {', '.join(MICRO_KERNELS)}; or unset it to use what fits the "
                         "processor")
    return MICRO_KERNELS[name]


# As many rows as a product may write beyond its last one.
SURPLUS_ROWS = max(kernel.rows for kernel in MICRO_KERNELS.values())
# A product of so few rows is bound by memory: it reads each key once and fills no tile of the
# micro-kernel.
FEW_ROWS = 4
# 96 is a multiple of the vectors (16, 8) and of the micro-kernels' rows; five tiles of it at
# d = 128 stay in 512 KiB of L2. Few rows are bound by memory: what is done once per tile is done
# less often: 20 % in all for one query of float32 at d = 64. More keys leave L2 in float64.
KEYS, KEYS_FOR_FEW_ROWS = 96, 1024
# Lengths of the levels of a sum, which backends/cpu/sums.py derives: terms, keys, tiles of rows.
CHAIN = 16
SLICE = 256
NEAR_KEYS = 4096
NEAR_TILES = 256
SPLIT_KEYS = 1024  # a split below this costs more in merging than a second thread brings
SMALL_FLOPS = 2e6  # below, waking a thread takes longer than the work
KEY_BLOCK = 256  # keys whose dK and dV are stored, or added up, in one task
MERGE_ROWS = 512  # rows to merge that are worth a second thread

# How a sum is cut follows from the problem alone, so that its bits do not depend on the number of
# threads. It is cut so that any of these numbers of threads is kept busy.
THREADS = (2, 4, 8, 16, 32, 64)
# In backward, query tiles of one chunk follow each other through its keys. Adding to dK and dV is
# two fifths of the work, so two or three can be at work for each tile of keys: 40 tiles of keys, in
# all chunks together, keep 64 threads busy.
TILES_IN_FLIGHT = 40


def tile_elements(rows, columns, itemsize):
    """Elements of a tile in a worker's slab; `carve` of the CPU backend cuts it out so."""
    lanes = VECTOR_BYTES // itemsize
    return rows * (ceil(columns / lanes) * lanes + lanes)


def busy(tasks, threads):
    """The part of their time that threads work on so many equal tasks."""
    return tasks / threads / ceil(tasks / threads)


def shares(tasks, most):
    """A small number of equal parts of each task that keeps any number of `THREADS` busy.

    That is 80 % of the time, or where no number of parts up to `most` can do it, 60 % of the best.
    Up to a fourth more parts are taken if they do better.
    """
    if tasks >= 4 * THREADS[-1]:
        return 1
    most = min(most, ceil(4 * THREADS[-1] / tasks))
    rates = {n: [busy(tasks * parts, n) for parts in range(1, most + 1)] for n in THREADS}
    best = {n: max(rates[n]) for n in THREADS}
    fit = [i for i in range(most)
           if all(rates[n][i] >= (0.8 if best[n] >= 0.8 else 0.6 * best[n]) for n in THREADS)]
    near = [i for i in fit if 1 + i <= 1.25 * (1 + fit[0])] or range(most)
    return 1 + max(near, key=lambda i: min(rates[n][i] / best[n] for n in THREADS))


def plan_forward(problem, device, config):
    """One launch of `forward`; `combine` after it if the keys were split."""
    config = _fit(problem, device, config)
    tiles = ceil(problem.group * problem.Nq / config.Br)
    tasks = problem.batch * problem.heads_k * tiles
    if tasks == 0:
        return Plan("forward", problem, device, (), ())
    small = _is_small(problem, 4)
    splits = 1 if small else shares(tasks, max(1, problem.Nk // SPLIT_KEYS))
    threads = 1 if small else min(device.threads, tasks * splits)
    reason = "one task per tile of query rows"
    if splits > 1:
        reason = f"{tasks} tiles of query rows are few tasks, so {splits} splits of the keys"
    launches = [Launch("forward", config, tasks * splits, threads, splits, reason)]
    workspace = [_slab(threads, forward_slab(problem, config), problem)]
    if splits > 1:
        rows = splits * problem.batch * problem.heads_q * problem.Nq
        workspace += [
            Buffer("out_partial", rows * problem.d_v, problem.accumulator),
            Buffer("sums_partial", 2 * rows, problem.accumulator),
        ]
        launches.append(
            Launch(
                "combine",
                config,
                rows // splits,
                min(threads, ceil(rows / MERGE_ROWS)),
                splits,
                "adds the splits up, in their order",
            )
        )
    return Plan("forward", problem, device, tuple(launches), tuple(workspace))


def plan_backward(problem, device, config):
    """`backward`, `reduce_chunks` if it left accumulators, `dbias` and `dsink` if wanted."""
    config = _fit(problem, device, config)
    heads = problem.batch * problem.heads_k
    if heads == 0:
        return Plan("backward", problem, device, (), ())
    tiles = ceil(problem.group * problem.Nq / config.Br)
    widths = [width for name, width in (("dk", problem.d), ("dv", problem.d_v))
              if name in problem.wrt]
    chunks = _chunks(problem, config, tiles) if widths else max(1, tiles)
    threads = 1 if _is_small(problem, 10) else device.threads
    by_tiles = tiles > chunks and busy(heads * chunks, threads) < 0.9
    tasks = heads * (tiles if by_tiles else chunks)
    launches = [
        Launch("backward", config, tasks, min(threads, tasks), chunks,
               _backward_reason(heads, chunks, by_tiles) if widths
               else "one task per tile of query rows, for no sums over rows are wanted")
    ]
    levels = 2 if ceil(tiles / chunks) > NEAR_TILES else 1
    keys = levels * sum(tile_elements(problem.Nk + SURPLUS_ROWS, width, _itemsize(problem))
                        for width in widths)
    # Accumulators of their own, not in the slabs.
    apart = by_tiles or (chunks > 1 and bool(widths))
    slab = backward_slab(problem, config)
    workspace = [_slab(launches[0].threads, slab + (0 if apart else keys), problem)]
    if apart:
        workspace.append(Buffer("partial", heads * chunks * keys, problem.accumulator))
        blocks = heads * ceil(problem.Nk / KEY_BLOCK)
        launches.append(
            Launch("reduce_chunks", config, blocks, max(1, min(launches[0].threads, blocks)),
                   chunks, "stores the gradients of keys, the sums of the chunks, added in pairs")
        )
    if by_tiles:
        workspace.append(Buffer("turns", heads * tiles, "int64"))
    if problem.wants_dbias:
        b, h, n, c = problem.bias_shape
        tasks = b * h * ceil(n / config.Br) * ceil(c / config.Bc)
        rows = problem.batch * problem.heads_q * problem.Nq
        workspace.append(Buffer("normalisers", 2 * rows, problem.accumulator))
        launches.append(
            Launch("dbias", config, tasks, min(launches[0].threads, tasks), chunks,
                   "one task per tile of dbias, which walks all that was broadcast")
        )
    if problem.wants_dsink:
        workspace.append(Buffer("sink_terms", problem.batch * problem.heads_q * problem.Nq,
                                problem.accumulator))
        launches.append(
            Launch("dsink", config, problem.heads_q, min(launches[0].threads, problem.heads_q),
                   chunks, "one task per head, which sums what its rows left")
        )
    return Plan("backward", problem, device, tuple(launches), tuple(workspace))


def _chunks(problem, config, tiles):
    """Into how many chunks the query tiles of a key head are cut, each with a sum of its own.

    Only where there are too few tiles of keys for threads to follow each other through them, and
    not below two query tiles, for a chunk's sum has to be cleared and added.
    """
    if _is_small(problem, 10):
        return 1
    heads = problem.batch * problem.heads_k
    in_flight = heads * max(1, ceil(problem.Nk / config.Bc))
    return max(1, min(ceil(TILES_IN_FLIGHT / in_flight), tiles // 2))


def _backward_reason(heads, chunks, by_tiles):
    """Why the backward pass has these tasks."""
    if by_tiles:
        return (f"{heads * chunks} sums of dk and dv do not fill the threads, so one task per tile "
                "of query rows; the tiles take turns at adding")
    if chunks > 1:
        return f"{heads} key heads are few tasks, so {chunks} chunks of their query rows"
    return "one task per key head"


def forward_slab(problem, config):
    """Elements of scratch of a forward worker, tile for tile as `forward_tile` carves them."""
    p, Br, Bc = problem, config.Br, config.Bc + SURPLUS_ROWS
    if config.in_place:
        operands = [(FEW_ROWS, config.Bc), (FEW_ROWS, p.d)]
    else:
        operands = [(Bc, p.d), (Bc, p.d_v), (Bc, Br), (p.d, Br)]
    far = (Br if p.Nk > NEAR_KEYS else 0, p.d_v)
    tiles = [*operands, (Br + SURPLUS_ROWS, max(p.d, p.d_v)), far, far, (7, Br)]
    return sum(tile_elements(*tile, _itemsize(p)) for tile in tiles)


def backward_slab(problem, config):
    """Elements of scratch of a backward worker, tile for tile as `carve_tiles` carves them."""
    p, Br, Bc = problem, config.Br + SURPLUS_ROWS, config.Bc + SURPLUS_ROWS
    far_rows = config.Br if "dq" in p.wrt and p.Nk > NEAR_KEYS else 0
    tiles = [
        (Br, p.d),
        (p.d, config.Br),
        (Br, p.d_v),
        (p.d_v, config.Br),
        (Bc, p.d),
        (Bc, p.d_v),
        (Bc, config.Br),
        (Bc, config.Br),
        (Bc, config.Br),
        (Br if "dq" in p.wrt else 0, p.d),
        (far_rows, p.d),
        (far_rows, p.d),
        (1, p.d_v),
        (3, config.Br),
        (7, config.Br),
    ]
    if p.wants_dbias:
        tiles += [(config.Bc, config.Br)] * 2
    return sum(tile_elements(*tile, _itemsize(p)) for tile in tiles)


def _fit(problem, device, config):
    """Tiles no larger than the problem, and the threshold of the lazy reference."""
    lanes = VECTOR_BYTES // _itemsize(problem)
    rows = max(1, ceil(problem.group * problem.Nq / lanes)) * lanes
    lazy = LAZY if config.lazy is None else config.lazy
    few = problem.group * problem.Nq <= FEW_ROWS
    keys = config.Bc or (KEYS_FOR_FEW_ROWS if few else KEYS)
    in_place = few and _reads_in_place(problem)
    Br = config.Br or micro_kernel(device).Br
    return replace(config, Br=min(Br, rows), Bc=keys, lazy=lazy, in_place=in_place)


def _reads_in_place(problem):
    """Whether products with few rows, which memory bounds, can read K and V where they are.

    That takes whole vectors of the accumulators' type, and no option but the range of visible keys.
    """
    p, lanes = problem, VECTOR_BYTES // _itemsize(problem)
    exact = p.dtype == p.accumulator and p.precision != "tf32"
    return not p.has_features and exact and p.d % lanes == 0 and p.d_v % lanes == 0


def _is_small(problem, flops_per_product):
    """Whether the work is not worth waking threads."""
    p = problem
    return flops_per_product * p.batch * p.heads_q * p.Nq * p.Nk * max(p.d, p.d_v) < SMALL_FLOPS


def _slab(threads, elements, problem):
    # One vector to spare per worker: slabs start on 64-byte borders.
    lanes = VECTOR_BYTES // _itemsize(problem)
    elements = ceil(elements / lanes) * lanes
    return Buffer("slab", threads * elements + lanes, problem.accumulator)


def _itemsize(problem):
    return 8 if problem.accumulator == "float64" else 4

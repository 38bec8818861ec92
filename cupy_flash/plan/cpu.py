"""Plans for the CPU: how many tasks, how they are cut, how much scratch a worker needs."""

from dataclasses import replace
from math import ceil, log

from .types import Buffer, Launch, Plan

# The micro-kernel: 64 bytes are one AVX-512 register, two of AVX2, four of NEON: LLVM splits the
# vector. Six rows make 6 (12 with AVX2) independent sums, enough to hide the 4 cycles of an FMA,
# and fit into 16 registers together with the operands. Measured: 99 % of the FMA peak on Zen 4.
VECTOR_BYTES = 64
MICRO_ROWS = 6
# A product of so few rows is bound by memory: it reads each key once and fills no tile of the
# micro-kernel.
FEW_ROWS = 4
# 96 is a multiple of the vectors (16, 8) and of the micro-kernel's 6 rows; five tiles of it at
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


def tile_elements(rows, columns, itemsize):
    """Elements of a tile in a worker's slab; `carve` of the CPU backend cuts it out so."""
    lanes = VECTOR_BYTES // itemsize
    return rows * (ceil(columns / lanes) * lanes + lanes)


def shares(tasks, threads, most):
    """Smallest number of equal parts of each task that keeps the threads at least 90 % busy."""
    for parts in range(1, most + 1):
        units = tasks * parts / threads
        if units >= 0.9 * ceil(units):
            return parts
    return most


def plan_forward(problem, device, config):
    """One launch of `forward`; `combine` after it if the keys were split."""
    config = _fit(problem, config)
    tiles = ceil(problem.group * problem.Nq / config.Br)
    tasks = problem.batch * problem.heads_k * tiles
    if tasks == 0:
        return Plan("forward", problem, device, (), ())
    threads = _threads(problem, device, 4)
    splits = 1
    if threads > 1 and tasks < 4 * threads:
        splits = shares(tasks, threads, max(1, problem.Nk // SPLIT_KEYS))
    reason = "one task per tile of query rows"
    if splits > 1:
        reason = (
            f"{tasks} tiles of query rows do not fill the threads, so {splits} splits of the keys"
        )
    launches = [
        Launch("forward", config, tasks * splits, min(threads, tasks * splits), splits, reason)
    ]
    workspace = [_slab(launches[0].threads, forward_slab(problem, config), problem)]
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
                problem.batch * problem.heads_q * problem.Nq,
                1,
                splits,
                "adds the splits up, in their order",
            )
        )
    return Plan("forward", problem, device, tuple(launches), tuple(workspace))


def plan_backward(problem, device, config):
    """`backward`, `reduce_chunks` if key heads were divided, `dbias` if there is a bias."""
    config = _fit(problem, config)
    heads = problem.batch * problem.heads_k
    if heads == 0:
        return Plan("backward", problem, device, (), ())
    threads = _threads(problem, device, 10)
    tiles = ceil(problem.group * problem.Nq / config.Br)
    chunks = shares(heads, threads, max(1, tiles)) if threads > 1 else 1
    reason = "one task per key head"
    if chunks > 1:
        reason = (
            f"{heads} key heads do not fill the threads, so {chunks} chunks of their query rows"
        )
    threads = min(threads, heads * chunks)
    launches = [Launch("backward", config, heads * chunks, threads, chunks, reason)]
    levels = 2 if ceil(tiles / chunks) > NEAR_TILES else 1
    keys = levels * sum(
        tile_elements(problem.Nk + MICRO_ROWS, columns, _itemsize(problem))
        for columns in (problem.d, problem.d_v)
    )
    slab = backward_slab(problem, config)
    workspace = [_slab(threads, slab + (keys if chunks == 1 else 0), problem)]
    if chunks > 1:
        workspace.append(Buffer("partial", heads * chunks * keys, problem.accumulator))
        launches.append(
            Launch(
                "reduce_chunks",
                config,
                heads,
                min(threads, heads),
                chunks,
                "adds the chunks up, in their order",
            )
        )
    if problem.bias_shape and 0 not in problem.bias_shape:
        b, h, n, c = problem.bias_shape
        tasks = b * h * ceil(n / config.Br) * ceil(c / config.Bc)
        rows = problem.batch * problem.heads_q * problem.Nq
        workspace.append(Buffer("normalisers", 2 * rows, problem.accumulator))
        launches.append(
            Launch(
                "dbias",
                config,
                tasks,
                min(threads, tasks),
                chunks,
                "one task per tile of dbias, which walks all that was broadcast",
            )
        )
    return Plan("backward", problem, device, tuple(launches), tuple(workspace))


def forward_slab(problem, config):
    """Elements of scratch of a forward worker, tile for tile as `forward_tile` carves them."""
    p, Br, Bc = problem, config.Br, config.Bc + MICRO_ROWS
    if config.in_place:
        operands = [(FEW_ROWS, config.Bc), (FEW_ROWS, p.d)]
    else:
        operands = [(Bc, p.d), (Bc, p.d_v), (Bc, Br), (p.d, Br)]
    far = (Br if p.Nk > NEAR_KEYS else 0, p.d_v)
    tiles = [*operands, (Br + MICRO_ROWS, max(p.d, p.d_v)), far, far, (7, Br)]
    return sum(tile_elements(*tile, _itemsize(p)) for tile in tiles)


def backward_slab(problem, config):
    """Elements of scratch of a backward worker, tile for tile as `carve_tiles` carves them."""
    p, Br, Bc = problem, config.Br + MICRO_ROWS, config.Bc + MICRO_ROWS
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
        (Br, p.d),
        (config.Br if p.Nk > NEAR_KEYS else 0, p.d),
        (config.Br if p.Nk > NEAR_KEYS else 0, p.d),
        (1, p.d_v),
        (3, config.Br),
        (7, config.Br),
    ]
    if p.bias_shape:
        tiles += [(config.Bc, config.Br)] * 2
    return sum(tile_elements(*tile, _itemsize(p)) for tile in tiles)


def _fit(problem, config):
    """Tiles no larger than the problem, and the threshold of the lazy reference."""
    lanes = VECTOR_BYTES // _itemsize(problem)
    rows = max(1, ceil(problem.group * problem.Nq / lanes)) * lanes
    lazy = (
        log(2) * (30 if problem.accumulator == "float64" else 8)
        if config.lazy is None
        else config.lazy
    )
    few = problem.group * problem.Nq <= FEW_ROWS
    keys = config.Bc or (KEYS_FOR_FEW_ROWS if few else KEYS)
    in_place = few and _reads_in_place(problem)
    return replace(config, Br=min(config.Br, rows), Bc=keys, lazy=lazy, in_place=in_place)


def _reads_in_place(problem):
    """Whether products with few rows, which memory bounds, can read K and V where they are.

    That takes whole vectors of the accumulators' type, and no option but the range of visible keys.
    """
    p, lanes = problem, VECTOR_BYTES // _itemsize(problem)
    exact = p.dtype == p.accumulator and p.precision != "tf32"
    return not p.has_features and exact and p.d % lanes == 0 and p.d_v % lanes == 0


def _threads(problem, device, flops_per_product):
    """All threads, or one if the work is not worth waking them."""
    p = problem
    flops = flops_per_product * p.batch * p.heads_q * p.Nq * p.Nk * max(p.d, p.d_v)
    return device.threads if flops >= SMALL_FLOPS else 1


def _slab(threads, elements, problem):
    # One vector to spare per worker: slabs start on 64-byte borders.
    lanes = VECTOR_BYTES // _itemsize(problem)
    elements = ceil(elements / lanes) * lanes
    return Buffer("slab", threads * elements + lanes, problem.accumulator)


def _itemsize(problem):
    return 8 if problem.accumulator == "float64" else 4

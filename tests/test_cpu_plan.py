"""How busy the plans for the CPU keep many threads, against plans that look at their number.

Sums used to be cut for the number of threads at hand, and so had other bits with another number.
Now the problem alone decides; what that may cost is held against the former rule here.
"""

import heapq
from functools import cache
from itertools import product
from math import ceil

import pytest

from cupy_flash.device import Device
from cupy_flash.plan import CpuConfig
from cupy_flash.plan import cpu as planner
from cupy_flash.plan.cpu import SPLIT_KEYS, busy
from cupy_flash.problem import Mask, Problem

# Of the time for one tile of queries and keys in backward: what comes before and after adding to dK
# and dV, that itself, and adding the same tile of one chunk to another's.
BEFORE, TURN, AFTER, ADD = 0.4, 0.4, 0.2, 0.05
TILE = 96
HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
TILES_Q = (1, 2, 3, 4, 6, 8, 11, 16, 22, 43, 86, 171)
TILES_K = (1, 2, 3, 6, 11, 22, 43, 86)
LONG_Q = (257, 300, 1000, 10_241)       # tiles of queries, whose sums may have two levels
SIZES = [size for size in product(HEADS, TILES_Q, TILES_K) if size[0] * size[1] * size[2] < 40_000]


def former_parts(tasks, threads, most):
    """The smallest number of parts that kept these threads 90 % busy."""
    for parts in range(1, most + 1):
        if busy(tasks * parts, threads) >= 0.9:
            return parts
    return most


def problem_of(heads, Nq, Nk):
    """Attention with so many heads, d = 64, float32."""
    return Problem(1, heads, heads, Nq, Nk, 64, 64, "float32", "float32", "tf32x3", 0.125, 0.0,
                   Mask())


@cache
def plans(heads, Nq, Nk, threads):
    """The plans for both passes."""
    arguments = problem_of(heads, Nq, Nk), Device("cpu", threads), CpuConfig()
    return planner.plan_forward(*arguments), planner.plan_backward(*arguments)


def time_of(lengths, threads):
    """When the last of these tasks is done, each taken by the first thread that is free."""
    free = [0.0] * threads
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


def former_time(heads, tiles, keys, threads):
    """Tiles of time for the former backward pass: chunks for these threads, then their sum."""
    chunks = former_parts(heads, threads, tiles)
    lengths = [keys * len(range(chunk, tiles, chunks)) for _ in range(heads)
               for chunk in range(chunks)]
    sums = [ADD * keys * chunks] * heads if chunks > 1 else [0]
    return time_of(lengths, threads) + time_of(sums, threads)


def time_in_turns(heads, tiles, keys, threads, chunks):
    """Tiles of time for tiles of queries that take turns at adding."""
    free, before = [0.0] * threads, {}
    for tile, head in product(range(tiles), range(heads)):
        now, done = heapq.heappop(free), []
        waited = before.get((head, tile % chunks), [0.0] * keys)
        for turn in waited:
            now = max(now + BEFORE, turn) + TURN
            done.append(now)
            now += AFTER
        before[head, tile % chunks] = done
        heapq.heappush(free, max(now, waited[-1]))
    return max(free)


def time_now(heads, tiles, keys, threads):
    """Tiles of time for the backward pass as it is planned."""
    launches = plans(heads, tiles * TILE, keys * TILE, threads)[1].launches
    chunks = launches[0].splits
    if launches[0].tasks == heads * tiles and len(launches) > 1:
        computing = time_in_turns(heads, tiles, keys, threads, chunks)
    else:
        computing = time_of([keys * len(range(chunk, tiles, chunks)) for chunk in range(chunks)
                             for _ in range(heads)], threads)
    return computing + time_of([ADD * chunks] * (heads * keys * (chunks > 1)), threads)


@pytest.mark.parametrize("threads", [8, 16, 64])
def test_backward_keeps_threads_as_busy_as_before(threads):
    """Where a thread has eight tiles to compute, or almost a millisecond."""
    for heads, tiles, keys in SIZES:
        work = heads * tiles * keys / threads
        if work >= 8 and work / former_time(heads, tiles, keys, threads) >= 0.8:
            assert work / time_now(heads, tiles, keys, threads) >= 0.8, (heads, tiles, keys)


@pytest.mark.parametrize("threads", [8, 16, 64])
def test_forward_keeps_threads_as_busy_as_before(threads):
    for tasks, most in product(range(1, 300), range(1, 80)):
        parts = former_parts(tasks, threads, most) if tasks < 4 * threads else 1
        if busy(tasks * parts, threads) >= 0.8:
            assert busy(tasks * planner.shares(tasks, most), threads) >= 0.8, (tasks, most)


def former_workspace(heads, tiles, keys, threads):
    """Bytes of both passes' workspace, as they were for so many threads."""
    problem, config = problem_of(heads, tiles * TILE, keys * TILE), CpuConfig(Br=TILE, Bc=TILE)
    slab = planner.forward_slab(problem, config)
    parts = (former_parts(heads * tiles, threads, max(1, problem.Nk // SPLIT_KEYS))
             if heads * tiles < 4 * threads else 1)
    rows = parts * heads * problem.Nq if parts > 1 else 0
    forward = min(threads, heads * tiles * parts) * slab + rows * 65
    chunks = former_parts(heads, threads, tiles)
    sums = 2 * planner.tile_elements(problem.Nk + planner.SURPLUS_ROWS, 64, 4)
    backward = min(threads, heads * chunks) * planner.backward_slab(problem, config)
    backward += sums * (heads * chunks if chunks > 1 else min(threads, heads))
    return 4 * forward, 4 * backward


def test_64_threads_have_at_most_twice_the_former_workspace():
    for heads, tiles, keys in (*SIZES, *product(HEADS, LONG_Q, TILES_K)):
        former = former_workspace(heads, tiles, keys, 64)
        for plan, before in zip(plans(heads, tiles * TILE, keys * TILE, 64), former, strict=True):
            assert plan.workspace_bytes <= 2 * before + 64, (plan.direction, heads, tiles, keys)


def test_sums_are_cut_alike_for_any_number_of_threads():
    for heads, tiles, keys in SIZES[::3]:
        both = [plans(heads, tiles * TILE, keys * TILE, n) for n in (1, 2, 3, 8, 64)]
        assert len({tuple(plan.launches[0].splits for plan in pair) for pair in both}) == 1


def test_one_thread_needs_no_tiles_that_take_turns():
    for heads, tiles, keys in SIZES:
        forward, backward = plans(heads, tiles * TILE, keys * TILE, 1)
        assert ceil(backward.launches[0].tasks / backward.launches[0].splits) == heads
        assert {launch.threads for launch in (*forward.launches, *backward.launches)} == {1}

"""Time cupy_flash on a GPU against the other implementations of attention that are installed.

    python -m bench speed                                       # what docs/performance.md shows
    python -m bench speed --cells 16-bit --lengths 1024 4096 16384 --minutes 2.5
    python -m bench speed --cells science --only 'backward*d64' --out mine.jsonl
    python -m bench speed --cells options --only bfloat16 --out options.jsonl
    python -m bench speed --cells shapes small-d --out cliffs.jsonl

Cells: 16-bit, portable (the same by the kernels that every GPU runs), features, science and
decode make up the page; options (each on its own, in every type, beside FlexAttention and what
torch does with masks), shapes (off the beaten path), small-d (beside a plain kernel) and rows.
Each cell appends a line to `--out`; cells that have one for this GPU and the kernels and peers of
today are skipped, so a run that was stopped goes on. A ratio to the best is worth what the peers
are: with `--need fa3 fa4` no run starts without FlashAttention-3 and -4.

Before anything is timed, every side's results at the very shape are compared with float64. Then
ours and the peers take turns, round after round: calls queued on one stream behind a kernel that
waits until all are queued, between two events. A ratio is the median over the rounds of the peer's
time / ours, above 1 if ours is faster.
"""

import gc
import os
import time
from pathlib import Path

from . import RESULTS, cells
from .pages import summaries
from .records import MODULES, Results, absent, finished, line, provenance, reason, say

START = time.perf_counter()
PAGE = ("16-bit", "portable", "features", "science", "decode")
FEWEST_ROUNDS = 5


def arguments(parser):
    """Of the command line."""
    cells.arguments(parser, float("inf"), FEWEST_ROUNDS, 40)
    parser.add_argument("--need", nargs="+", default=(), choices=MODULES,
                        help="peers without which nothing is measured")
    parser.add_argument("--again", action="store_true", help="measure finished cells again")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_speed.jsonl",
                        help="file of the JSON lines")


def main(options):
    """Measure what is not finished; 1 if ours was wrong or failed anywhere."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")     # the GPU is shared
    for name, why in absent().items():
        if name in options.need:
            raise SystemExit(f"--need {name}: {why}")
        say(f"without {name}: {why}")
    results = Results(options.out)
    done = () if options.again else finished(results.lines(), provenance("gpu")["gpu"])
    chosen = [cell for cell in cells.select(options.cells or PAGE, options.only, options.lengths)
              if cell.name not in done]
    if not chosen:
        say("nothing is left to measure")
        return 0
    from .plans import compiling

    kernels = {cell: kernels_of(cell) for cell in chosen}
    units = {unit: None for found in kernels.values() for unit in found}
    say(f"{len(chosen)} cells, {len(units)} kernels, {time.perf_counter() - START:.0f} s")
    with compiling(units, len(os.sched_getaffinity(0))):
        from . import peers  # noqa: F401 - takes seconds, like the kernels
    gc.collect()
    gc.freeze()                 # what is there now stays: a later collection is quick
    say(f"ready after {time.perf_counter() - START:.0f} s")
    lines = measure_all(kernels, options, results)
    say("\n".join(summaries(lines)))
    return int(any(fields["ours"] is None for fields in lines))


def measure_all(kernels, options, results):
    """Lines of the cells, each written as soon as it is there."""
    from .clock import GpuClock, Monitor
    from .peers import versions
    from .plans import sources_of

    clock, lines = GpuClock(options.milliseconds), []
    rounds = max(FEWEST_ROUNDS, options.rounds)
    with Monitor() as monitor:
        for cell, given in with_data([*kernels], 60 * options.minutes):
            fields = measured(cell, given, clock, rounds, monitor) | versions()
            del given           # or the next inputs come while these are there
            names = [name for name, *_ in kernels[cell]]
            fields |= {"kernels": names, "sources": sources_of(names)}
            results.add(**fields)
            lines.append(fields)
            say(f"{time.perf_counter() - START:5.1f} s  {shown(fields)}")
            if fields["missing"] and not usable():
                say("the GPU's context is lost; start again to go on with the next cell")
                break
    return lines


def measured(cell, given, clock, rounds, monitor):
    """The line of a cell, without what is the same for all."""
    from .peers import sides
    from .plans import device_of

    begin = time.perf_counter()
    with device_of(cell.portable):
        able, missing = sides(cell, given)
        checked = time.perf_counter()
        times, paces, failed = in_turn(clock, able, rounds)
    fields = line(cell, times, missing | failed)
    for name, found in {"ours": fields["ours"], **fields["peers"]}.items():
        if found:
            found |= {"errors": able[name].errors, "calls": paces[name].calls,
                      "clock": "host" if able[name].wait else "events"}
    spent = {"checking": round(checked - begin, 2),
             "timing": round(time.perf_counter() - checked, 2)}
    return fields | {"seconds": spent, "machine": monitor.since(checked)}


def in_turn(clock, sides, rounds):
    """ms per call of each round, the sides' paces, and reasons of those that failed, by name.

    Every second round goes through the sides backwards, lest one always follows the same other.
    """
    paces, failed = {}, {}
    for name, side in sides.items():
        try:
            paces[name] = clock.pace(side)
        except Exception as error:      # out of memory, say, once there are many calls
            failed[name] = reason(error)
    times = {name: [] for name in paces}
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            for name in list(paces)[::-1 if i % 2 else 1]:
                times[name].append(clock.round(sides[name], paces[name]))
    finally:
        gc.enable()
    return times, paces, failed


def usable():
    """Whether the GPU still answers this process: after a wrong access it does not."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def kernels_of(cell):
    """Units of a cell, [] if ours cannot do it; arrays in host memory have the same plans."""
    import numpy as np

    from cupy_flash import device
    from cupy_flash.bind import Options, describe
    from cupy_flash.plan import make_plan

    from .data import dtype_of, option_dtype, words
    from .plans import device_of, units_of

    q, k, v = (np.empty(shape, dtype_of(cell.dtype)) for shape in cell.shapes)
    arrays = {name: np.zeros(cell.shape_of(axes), option_dtype(cell, name))
              for name, axes in cell.arrays}
    try:
        problem = describe(q, k, v, Options(**words(cell), **arrays))
        with device_of(cell.portable):
            return units_of(make_plan(cell.direction, problem, device.gpu(0)))
    except Exception as error:
        say(f"{cell.name}: no plan, {reason(error)}")
        return []


def with_data(chosen, seconds):
    """Cells with their inputs until the time is up; cells of one problem share them."""
    import cupy
    import torch

    from .peers import make

    problem, given = None, None
    for i, cell in enumerate(chosen):
        if time.perf_counter() - START > seconds:
            say(f"time is up: {len(chosen) - i} cells are left")
            return
        if cell.problem != problem:
            given = None
            gc.collect()
            torch.cuda.empty_cache()
            cupy.get_default_memory_pool().free_all_blocks()
            try:
                problem, given = cell.problem, make(cell)
            except Exception as error:      # a GPU with less memory; the cell stays unfinished
                say(f"{cell.name}: no inputs, {reason(error)}")
                problem = None
                continue
        yield cell, given


def shown(fields):
    """A line for the terminal."""
    sides = {"ours": fields["ours"], **fields["peers"]}
    rates = "  ".join(f"{name} {side['rate']:.1f} ±{50 * side['spread']:.0f}%"
                      for name, side in sides.items() if side)
    ratio = ""
    if fields["ratio"]:
        low, high = fields["ratio_range"]
        ratio = f"  ratio {fields['ratio']:.3f} ({low:.3f} to {high:.3f}) to {fields['best']}"
    words = "; ".join(f"{name}: {why}" for name, why in fields["missing"].items()
                      if "not installed" not in why)
    return f"{fields['cell']}  {rates}{ratio}{f'  [{words}]' if words else ''}"

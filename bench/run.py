"""Time cupy_flash on a GPU against the other implementations of attention that are installed.

    python bench/run.py                                         # everything
    python bench/run.py 16-bit --lengths 1024 4096 16384 --seconds 150
    python bench/run.py science --only 'backward*d64' --out mine.jsonl
    python bench/run.py --table > docs/performance.md           # from the lines that are there

Families: 16-bit, portable (the same by the kernels that every GPU runs), features, science, decode.
Each cell appends a line to `--out`; cells that have one for this GPU and the kernels and peers of
today are skipped, so a run that was stopped goes on. A ratio to the best is worth what the peers
are: with `--need fa3 fa4` no run starts without FlashAttention-3 and -4.

Before anything is timed, every side's results at the very shape are compared with float64. Then
ours and the peers take turns, round after round: calls queued on one stream behind a kernel that
waits until all are queued, between two events. A ratio is the median over the rounds of the peer's
time / ours, above 1 if ours is faster.
"""

import argparse
import gc
import os
import sys
import time
from pathlib import Path

START = time.perf_counter()
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests"), str(ROOT)]

from gpu_check import Results, provenance, say  # noqa: E402
from gpu_compile import compiling, units_of  # noqa: E402
from speed_cells import FAMILIES, select  # noqa: E402
from speed_device import device_of  # noqa: E402
from speed_lines import MODULES, absent, finished, line, reason, sources_of  # noqa: E402
from speed_table import summaries, table  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="family", type=_family,
                        help=f"any of {', '.join(FAMILIES)}; without one, all")
    parser.add_argument("--only", nargs="+", default=(), metavar="PATTERN",
                        help="cells whose name holds one of the patterns (* matches anything)")
    parser.add_argument("--lengths", nargs="+", type=int, default=(), metavar="N",
                        help="cells with one of these numbers of keys")
    parser.add_argument("--seconds", type=float, default=float("inf"),
                        help="start no cell later than this after the start")
    parser.add_argument("--rounds", type=int, default=5, help="at least 5")
    parser.add_argument("--milliseconds", type=float, default=40, help="of a side's calls a round")
    parser.add_argument("--need", nargs="+", default=(), choices=MODULES,
                        help="peers without which nothing is measured")
    parser.add_argument("--again", action="store_true", help="measure finished cells again")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gpu_speed.jsonl",
                        help="file of the JSON lines")
    parser.add_argument("--table", action="store_true", help="print the tables of --out and stop")
    options = parser.parse_args()
    results = Results(options.out)
    if options.table:
        print(table(results.lines()), end="")
        return 0
    return run(options, results)


def _family(name):
    """The name itself, if it is one of a family."""
    if name not in FAMILIES:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(FAMILIES)}")
    return name


def run(options, results):
    """Measure what is not finished; 1 if ours was wrong or failed anywhere."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")     # the GPU is shared
    for name, why in absent().items():
        if name in options.need:
            raise SystemExit(f"--need {name}: {why}")
        say(f"without {name}: {why}")
    here = provenance()
    done = () if options.again else finished(results.lines(), here["gpu"])
    cells = [cell for cell in select(options.families, options.only, options.lengths)
             if cell.name not in done]
    if not cells:
        say("nothing is left to measure")
        return 0
    kernels = {cell: kernels_of(cell) for cell in cells}
    units = {unit: None for found in kernels.values() for unit in found}
    say(f"{len(cells)} cells, {len(units)} kernels, {time.perf_counter() - START:.0f} s")
    with compiling(units, len(os.sched_getaffinity(0))):
        import peers  # takes seconds, like the kernels
        import speed_clock
    gc.collect()
    gc.freeze()                 # what is there now stays: a later collection is quick
    say(f"ready after {time.perf_counter() - START:.0f} s")
    clock, lines = speed_clock.Clock(options.rounds, options.milliseconds), []
    with speed_clock.Monitor() as monitor:
        for cell, data in with_data(cells, options.seconds):
            fields = measured(cell, data, clock, monitor) | peers.versions()
            del data            # or the next inputs come while these are there
            names = [name for name, *_ in kernels[cell]]
            fields |= {"kernels": names, "sources": sources_of(names)}
            results.add(**fields)
            lines.append(fields)
            say(f"{time.perf_counter() - START:5.1f} s  {shown(fields)}")
            if fields["missing"] and not usable():
                say("the GPU's context is lost; start again to go on with the next cell")
                break
    say("\n".join(summaries(lines)))
    return int(any(fields["ours"] is None for fields in lines))


def measured(cell, data, clock, monitor):
    """The line of a cell, without what is the same for all."""
    import peers

    begin = time.perf_counter()
    with device_of(cell.portable):
        able, missing = peers.sides(cell, data)
        checked = time.perf_counter()
        times, paces, failed = clock.compare(able)
    fields = line(cell, times, missing | failed)
    for name, found in {"ours": fields["ours"], **fields["peers"]}.items():
        if found:
            found |= {"errors": able[name].errors, "calls": paces[name].calls,
                      "clock": "host" if able[name].wait else "events"}
    spent = {"checking": round(checked - begin, 2),
             "timing": round(time.perf_counter() - checked, 2)}
    return fields | {"seconds": spent, "driver_version": monitor.driver,
                     "machine": monitor.since(checked)}


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

    if cell.dtype == "bfloat16":
        import ml_dtypes  # noqa: F401
    q, k, v = (np.empty(shape, np.dtype(cell.dtype)) for shape in cell.shapes)
    window = (cell.window - 1, 0) if cell.window else None
    options = Options(causal=cell.causal, window=window, precision=cell.precision)
    try:
        problem = describe(q, k, v, options)
        with device_of(cell.portable):
            return units_of(make_plan(cell.direction, problem, device.gpu(0)))
    except Exception as error:
        say(f"{cell.name}: no plan, {reason(error)}")
        return []


def with_data(cells, seconds):
    """Cells with their inputs until the time is up; cells of one problem share them."""
    import cupy
    import speed_data
    import torch

    problem, data = None, None
    for i, cell in enumerate(cells):
        if time.perf_counter() - START > seconds:
            say(f"time is up: {len(cells) - i} cells are left")
            return
        if cell.problem != problem:
            data = None
            gc.collect()
            torch.cuda.empty_cache()
            cupy.get_default_memory_pool().free_all_blocks()
            try:
                problem, data = cell.problem, speed_data.make(cell)
            except Exception as error:      # a GPU with less memory; the cell stays unfinished
                say(f"{cell.name}: no inputs, {reason(error)}")
                problem = None
                continue
        yield cell, data


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


if __name__ == "__main__":
    sys.exit(main())

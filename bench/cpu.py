"""Time the CPU path against torch's attention on the same processors.

    python -m bench cpu                                     # what docs/speed.md shows
    python -m bench cpu --torch-python venv/bin/python --only float32 --minutes 5
    python -m bench cpu --cells cpu-options --lengths 1024 --out options.jsonl

Each library lives in a process of its own, torch in that of another Python if it is told, and
sleeps while the other one works. A round is some calls of torch, ours twice, torch again, as many
untimed ones before each. The ratio of a cell is the median over rounds of torch's time / ours.
Results are compared with each other before anything is timed.
"""

import json
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

from . import RESULTS, ROOT, cells
from .pages import cpu as page
from .pair import Pair, Process, rounds
from .records import provenance, say


def arguments(parser):
    """Of the command line."""
    cells.arguments(parser, minutes=20, rounds=9, milliseconds=20)
    parser.add_argument("--torch-python", default=sys.executable, metavar="PYTHON",
                        help="of an environment with torch; without it, this one")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu.jsonl",
                        help="file for the measurements, written anew")


def main(options):
    """Measure all cells, or some; 1 if results differ."""
    end = time.monotonic() + 60 * options.minutes
    chosen = cells.select(options.cells or ("cpu",), options.only, options.lengths)
    pair = Pair({
        "torch": Process("torch", "", "cpu", options.milliseconds, python=options.torch_python),
        "ours": Process("ours", ROOT, "cpu", options.milliseconds)})
    try:
        torch = pair.ask("hello")["torch"]["version"]
        found = rounds(pair, chosen, end, options.rounds)
    finally:
        pair.stop()
    lines = [record(cell, found[cell.name], torch) for cell in chosen if found[cell.name].times]
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if lines:
        say("", page(lines), sep="\n")
    return int(any(one.worst > 1 or "ours:" in (one.fault or "") for one in found.values()))


def record(cell, found, torch):
    """One line of the results file."""
    ratios = found.ratios
    low, high = np.quantile(ratios, (0.25, 0.75))
    rates = {f"gflops_{name}": cell.flops / median(ms) * 1e-6 for name, ms in found.times.items()}
    return {"cell": cell.name, "dtype": cell.dtype, "d": cell.d, "Nq": cell.Nq, "Nk": cell.Nk,
            "causal": cell.causal, "option": cell.option, "direction": cell.direction,
            "heads": cell.Hq, "rounds": len(ratios), "ratio": median(ratios),
            "ratio_low": float(low), "ratio_high": float(high), **rates, "apart": found.worst,
            **provenance("cpu"), "torch": torch}

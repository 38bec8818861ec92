"""Checks of the GPU path that are too long for the suite, and their table.

    python bench/gpu_check.py compile               # the units of `random`, in parallel
    python bench/gpu_check.py random --count 2000   # drawn problems: CPU path and float64
    python bench/gpu_check.py random --plain        # those that kernels of one GPU serve
    python bench/gpu_check.py errors                # errors up to N = 65,536
    python bench/gpu_check.py memory                # peak, offsets beyond 2^31, N = 131,072
    python bench/gpu_check.py times                 # first call, host time of a repeated call
    compute-sanitizer --tool memcheck python bench/gpu_check.py sanitize --kind tf32x3
    python bench/gpu_check.py table FILE > docs/accuracy.md

Each appends JSON lines with their provenance to `bench/results/gpu_<command>.jsonl` (`--out`) and
prints its progress. `random` goes on where an earlier run with the same seed stopped.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests"), str(ROOT)]

COMMANDS = {"compile": "gpu_random", "random": "gpu_random", "errors": "gpu_errors",
            "memory": "gpu_memory", "times": "gpu_times", "sanitize": "gpu_random"}


@cache
def provenance():
    """On what, with what and when: the same for all lines of a run."""
    import cupy
    import numpy

    from cupy_flash.backends.cuda import source

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
    return {
        "date": time.strftime("%Y-%m-%d"), "gpu": properties["name"].decode(),
        "driver": runtime.driverGetVersion(), "cuda": runtime.runtimeGetVersion(),
        "nvrtc": "{}.{}".format(*cupy.cuda.nvrtc.getVersion()), "cupy": cupy.__version__,
        "numpy": numpy.__version__, "commit": commit(), "cuda_src": source.digest()[:16],
    }


def commit():
    """$COMMIT, for a copy of a checkout, else the commit of the checkout."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


class Results:
    """A file of JSON lines that is appended to, and read again to go on."""

    def __init__(self, path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def lines(self):
        """All lines that are there."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def add(self, **fields):
        """Append a line, with its provenance."""
        with self.path.open("a") as file:
            file.write(json.dumps(fields | provenance()) + "\n")


def say(*words):
    """Print at once."""
    print(*words, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=[*COMMANDS, "table", "first-call"])
    parser.add_argument("arguments", nargs="*", help="file of `table`")
    parser.add_argument("--out", help="file for the JSON lines")
    parser.add_argument("--count", type=int, default=2000, help="problems of `random`")
    # Lines of seed 0 are of problems that were drawn in another way.
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true",
                        help="`random` in 16 bits, of usual head dims, without mask and bias")
    parser.add_argument("--kind", default="bfloat16", help="of `sanitize`: float16, bfloat16, "
                        "tf32, tf32x3 or float64")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=500, help="`random` stops after so long")
    options = parser.parse_args()
    if options.command == "table":
        from gpu_table import table
        print(table([line for name in options.arguments for line in Results(name).lines()]))
        return 0
    if options.command == "first-call":
        from gpu_times import first_call
        return first_call(*options.arguments)
    module = __import__(COMMANDS[options.command])
    out = options.out or ROOT / "bench" / "results" / f"gpu_{options.command}.jsonl"
    return getattr(module, options.command)(options, Results(out))


if __name__ == "__main__":
    sys.exit(main())

"""What is written down: JSON lines, each with on what, with what and when it was measured."""

import json
import os
import platform
import re
import subprocess
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import exp, log
from pathlib import Path
from statistics import median

from . import ROOT

# Modules of the peers that do not come with torch.
MODULES = {"fa3": "flash_attn3_jax", "fa4": "flash_attn.cute"}


@cache
def provenance(place):
    """On what ("gpu" or "cpu"), with what and when: the same for all lines of a run."""
    import numpy

    here = {"date": time.strftime("%Y-%m-%d"), "commit": commit(),
            "python": platform.python_version(), "numpy": numpy.__version__}
    return here | (_gpu() if place == "gpu" else _cpu())


def _gpu():
    import cupy

    from cupy_flash.backends.cuda import source

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
    return {"gpu": properties["name"].decode(), "driver": runtime.driverGetVersion(),
            "driver_version": _driver(), "cuda": runtime.runtimeGetVersion(),
            "nvrtc": "{}.{}".format(*cupy.cuda.nvrtc.getVersion()), "cupy": cupy.__version__,
            "cuda_src": source.digest()[:16]}


def _driver():
    """The driver as nvidia-smi calls it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0].strip()
    except FileNotFoundError:
        return None


def _cpu():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {"cpu": names[0] if names else platform.processor(),
            "threads": len(os.sched_getaffinity(0)), "numba": installed("numba")}


def installed(package):
    """Version of a package, None if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit(folder=ROOT):
    """$COMMIT, for a copy of this checkout, else what git says of a folder."""
    if folder == ROOT and "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


class Results:
    """A file of JSON lines that is appended to, and read again to go on."""

    def __init__(self, path, place="gpu"):
        self.path, self._place = Path(path), place

    def lines(self):
        """All lines that are there."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def add(self, **fields):
        """Append a line, with its provenance."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(fields | provenance(self._place)) + "\n")


def geometric_mean(values):
    values = list(values)
    return exp(sum(map(log, values)) / len(values))


def say(*words, **options):
    """Print at once."""
    print(*words, flush=True, **options)


def absent():
    """Reasons by name, of the peers of `MODULES` that are not installed."""
    found = {}
    for name, module in MODULES.items():
        try:
            there = find_spec(module) is not None
        except ModuleNotFoundError:     # of the package around it
            there = False
        if not there:
            found[name] = f"{module} is not installed"
    return found


def side(times, work, unit):
    """Median, rate and spread of the rounds of one side; times in ms."""
    middle = median(times)
    scale = {"TFLOP/s": 1e9, "GFLOP/s": 1e6, "GB/s": 1e6}[unit]
    return {"ms": round(middle, 6), "rate": round(work / middle / scale, 2),
            "spread": round((max(times) - min(times)) / middle, 4)}


def ratios(times):
    """Of each peer and round: peer's time / ours, above 1 if ours is faster.

    Both are times of one round, so that a clock which changes from round to round cancels.
    """
    return {name: [b / a for a, b in zip(times["ours"], taken, strict=True)]
            for name, taken in times.items() if name != "ours"}


def line(cell, times, missing):
    """The fields of a cell that come from its times (name -> ms of each round).

    missing: name -> reason, of those that could not be timed.
    """
    found = {name: side(taken, cell.work, cell.unit) for name, taken in times.items()}
    ours = found.pop("ours", None)
    rounds = ratios(times) if ours else {}
    against = {name: round(median(values), 4) for name, values in rounds.items()}
    best = min(against, key=against.get, default=None)
    return {"family": cell.family, "cell": cell.name, "direction": cell.direction,
            "kind": cell.kind, "mask": cell.mask, "option": cell.option, "length": cell.length,
            "width": cell.width, "B": cell.B, "heads": cell.heads, "unit": cell.unit,
            "rounds": max(map(len, times.values()), default=0), "ours": ours, "peers": found,
            "missing": missing, "ratios": against, "best": best, "ratio": against.get(best),
            "ratio_range": [round(end(rounds[best]), 4) for end in (min, max)] if best else None}


def finished(lines, gpu):
    """Names of the cells that were looked at on this GPU with the kernels and the peers of today.

    A peer that was not installed then and is now leaves its cells unfinished: without it their
    ratio is not to the best.
    """
    from .plans import stale

    still = set(absent().values())
    return {one["cell"] for one in lines if one["gpu"] == gpu and not stale(one)
            and all(why in still for why in one["missing"].values() if "not installed" in why)}


def newest(lines):
    """The last line of each cell and GPU, in the order in which cells first appear."""
    return list({(one["gpu"], one["cell"]): one for one in lines}.values())


def reason(error, notes=()):
    """Why something could not be done, in one short line: warnings if there are, else the error.

    torch says in warnings why a backend refused; where files lie on this machine is nobody's
    business.
    """
    texts = [re.sub(r"\s*\(Triggered internally.*", "", str(note), flags=re.DOTALL)
             for note in notes]
    texts = [text for text in texts if not re.search("not used because|runtime disabled", text)]
    text = " ".join(dict.fromkeys(texts)) or f"{type(error).__name__}: {error}"
    return re.sub(r"/(?:[\w.+-]+/)+", "", " ".join(text.split()))[:240]

"""What is written down: JSON lines, each with on what, with what and when it was measured."""

import json
import os
import platform
import subprocess
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from math import exp, log
from pathlib import Path

from . import ROOT


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


def say(*words):
    """Print at once."""
    print(*words, flush=True)

"""One side of a comparison, in a process of its own: a library, its inputs and its clock.

`bench.pair` starts it with a pipe, asks for methods of `Worker` and gets what they return. The
library is cupy_flash of some folder, or torch on a CPU.
"""

import contextlib
import hashlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection

import numpy as np

from . import data
from .clock import GpuClock, HostClock

MOST_SAMPLES = 1 << 20      # elements of a result that are compared one by one


class Host:
    """Arrays of NumPy, and the processors."""

    def __init__(self, milliseconds):
        self.clock = HostClock(milliseconds)

    def sets(self, cell):
        """As many sets as the clock goes through."""
        return data.make(cell, np)

    def to_host(self, x):
        """A result as NumPy has it."""
        return np.asarray(x)

    def free(self):
        """Give back what nobody uses any more."""


class Gpu(Host):
    """Arrays of CuPy."""

    def __init__(self, milliseconds):
        import cupy

        self._cupy = cupy
        self.clock = GpuClock(milliseconds)

    def sets(self, cell):
        count = data.sets(cell, self._cupy.cuda.Device().attributes["L2CacheSize"])
        return data.make(cell, self._cupy, count)

    def to_host(self, x):
        return self._cupy.asnumpy(x)

    def free(self):
        self._cupy.get_default_memory_pool().free_all_blocks()


class Ours:
    """cupy_flash of a folder, whatever else is installed."""

    def __init__(self, folder):
        sys.path.insert(0, folder)
        import cupy_flash

        self._library = cupy_flash
        self.says = {"folder": os.path.dirname(os.path.dirname(cupy_flash.__file__)),
                     "version": cupy_flash.__version__}

    def call(self, cell, sets):
        """Number of a call -> results, for the sets in turn."""
        return data.ours(self._library, cell, sets)

    def within(self, cell):
        """A context in which the calls of a cell are made."""
        if not cell.portable:
            return contextlib.nullcontext()
        from .plans import device_of

        return device_of(True)


class Torch:
    """torch's scaled_dot_product_attention on a CPU."""

    def __init__(self, _):
        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.says = {"version": torch.__version__}

    def call(self, cell, sets):
        """Number of a call -> results."""
        from .torch_side import sdpa, tensors, torch_call

        return torch_call(cell, [*map(tensors, sets)], sdpa(cell))

    def within(self, cell):
        """Nothing to be done."""
        return contextlib.nullcontext()


LIBRARIES = {"ours": Ours, "torch": Torch}


class Worker:
    """What the other process asks for; one cell is open at a time."""

    def __init__(self, library, place):
        self._library, self._place = library, place
        self._cell = self._side = None
        self._results, self._paces = {}, {}

    def hello(self):
        """What is measured, with what."""
        found = {}
        for package in ("numpy", "numba", "cupy-cuda13x", "cupy-cuda12x", "torch"):
            with contextlib.suppress(PackageNotFoundError):
                found[package.partition("-")[0]] = version(package)
        return {**self._library.says, "packages": found}

    def open(self, cell):
        """Make inputs, and be ready to be timed."""
        self.close()
        with self._library.within(cell):
            call = self._library.call(cell, self._place.sets(cell))
            self._cell, self._side = cell, data.side(call)

    def check(self):
        """Digests of the results of the open cell, by name."""
        with self._library.within(self._cell):
            found = self._side.call(0)
        self._results = {name: np.ascontiguousarray(self._place.to_host(x))
                         for name, x in zip(data.names(self._cell), found, strict=True)}
        return {name: hashlib.blake2b(x.view(np.uint8)).hexdigest()
                for name, x in self._results.items()}

    def samples(self):
        """The results that were checked, or an even sample of their elements, in float64."""
        with np.errstate(invalid="ignore"):     # a NaN that signals
            return {name: x.ravel()[::max(1, x.size // MOST_SAMPLES)].astype(np.float64)
                    for name, x in self._results.items()}

    def measure(self):
        """ms per call of the open cell."""
        self._results = {}
        with self._library.within(self._cell):
            name = self._cell.name
            if name not in self._paces:
                self._paces[name] = self._place.clock.pace(self._side)
            return self._place.clock.round(self._side, self._paces[name])

    def compile(self, cells):
        """Have the kernels of cells on disk."""
        for cell in cells:
            with contextlib.suppress(Exception):    # whoever opens the cell will see it
                self.open(cell)
                self.check()
        self.close()

    def close(self):
        """Forget the open cell."""
        self._cell = self._side = None
        self._results = {}
        self._place.free()


def answer(worker, method, arguments):
    """(True, value) of a method or (False, why not): the other process says what becomes of it."""
    try:
        return True, getattr(worker, method)(*arguments)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"


def serve(worker, pipe):
    """Answer until the other end is closed."""
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        pipe.send(answer(worker, *asked))


def main():
    """The process: number of the pipe, library, its folder, "gpu" or "cpu", ms of a round."""
    number, library, folder, place, milliseconds = sys.argv[1:]
    place = {"gpu": Gpu, "cpu": Host}[place](float(milliseconds))
    serve(Worker(LIBRARIES[library](folder), place), Connection(int(number)))


if __name__ == "__main__":
    main()

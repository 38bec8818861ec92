"""One side of a comparison, in a process of its own: a library, its inputs and its clock.

`bench.pair` starts it with a pipe, asks for methods of `Worker` and gets what they return. The
library is cupy_flash of some folder, or torch on a CPU.
"""

import contextlib
import hashlib
import os
import sys
from multiprocessing.connection import Connection

import numpy as np

from . import data
from .clock import GpuClock, HostClock, Side
from .records import installed

MOST_SAMPLES = 1 << 20      # elements of a result that are compared one by one


class Host:
    """Arrays of NumPy, and the processors."""

    clock = HostClock

    def sets(self, cell):
        """As many sets of inputs as the clock goes through."""
        return data.make(cell, np)

    def to_host(self, x):
        """A result as NumPy has it."""
        return np.asarray(x)

    def wait(self):
        """Until all calls are done."""

    def free(self):
        """Give back what nobody uses any more."""


class Gpu(Host):
    """Arrays of CuPy."""

    clock = GpuClock

    def sets(self, cell):
        import cupy

        cache_bytes = cupy.cuda.Device().attributes["L2CacheSize"]
        return data.make(cell, cupy, data.sets(cell, cache_bytes))

    def to_host(self, x):
        return x.get()

    def wait(self):
        import cupy

        cupy.cuda.Device().synchronize()

    def free(self):
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()


class Ours:
    """cupy_flash of a folder, whatever else is installed."""

    def __init__(self, folder):
        sys.path.insert(0, folder)
        import cupy_flash

        self._library, self.version = cupy_flash, cupy_flash.__version__
        self.folder = os.path.dirname(os.path.dirname(cupy_flash.__file__))

    def call(self, cell, sets):
        """Number of a call -> results, for the sets in turn."""
        return data.ours(self._library, cell, sets)


class Torch:
    """torch's scaled_dot_product_attention on a CPU."""

    def __init__(self, folder):
        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.version, self.folder = str(torch.__version__), folder

    def call(self, cell, sets):
        """Number of a call -> results."""
        from .torch_side import sdpa, tensors, torch_call

        return torch_call(cell, [*map(tensors, sets)], sdpa(cell))


class Worker:
    """What the other process asks for; one cell is open at a time."""

    def __init__(self, library, place, milliseconds):
        self._library, self._place = library, place
        self._clock, self._paces = place.clock(milliseconds), {}
        self.close()

    def hello(self):
        """What is measured, with what."""
        packages = ("numpy", "numba", "cupy-cuda13x", "cupy-cuda12x", "torch")
        found = {name: installed(name) for name in packages}
        return {"version": self._library.version, "folder": self._library.folder,
                "packages": {name: number for name, number in found.items() if number}}

    def open(self, cell):
        """Make inputs, and be ready to be timed: memory is taken, and nothing runs any more."""
        self.close()
        with within(cell):
            self._side = Side(self._library.call(cell, self._place.sets(cell)))
            self._side.call(0)
        self._place.wait()
        self._cell = cell

    def check(self):
        """Digests of the results of the open cell, by name."""
        with within(self._cell):
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
        with within(self._cell):
            if self._cell not in self._paces:
                self._paces[self._cell] = self._clock.pace(self._side)
            return self._clock.round(self._side, self._paces[self._cell])

    def compile(self, cells):
        """Have the kernels of cells on disk."""
        for cell in cells:
            with contextlib.suppress(Exception):    # whoever opens the cell will see it
                self.open(cell)
                self.check()

    def close(self):
        """Forget the open cell."""
        self._cell, self._side, self._results = None, None, {}
        self._place.free()


def within(cell):
    """A context for the calls of a cell."""
    if not cell.portable:
        return contextlib.nullcontext()
    from .plans import device_of

    return device_of(True)


def answer(worker, method, arguments):
    """(True, value) of a method or (False, why not): the other process says what becomes of it."""
    try:
        return True, getattr(worker, method)(*arguments)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"


def main(number, library, folder, place, milliseconds):
    """Answer what comes through a pipe until its other end is closed."""
    library, place = {"ours": Ours, "torch": Torch}[library], {"cpu": Host, "gpu": Gpu}[place]
    worker, pipe = Worker(library(folder), place(), float(milliseconds)), Connection(int(number))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            pipe.send(answer(worker, *pipe.recv()))


if __name__ == "__main__":
    main(*sys.argv[1:])

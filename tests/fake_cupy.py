"""CuPy arrays over host memory: all that comes before a launch works on them, without a GPU."""

from contextlib import contextmanager

import cupy
import numpy as np
from cupy.cuda import MemoryPointer, UnownedMemory

from cupy_flash import device
from cupy_flash.backends.cuda import compile as compiled
from cupy_flash.backends.cuda import launch
from cupy_flash.backends.cuda.structs import structs
from cupy_flash.backends.cuda.unit import kernel_named
from cupy_flash.device import GpuDevice

H200 = GpuDevice(0, "a pretended H200", 90, 132, 227 * 1024)


def fake(x, device=0):
    """A CuPy array over the memory of a NumPy array, with its shape and strides."""
    x = np.asarray(x)
    low, high = np.lib.array_utils.byte_bounds(x)
    memory = UnownedMemory(low, max(high - low, 1), x, device)
    start = x.__array_interface__["data"][0]
    return cupy.ndarray(x.shape, x.dtype, memptr=MemoryPointer(memory, start - low),
                        strides=x.strides)


def fake_alloc(nbytes):
    """`cupy.cuda.alloc` in host memory."""
    return fake(np.empty(nbytes, np.uint8)).data


class Launches(list):
    """Records of launches: (name, grid, block, struct, bytes of shared memory)."""

    @property
    def names(self):
        """The entries in the order of their launches."""
        return [record[0] for record in self]


@contextmanager
def pretended_gpu(monkeypatch, gpu=H200):
    """Within the context CuPy arrays go to a GPU that records what it is asked to do."""
    records = Launches()

    def function(number, name, text, smem_bytes, target):
        def run(grid, block, arguments, shared):
            (argument,) = arguments
            dtype = structs()[kernel_named(name).params]
            words = np.array(argument.words)[:dtype.itemsize // 8]      # what the kernel takes
            records.append((name, grid, block, words.view(dtype)[0], shared))
        return run

    monkeypatch.setattr(cupy.cuda, "alloc", fake_alloc)
    monkeypatch.setattr(launch, "get_device_id", lambda: 0)
    monkeypatch.setattr(device, "gpu", lambda number: gpu)
    monkeypatch.setattr(compiled, "_functions", {})
    monkeypatch.setattr(compiled, "_function", function)
    launch.prepared.clear()
    yield records
    launch.prepared.clear()

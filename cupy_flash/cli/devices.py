"""The devices on which a command can run, all behind the same few methods."""

import time
import tracemalloc

import numpy as np

import cupy_flash as cf
from cupy_flash.backends.cuda import probe
from cupy_flash.cli.progress import Progress


class CpuDevice:
    """The CPU as the command line uses it; `probe.CudaDevice` is its counterpart.

    Attributes
    ----------
    xp : module
        The array module, NumPy.
    name : str
        What the device is called.
    """

    xp = np
    name = "the CPU"

    def asarray(self, x):
        """Return the array as it is."""
        return np.asarray(x)

    def asnumpy(self, x):
        """Return the array as it is."""
        return np.asarray(x)

    def synchronize(self):
        """Return at once: nothing runs behind the caller's back."""

    def peak_bytes(self, function):
        """Return how much memory `function()` had in use at its peak, its result included.

        NumPy reports its arrays to `tracemalloc`, so this counts them to the byte.
        """
        tracemalloc.start()
        try:
            function()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


def cuda_devices():
    """Return the CUDA devices that this version computes on, and why there are no others.

    Returns
    -------
    devices : list of probe.CudaDevice
        Those that answered a small call of `cupy_flash.attention`.
    reason : str or None
        Why a device, or CUDA as a whole, is not used.
    """
    missing = probe.cuda().missing
    if missing is not None:
        return [], missing
    usable, reason, found = [], None, probe.cuda_devices()
    with Progress(len(found), "trying the GPUs") as progress:
        for device in found:
            x = device.asarray(np.zeros((1, 1), np.float32))
            try:
                cf.attention(x, x, x)
            except (NotImplementedError, RuntimeError) as error:
                reason = f"{device.name}: {error}"
            else:
                usable.append(device)
            progress.step()
    return usable, reason


def seconds(device, function, least=5, budget=0.5):
    """Return the shortest of several times of `function()`, after one call that does not count.

    Calls are repeated `least` times, and on until `budget` seconds are spent: on a busy machine the
    shortest of many is fair to those who suffer most from being interrupted.
    """
    function()
    times = []
    while len(times) < least or sum(times) < budget:
        device.synchronize()
        start = time.perf_counter()
        function()
        device.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)

"""What CuPy finds on this machine. Never raises: a machine without a GPU is an ordinary one."""

import os
from dataclasses import dataclass

INSTALL_HINT = (
    'pip install "cupy-cuda13x[ctk]" (or cupy-cuda12x[ctk], by the CUDA version that nvidia-smi '
    "prints)"
)


@dataclass(frozen=True)
class Cuda:
    """The state of CUDA as seen through CuPy.

    Attributes
    ----------
    missing : str or None
        Why no device can be used, in words; None when there is one.
    versions : dict of str to str
        Versions of CuPy, the CUDA runtime, the driver and NVRTC, as far as they can be read.
    devices : tuple of str
        One line for each device: its number, name, compute capability and memory.
    cache : str or None
        The folder of CuPy's kernel cache.
    """

    missing: str | None
    versions: dict[str, str]
    devices: tuple[str, ...] = ()
    cache: str | None = None


def cuda() -> Cuda:
    """Look for CuPy and its devices."""
    try:
        import cupy
    except ImportError as error:
        if error.name == "cupy":
            return Cuda("CuPy is not installed", {})
        return Cuda(f"CuPy cannot be imported: {error}", {})
    except OSError as error:    # it makes the folder of its kernel cache when it is imported
        return Cuda(f"CuPy cannot be imported, as {_cache_folder()} cannot be made: "
                    f"{error.strerror}", {})
    versions = {"CuPy": cupy.__version__}
    runtime = cupy.cuda.runtime
    _note(versions, "CUDA runtime", lambda: _dotted(runtime.runtimeGetVersion()))
    _note(versions, "CUDA driver", lambda: _dotted(runtime.driverGetVersion()))
    _note(versions, "NVRTC", lambda: "{}.{}".format(*cupy.cuda.nvrtc.getVersion()))
    if not cupy.is_available():
        return Cuda("CuPy is installed, but finds no CUDA device", versions)
    devices = tuple(_device_line(cupy, i) for i in range(runtime.getDeviceCount()))
    return Cuda(None, versions, devices, _cache_folder())


class CudaDevice:
    """One CUDA device as the command line uses it: arrays in, arrays out, clock and memory.

    Attributes
    ----------
    xp : module
        The array module, CuPy.
    name : str
        What the device is called.
    number : int
        CUDA's number of it.
    """

    def __init__(self, number):
        import cupy

        self.xp, self.number = cupy, number
        self._device = cupy.cuda.Device(number)
        self.name = _device_line(cupy, number)

    def asarray(self, x):
        """Copy a NumPy array to the device."""
        with self._device:
            return self.xp.asarray(x)

    def asnumpy(self, x):
        """Copy an array of the device back."""
        return self.xp.asnumpy(x)

    def synchronize(self):
        """Wait until the device has done all that it was asked to do."""
        self._device.synchronize()

    def peak_bytes(self, function):
        """Return how much memory `function()` asked for, its result included."""
        pool = self.xp.cuda.MemoryPool()
        with self._device, self.xp.cuda.using_allocator(pool.malloc):
            function()
            self.synchronize()
            return pool.total_bytes()


def cuda_devices():
    """Return a `CudaDevice` for each device there is."""
    return [CudaDevice(number) for number in range(len(cuda().devices))]


def _note(versions, name, read):
    """Add a version if it can be read; without a driver the bindings raise errors of many kinds."""
    try:
        versions[name] = read()
    except Exception as error:
        versions[name] = f"not available ({type(error).__name__})"


def _dotted(version):
    """13000 -> '13.0'; the driver's version is 0 where there is none."""
    return f"{version // 1000}.{version % 1000 // 10}" if version else "none"


def _device_line(cupy, number):
    """Number, name, compute capability and memory of a device."""
    properties = cupy.cuda.runtime.getDeviceProperties(number)
    name = properties["name"].decode()
    gib = properties["totalGlobalMem"] / 2**30
    return f"{number}: {name}, sm_{properties['major']}{properties['minor']}, {gib:.0f} GiB"


def _cache_folder():
    """Where CuPy keeps compiled kernels: in a folder `~` of the current one if there is no home."""
    return os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache"))

"""Where a problem runs: the facts about a device that a plan depends on, and the way there."""

from dataclasses import dataclass
from functools import cache

from . import processors

OLDEST_GPU = 80     # the first tensor cores with bfloat16, TF32 and float64


@dataclass(frozen=True)
class Device:
    """The CPU as the planner sees it.

    Attributes
    ----------
    kind : str
        ``"cpu"``.
    threads : int
        Threads that share the work: ``$NUMBA_NUM_THREADS`` if set, otherwise the processors that
        this process may use; see `processors.threads`.
    """

    kind: str
    threads: int

    def __str__(self):
        return f"{self.kind}, {self.threads} thread{'s' if self.threads != 1 else ''}"


# One object a device, compared and hashed as such: it is part of a key at every call.
@dataclass(frozen=True, eq=False)
class GpuDevice:
    """A GPU as the planner sees it.

    Attributes
    ----------
    number : int
        CUDA's number of the device in this process.
    name : str
    arch : int
        Compute capability, 90 for 9.0.
    sms : int
        Multiprocessors.
    smem : int
        Bytes of shared memory that a block can have.
    kind : str
        ``"cuda"``.
    wgmma : bool
        Whether it has the instructions of sm_90a and NVRTC can be told to use them.
    """

    number: int
    name: str
    arch: int
    sms: int
    smem: int
    kind: str = "cuda"
    wgmma: bool = False

    def __str__(self):
        return f"{self.kind} {self.number}, {self.name}, sm_{self.arch}, {self.sms} multiprocessors"


@cache
def cpu():
    """The CPU of this process."""
    return Device("cpu", processors.threads())


@cache
def gpu(number):
    """The GPU with CUDA's `number`; NotImplementedError if it is too old."""
    from cupy.cuda import nvrtc, runtime

    properties = runtime.getDeviceProperties(number)
    arch = 10 * properties["major"] + properties["minor"]
    name = properties["name"].decode()
    if arch < OLDEST_GPU:
        raise NotImplementedError(
            f"`q` is on GPU {number}, {name}, with compute capability {arch / 10:.1f}: the kernels "
            f"need {OLDEST_GPU / 10:.1f} or newer; pass NumPy arrays (cupy.asnumpy(x)) to compute "
            "on the CPU")
    # CuPy asks for sm_90: an option of ours for sm_90a is a second one, which older NVRTC rejects.
    wgmma = arch == 90 and nvrtc.getVersion() >= (12, 9)
    return GpuDevice(number, name, arch, properties["multiProcessorCount"],
                     properties["sharedMemPerBlockOptin"], wgmma=wgmma)


def of(number):
    """The GPU with this number, or the CPU for None."""
    return cpu() if number is None else gpu(number)


def adopt(name, x):
    """The CuPy array over the memory of a GPU array `x` of another library."""
    try:
        import cupy
    except ImportError:
        raise _no_cupy(name, "is not installed") from None
    if not cupy.is_available():
        raise _no_cupy(name, "finds no CUDA device")
    if hasattr(x, "__dlpack__"):
        try:
            return cupy.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TypeError(f"`{name}` cannot be taken in through DLPack: {error}") from error
    kind = x.__cuda_array_interface__["typestr"]
    if kind[1:] == "V2":
        raise TypeError(
            f"`{name}` comes through __cuda_array_interface__ with elements '{kind}': that "
            "interface has no word for bfloat16, so what these two bytes mean is unknown; pass a "
            "CuPy array, or an object with DLPack")
    return cupy.asarray(x)


def _no_cupy(name, reason):
    return NotImplementedError(
        f"`{name}` is on a GPU, and CuPy, which computes there, {reason}: "
        'pip install "cupy-flash[cuda13x]" (or [cuda12x]), or pass NumPy arrays')

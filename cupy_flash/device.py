"""Where a problem runs: the facts about a device that a plan depends on, and the way there."""

import ctypes
import os
from dataclasses import dataclass
from functools import cache

from . import processors
from .dlpack import capsule_pointer, is_capsule

OLDEST_GPU = 80     # the first tensor cores with bfloat16, TF32 and float64

_VERSIONED = b"dltensor_versioned"


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
    vector_bits : int
        Bits of a vector register; see `processors.vector_bits`.
    micro_kernel : str
        The micro-kernel that ``$CUPY_FLASH_MICRO_KERNEL`` asks for; ``""``: the planner chooses.
    """

    kind: str
    threads: int
    vector_bits: int = 256
    micro_kernel: str = ""

    def __str__(self):
        asked = f", CUPY_FLASH_MICRO_KERNEL={self.micro_kernel}" if self.micro_kernel else ""
        return (f"{self.kind}, {self.threads} thread{'s' if self.threads != 1 else ''}, "
                f"{self.vector_bits}-bit vectors{asked}")


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
    targets : tuple of str
        Architectures whose special instructions it has and NVRTC can be told to use: ``("90a",)``.
    family : str
        The family of kernels that ``$CUPY_FLASH_KERNELS`` asks for; ``""``: the planner chooses.
    """

    number: int
    name: str
    arch: int
    sms: int
    smem: int
    kind: str = "cuda"
    targets: tuple[str, ...] = ()
    family: str = ""

    def __str__(self):
        text = f"{self.kind} {self.number}, {self.name}, sm_{self.arch}, {self.sms} multiprocessors"
        return text + (f", CUPY_FLASH_KERNELS={self.family}" if self.family else "")


@cache
def cpu():
    """The CPU of this process."""
    return Device("cpu", processors.threads(), processors.vector_bits(),
                  os.environ.get("CUPY_FLASH_MICRO_KERNEL", ""))


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
    targets = (f"{arch}a",) if arch >= 90 and nvrtc.getVersion() >= (12, 9) else ()
    return GpuDevice(number, name, arch, properties["multiProcessorCount"],
                     properties["sharedMemPerBlockOptin"], targets=targets,
                     family=os.environ.get("CUPY_FLASH_KERNELS", ""))


def of(number):
    """The GPU with this number, or the CPU for None."""
    return cpu() if number is None else gpu(number)


def adopt(name, x):
    """The CuPy array over the memory of a GPU array `x` of another library."""
    try:
        import cupy
    except ImportError:
        raise _no_cupy(name, "is not installed") from None
    except OSError as error:
        raise _no_cupy(name, f"cannot be imported ({error})") from error
    if not cupy.is_available():
        raise _no_cupy(name, "finds no CUDA device")
    if hasattr(x, "__dlpack__"):
        reader = _FlagReader(x)
        try:
            array = cupy.from_dlpack(reader)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TypeError(f"`{name}` cannot be taken in through DLPack: {error}") from error
        return _read_only_view(array) if reader.read_only or _says_read_only(x) else array
    kind = x.__cuda_array_interface__["typestr"]
    if kind[1:] == "V2":
        raise TypeError(
            f"`{name}` comes through __cuda_array_interface__ with elements '{kind}': that "
            "interface has no word for bfloat16, so what these two bytes mean is unknown; pass a "
            "CuPy array, or an object with DLPack")
    return cupy.asarray(x)      # which keeps x, and so what x says about its memory


class _FlagReader:
    """An object with DLPack, and whether it says that its memory is not to be written to.

    CuPy reads over that flag, which lies in the versioned struct behind version, context and
    deleter, 8 bytes each.
    """

    def __init__(self, x):
        self._x, self.read_only = x, False

    def __dlpack_device__(self):
        return self._x.__dlpack_device__()

    def __dlpack__(self, **options):
        capsule = self._x.__dlpack__(**options)
        if is_capsule(capsule, _VERSIONED):
            flags = ctypes.c_uint64.from_address(capsule_pointer(capsule, _VERSIONED) + 24)
            self.read_only = bool(flags.value & 1)
        return capsule


def _says_read_only(x):
    """Whether an object with DLPack has another interface as well, which says so there."""
    try:
        return bool(x.__cuda_array_interface__["data"][1])
    except Exception:       # some objects have it and raise what they like
        return False


class _ReadOnly:
    """The owner of memory that is not to be written to, as `arrays.check_buffer` asks for it."""

    def __init__(self, array):
        self.__cuda_array_interface__ = {
            "version": 3, "shape": array.shape, "typestr": array.dtype.str,
            "strides": array.strides, "data": (array.data.ptr, True)}
        self.array = array


def _read_only_view(x):
    """The CuPy array `x` again, with an owner that says that it is read-only."""
    import cupy
    from cupy.cuda import MemoryPointer, UnownedMemory

    start = x.data.mem.ptr
    memory = UnownedMemory(start, x.data.mem.size, _ReadOnly(x), x.data.device_id)
    return cupy.ndarray(x.shape, x.dtype, MemoryPointer(memory, x.data.ptr - start), x.strides)


def _no_cupy(name, reason):
    return NotImplementedError(
        f"`{name}` is on a GPU, and CuPy, which computes there, {reason}: "
        'pip install "cupy-cuda13x[ctk]" (or cupy-cuda12x[ctk]), or pass NumPy arrays')

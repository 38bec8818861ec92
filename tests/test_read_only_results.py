"""Memory that says of itself that it is not to be written to, given as a buffer for results."""

import ctypes

import cupy
import numpy as np
import pytest
from cupy.cuda import MemoryPointer, UnownedMemory
from fake_cupy import fake

import cupy_flash as cf

X = np.zeros((5, 16), np.float32)
LSE = np.zeros(5, np.float32)
READ_ONLY = 1           # DLPack: DLPACK_FLAG_BITMASK_READ_ONLY


class Interface:
    """A GPU array with `__cuda_array_interface__`."""

    def __init__(self, x, read_only):
        self.x = x
        self.__cuda_array_interface__ = {"shape": x.shape, "typestr": "<f4", "version": 3,
                                         "data": (x.ctypes.data, read_only)}


class Managed(ctypes.Structure):
    """DLManagedTensorVersioned of DLPack 1.0, with what its DLTensor has in front."""

    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32),
                ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
                ("flags", ctypes.c_uint64), ("data", ctypes.c_void_p), ("rest", ctypes.c_byte * 40))


class Dlpack:
    """A GPU array with DLPack."""

    def __init__(self, x, flags, name=b"dltensor_versioned"):
        self.x, self.name = x, name
        self.struct = Managed(1, 0, None, None, flags, x.ctypes.data)

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **_):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
        return new(ctypes.addressof(self.struct), self.name, None)


class Both(Interface, Dlpack):
    """With an unversioned DLPack, which cannot say it, and the other interface, which does."""

    def __init__(self, x, read_only):
        Interface.__init__(self, x, read_only)
        Dlpack.__init__(self, x, 0, b"dltensor")


def asarray(foreign):
    """`cupy.asarray` without a GPU: the array keeps the object that it was made from."""
    address, _ = foreign.__cuda_array_interface__["data"]
    memory = UnownedMemory(address, foreign.x.nbytes, foreign, 0)
    return cupy.ndarray(foreign.shape, np.float32, MemoryPointer(memory, 0))


def from_dlpack(producer):
    """`cupy.from_dlpack` without a GPU: it reads over the flags."""
    producer.__dlpack__(stream=1, max_version=(1, 0))
    return fake(X)


@pytest.fixture
def takes(launches, monkeypatch):
    """A pretended GPU that takes in arrays of other libraries."""
    monkeypatch.setattr(cupy, "is_available", lambda: True)
    monkeypatch.setattr(cupy, "asarray", asarray)
    monkeypatch.setattr(cupy, "from_dlpack", from_dlpack)
    monkeypatch.setattr(Interface, "shape", X.shape, raising=False)
    return launches


def call(name, buffer):
    """A call with a buffer of its own for the result `name`."""
    x = fake(X.copy())
    if name == "out":
        return cf.attention(x, x, x, out=buffer)
    return cf.attention_backward(x, x, x, x, x, fake(LSE), **{name: buffer})


MAKERS = {
    "interface": lambda read_only: Interface(X.copy(), read_only),
    "cupy": lambda read_only: asarray(Interface(X.copy(), read_only)),
    "dlpack": lambda read_only: Dlpack(X, READ_ONLY * read_only),
    "both": lambda read_only: Both(X, read_only),
}


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_read_only_gpu_memory_is_no_buffer(takes, maker, name):
    with pytest.raises(ValueError, match=f"^`{name}` is read-only"):
        call(name, maker(True))
    assert takes == []
    buffer = maker(False)
    result = call(name, buffer)
    assert takes and (result if name == "out" else getattr(result, name)) is buffer


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_read_only_gpu_memory_is_a_fine_input(takes, maker):
    frozen = maker(True)
    cf.attention(frozen, frozen, frozen)
    x = fake(X)
    cf.attention_backward(x, x, x, x, frozen, fake(LSE))
    assert takes


def test_bits_that_say_something_else_are_no_matter(takes):
    call("out", Dlpack(X, 0b110))


class Host:
    """A CPU array of another library, by way of NumPy's own DLPack."""

    def __init__(self, x):
        self.x = x

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="DLPack without flags")
def test_read_only_cpu_memory_through_dlpack_is_no_buffer():
    frozen = np.zeros_like(X)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match=r"^`out` is read-only"):
        cf.attention(X, X, X, out=Host(frozen))
    assert np.all(cf.attention(Host(frozen), X, X, out=Host(np.ones_like(X))).x == 0)

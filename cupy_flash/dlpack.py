"""bfloat16 in CPU memory through DLPack, which NumPy's own reader refuses: taken in as bits.

The structures are those of `dlpack.h`, version 1 and the one before it.
"""

import ctypes

import numpy as np

_BFLOAT, _READ_ONLY = 4, 1      # kDLBfloat, DLPACK_FLAG_BITMASK_READ_ONLY
_VERSION = 1                    # a later major version may have another layout


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64))


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor))


# Prototypes of our own: the attributes of `ctypes.pythonapi` belong to everybody.
capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi))
is_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi))


class _Bits:
    """The elements of a capsule as NumPy takes them in.

    The capsule keeps its name, and with it the destructor that gives the memory back: arrays hold
    this object, and this object holds the capsule.
    """

    def __init__(self, capsule, tensor, read_only):
        self.capsule = capsule
        shape = tuple(tensor.shape[: tensor.ndim])
        strides = tuple(2 * s for s in tensor.strides[: tensor.ndim]) if tensor.strides else None
        self.__array_interface__ = {
            "version": 3, "shape": shape, "strides": strides, "typestr": "=u2",
            "data": ((tensor.data or 0) + tensor.byte_offset, read_only)}


def bfloat16_bits(x):
    """The bfloat16 elements of `x` in CPU memory as an array of uint16; nothing is copied.

    What the exporter says of no version, as of read-only memory, counts as read-only, as in NumPy.
    BufferError for other elements; what the exporter raises is passed on.
    """
    try:
        capsule = x.__dlpack__(max_version=(_VERSION, 0))
    except TypeError:
        capsule = x.__dlpack__()
    if is_capsule(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(capsule_pointer(capsule, b"dltensor_versioned"))
        if managed.major != _VERSION:
            raise BufferError(f"its DLPack has version {managed.major}, expected {_VERSION}")
        tensor, read_only = managed.tensor, bool(managed.flags & _READ_ONLY)
    else:
        tensor, read_only = _Tensor.from_address(capsule_pointer(capsule, b"dltensor")), True
    if (tensor.code, tensor.bits, tensor.lanes) != (_BFLOAT, 16, 1):
        raise BufferError(f"elements of {tensor.bits} bits and DLPack's kind {tensor.code}")
    return np.asarray(_Bits(capsule, tensor, read_only))

"""User arrays: which library they belong to, taking them in without a copy, checking buffers."""

import numpy as np

_CPU_DEVICES = (1, 3)       # DLPack: kDLCPU and kDLCUDAHost (pinned host memory)
_OVERLAP_EFFORT = 10_000    # bound on the exact search; where it gives up, arrays count as overlapping


def family(x):
    """``"cpu"``, ``"gpu"`` or None for an object that is no array."""
    if isinstance(x, np.ndarray):
        return None if isinstance(x, (np.ma.MaskedArray, np.matrix)) else "cpu"
    if hasattr(x, "__dlpack_device__"):
        return "cpu" if int(x.__dlpack_device__()[0]) in _CPU_DEVICES else "gpu"
    return "gpu" if hasattr(x, "__cuda_array_interface__") else None


def check_families(named):
    """Every object an array, all of one family, and of one that this version computes on."""
    families = {}
    for name, x in named.items():
        kind = family(x)
        if kind is None:
            raise TypeError(f"`{name}` is a {type(x).__module__}.{type(x).__qualname__}, expected a "
                            "NumPy array (or an object with DLPack)")
        families.setdefault(kind, name)
    if len(families) > 1:
        raise TypeError(f"`{families['gpu']}` is on a GPU, but `{families['cpu']}` is in CPU memory: "
                        "all arrays must be on the same side")
    if "gpu" in families:
        raise NotImplementedError(f"`{families['gpu']}` is on a GPU: this version computes on the "
                                  "CPU only; pass NumPy arrays (cupy.asnumpy(x))")


def take(name, x):
    """The NumPy array over the memory of `x`."""
    if isinstance(x, np.ndarray):
        return x
    try:
        return np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        # JAX hands out bfloat16 by __array__ only, and so without a copy.
        if hasattr(x, "__array__"):
            return np.asarray(x)
        raise TypeError(f"`{name}` cannot be taken in through DLPack: {error}") from error


def unit_stride(x):
    """Whether kernels can read `x` as it is: last axis contiguous, elements aligned."""
    return x.flags.aligned and (x.shape[-1] <= 1 or x.strides[-1] == x.itemsize or x.size == 0)


def check_buffer(name, x, shape, dtype, others):
    """A result buffer: right shape and type, writable, every element once, apart from `others`."""
    if x.dtype != dtype or not x.dtype.isnative:
        raise TypeError(f"`{name}` has dtype {x.dtype}, expected {dtype}: results are not cast")
    if x.shape != shape:
        raise ValueError(f"`{name}` has shape {x.shape}, expected {shape}")
    if not (x.flags.writeable and x.flags.aligned):
        raise ValueError(f"`{name}` is read-only or not aligned, expected a writable, aligned array")
    if _overlaps_itself(x):
        raise ValueError(f"`{name}` has strides {x.strides} for shape {x.shape}: elements overlap, "
                         "expected each to have memory of its own")
    for other_name, other in others.items():
        if other is not None and _overlap(x, other):
            raise ValueError(f"`{name}` overlaps `{other_name}` in memory, expected a buffer of its own")


def _overlap(x, other):
    try:
        return np.shares_memory(x, other, max_work=_OVERLAP_EFFORT)
    except np.exceptions.TooHardError:
        return True


def _overlaps_itself(x):
    reach = x.itemsize
    for stride, extent in sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True) if n > 1):
        if stride < reach:
            return x.size > 0
        reach = stride * (extent - 1) + reach
    return False


def empty_rows_like(x, columns, dtype):
    """An uninitialised array `x.shape[:-1] + (columns,)` with rows contiguous, axes ordered as x's.

    The axes before the last keep the order that they have in memory, so that the result for a
    transposed view is the same view of a contiguous array.
    """
    axes = range(x.ndim - 1)
    order = sorted(axes, key=lambda axis: (x.strides[axis] != 0, -abs(x.strides[axis])))
    dense = np.empty([*(x.shape[axis] for axis in order), columns], dtype)
    return dense.transpose([*np.argsort(order), x.ndim - 1])

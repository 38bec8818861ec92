"""Objects of a call as NumPy or CuPy arrays, without a copy; of all else, what to pass instead."""

from functools import cache
from inspect import getattr_static

import numpy as np

from . import device
from .options import ARRAYS
from .words import kind_of

_CPU_DEVICES = (1, 3)       # DLPack: kDLCPU and kDLCUDAHost (pinned host memory)
_CUDA_DEVICES = (2, 13)     # kDLCUDA and kDLCUDAManaged
# A subclass with one of these of its own gives elements a meaning beyond their numbers: units,
# masks, another product. np.memmap and np.recarray have none.
_MEANING = ("__array_ufunc__", "__array_function__", "__add__", "__mul__", "__matmul__")
# The same of PyTorch; a subclass with a dispatch of its own need not even have memory.
_TENSOR_MEANING = ("__torch_dispatch__", "__torch_function__")
# Why a tensor may refuse to be exported, and what to pass.
_STATES = (
    ("requires_grad", "requires grad, and no gradient would reach it", "`{}.detach()`"),
    ("is_sparse", "is sparse", "`{}.to_dense()`"),
    ("is_sparse_csr", "is sparse", "`{}.to_dense()`"),
    ("is_quantized", "is quantized", "`{}.dequantize()`"),
    ("is_nested", "is nested", "`{}.to_padded_tensor(0.0)`, and the lengths as `q_lens=` and "
     "`kv_lens=`"),
    ("is_meta", "is on the meta device", "one with memory, to `explain` `np.empty(shape, dtype)`"),
    ("is_deleted", "has been deleted, or donated to a compiled function", "one that lives"),
)


@cache
def library(kind):
    """``"numpy"`` or ``"cupy"`` for a class of arrays that is used as it is, else None."""
    base = _base(kind)
    if base is None or any(getattr(kind, name) is not getattr(base, name) for name in _MEANING):
        return None
    return "numpy" if base is np.ndarray else "cupy"


def _base(kind):
    """NumPy's or CuPy's class of arrays, if `kind` is derived from one of them.

    CuPy's is known by its name, so that CuPy need not be imported.
    """
    if issubclass(kind, np.ndarray):
        return np.ndarray
    return next((base for base in kind.__mro__ if base.__name__ == "ndarray"
                 and base.__module__.partition(".")[0] == "cupy"), None)


def take_all(named):
    """All objects as arrays by name, either of NumPy or of CuPy.

    TypeError if one is no array, or if some are in CPU memory and some on a GPU.
    """
    kinds = [*map(type, named.values())]
    if kinds.count(kinds[0]) == len(kinds) and library(kinds[0]) is not None:
        return named
    sides = {}
    for name, x in named.items():
        sides.setdefault(_side(name, x), name)
    if len(sides) > 1:
        gpu, cpu = sides["gpu"], sides["cpu"]
        raise TypeError(f"`{gpu}` is on a GPU, but `{cpu}` is in CPU memory, expected all arrays "
                        f"on the same side: pass `cupy.asarray({cpu})` or `cupy.asnumpy({gpu})`")
    if "cpu" in sides:
        return {name: take(name, x) for name, x in named.items()}
    return {name: x if library(type(x)) else _adopt(name, x) for name, x in named.items()}


def is_on_gpu(x):
    """Whether a value is an array on a GPU."""
    if _base(type(x)) is not None:
        return not isinstance(x, np.ndarray)
    if hasattr(type(x), "__dlpack_device__"):
        try:
            return int(x.__dlpack_device__()[0]) not in _CPU_DEVICES
        except Exception:           # of another library, and so of any class
            return False
    return hasattr(x, "__cuda_array_interface__")


def is_traced(x):
    """Whether a value is what JAX traces a function with, which has no elements."""
    return any(base.__name__ == "Tracer" for base in type(x).__mro__)


def _side(name, x):
    """``"cpu"`` or ``"gpu"``; TypeError for an object that cannot be taken in.

    The class is asked for DLPack, not the object: wrappers of arrays that hand every attribute on
    would lose what they wrap it for.
    """
    known = library(type(x))
    if known is not None:
        return "cpu" if known == "numpy" else "gpu"
    if _speaks_dlpack(type(x)):
        return _dlpack_side(name, x)
    if not _means_more(type(x)) and hasattr(x, "__cuda_array_interface__"):
        return "gpu"
    raise TypeError(f"{no_array(name, x)}, expected a NumPy or CuPy array (or an object with "
                    f"DLPack): {instead(name, x)}")


@cache
def _speaks_dlpack(kind):
    """Whether objects of a class are taken in through DLPack."""
    return hasattr(kind, "__dlpack_device__") and not _means_more(kind)


@cache
def _has_sign(kind):
    """Whether a view may stand for the negative of its memory, as in PyTorch."""
    return hasattr(kind, "is_neg")


@cache
def _means_more(kind):
    """Whether elements of this class of arrays are more than numbers."""
    if _base(kind) is not None:
        return library(kind) is None
    base = next((base for base in kind.__mro__ if base.__name__ == "Tensor"
                 and base.__module__ == "torch"), None)
    if base is None or kind.__module__.startswith("torch.nn."):     # where nn.Parameter is
        return False
    return any(getattr_static(kind, name) is not getattr_static(base, name)
               for name in _TENSOR_MEANING)


def _check_state(name, x):
    """Names the reason for which a tensor was not exported, if it is a usual one."""
    for attribute, what, remedy in _STATES:
        value = getattr(x, attribute, False)
        if value is True or (callable(value) and value() is True):
            raise TypeError(f"`{name}` is a {kind_of(x)} that {what}, expected plain numbers in "
                            f"memory: pass {remedy.format(name)}")


def _dlpack_side(name, x):
    """The side of an object with DLPack, from the device that it names."""
    try:
        kind = int(x.__dlpack_device__()[0])
    except Exception as error:      # of another library, and so of any class
        _check_state(name, x)
        raise TypeError(f"`{name}` is a {kind_of(x)} that names no device, expected one in CPU "
                        f"memory or on an NVIDIA GPU ({error}): pass an array that has memory there"
                        ) from error
    if _has_sign(type(x)) and x.is_neg() is True:       # the memory alone is exported
        raise TypeError(f"`{name}` is a {kind_of(x)} with PyTorch's negative bit set, which DLPack "
                        f"does not tell, expected plain numbers: pass `{name}.resolve_neg()`")
    if kind in _CPU_DEVICES:
        return "cpu"
    if kind in _CUDA_DEVICES:
        return "gpu"
    raise TypeError(f"`{name}` is a {kind_of(x)} on a device of DLPack's kind {kind}, expected CPU "
                    f"memory or an NVIDIA GPU: pass a copy in CPU memory, as `{name}.cpu()`")


def take(name, x):
    """The NumPy array over the memory of `x`."""
    if isinstance(x, np.ndarray):
        return x
    try:
        try:
            return np.from_dlpack(x)
        except Exception:           # of NumPy, which knows no bfloat16, or of the exporter
            from . import dlpack  # few calls need it

            bits = dlpack.bfloat16_bits(x)
    except Exception as error:
        _check_state(name, x)
        raise TypeError(f"`{name}` is a {kind_of(x)} of {getattr(x, 'dtype', 'unknown dtype')} and "
                        f"cannot be taken in through DLPack ({error}): pass a NumPy array of "
                        "float16, bfloat16, float32 or float64") from error
    return bits.view(_bfloat16(name))


def _adopt(name, x):
    """The CuPy array over the memory of `x`."""
    try:
        return device.adopt(name, x)
    except TypeError:
        _check_state(name, x)
        raise


def _bfloat16(name):
    """NumPy's type of bfloat16."""
    try:
        import ml_dtypes
    except ImportError:
        raise NotImplementedError(
            f"`{name}` has dtype bfloat16, and ml_dtypes, from which NumPy has it, is not "
            "installed: pip install ml_dtypes") from None
    return ml_dtypes.bfloat16


def no_array(name, x, at=""):
    """The beginning of a message about an object that is no array; `at` is an index."""
    came = f"`{name}`{at} is a {kind_of(x)}"
    if _means_more(type(x)):
        came += ", a class whose elements are more than numbers (units, masks, another product)"
    return came


def instead(name, x):
    """What to pass in the place of an object that is no array of numbers alone."""
    if isinstance(x, np.ma.MaskedArray):
        return (f"pass `{name}.filled(0)`, and what is masked as `mask=`, where True = may attend, "
                "or `bias=`")
    if _means_more(type(x)):
        if _base(type(x)) is None:
            return "pass the plain tensor that it stands for, if there is one"
        module = "np" if isinstance(x, np.ndarray) else "cupy"
        return f"pass `{module}.asarray({name})`, which drops that meaning"
    if is_traced(x):
        return "while JAX traces there are no elements; call from `jax.pure_callback`"
    if name == "lse" and x is None:
        return "`attention(..., return_lse=True)` returns it"
    option = ARRAYS.get(name)
    if option and option.counts:
        return f"{option.step}, {option.each}"
    if option and option.forms and isinstance(x, (int, float)):
        return f"pass `np.full(Hq, {name}, np.float32)`, {option.each}"
    if name == "dout" and isinstance(x, tuple):
        return "the gradients of out and lse are two arguments, as in `pullback(dout, dlse)`"
    if isinstance(x, (list, tuple, bool, int, float)):
        boolean = option and option.dtypes == ("bool",)
        return f"pass `np.array({name}, {'bool' if boolean else 'np.float32'})`"
    for method in ("to_numpy", "toarray"):      # pandas, polars, xarray; sparse matrices
        if hasattr(type(x), method):
            return f"pass `{name}.{method}()`"
    if hasattr(type(x), "__array__"):
        return f"pass `np.asarray({name})`"
    return "pass an array"

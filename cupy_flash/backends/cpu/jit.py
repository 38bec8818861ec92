"""How the CPU kernels are compiled: two decorators and a cache that sees every source file."""

import functools
import hashlib
import os
import sys
import warnings
from pathlib import Path

from numba import njit, types
from numba.core import caching
from numba.extending import intrinsic

SOURCES = Path(__file__).parent
SIZES = SOURCES.parents[1] / "plan" / "cpu.py"      # of what planner and kernels must agree on

# `contract` allows fused multiply-adds. Every other fastmath flag is off: `ninf` and `nnan` break
# the -inf guard of the softmax, `reassoc` lets LLVM delete the rounding trick of `exp`.
_FLAGS = {"error_model": "numpy", "fastmath": {"contract"}, "nogil": True}

# Tile functions are only called from kernels, so they need no entry points of their own.
tile_function = njit(**_FLAGS, no_cpython_wrapper=True, no_cfunc_wrapper=True)

# Without `contract`: a rounding error that is computed, as the difference of what was rounded and
# what was not, must not be fused away.
exact_function = njit(
    error_model="numpy", nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True
)

# A function with one caller: its body becomes part of the caller before compilation, which saves
# LLVM one pass over everything below it.
inlined = njit(**_FLAGS, inline="always", no_cpython_wrapper=True, no_cfunc_wrapper=True)


@functools.cache
def source_digest():
    """Digest of all files that the kernels are made of, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in (*sorted(SOURCES.glob("*.py")), SIZES):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder():
    """Where compiled kernels are kept: `$NUMBA_CACHE_DIR` or the user's cache folder."""
    base = os.environ.get("NUMBA_CACHE_DIR")
    if not base:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "cupy_flash" / source_digest()


class _Locator(caching._CacheLocator):
    """Numba looks at the file of the cached function alone; the folder's name covers them all."""

    def __init__(self, py_func):
        self._lineno = py_func.__code__.co_firstlineno

    def get_cache_path(self):
        return str(cache_folder())

    def get_source_stamp(self):
        return source_digest()

    def get_disambiguator(self):
        return str(self._lineno)

    @classmethod
    def from_function(cls, py_func, py_file):
        self = cls(py_func)
        try:
            self.ensure_cache_path()
        except OSError as error:
            _warn_once(
                f"cupy_flash: cannot write compiled kernels to {cache_folder()} ({error}); "
                "every process compiles anew. Set NUMBA_CACHE_DIR to a writable folder."
            )
            return None
        return self


class _CacheImpl(caching.CompileResultCacheImpl):
    _locator_classes = (_Locator,)


class _Cache(caching.FunctionCache):
    _impl_class = _CacheImpl

    def load_overload(self, sig, target_context):
        found = super().load_overload(sig, target_context)
        if found is None:
            _notice(self._py_func.__name__, sig)
        return found

    def save_overload(self, sig, data):
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_once(f"cupy_flash: the compiled kernel was not saved ({error})")


def kernel(py_func):
    """Decorator of a kernel: compiled at its first call, without the GIL, kept on disk."""
    dispatcher = njit(**_FLAGS)(py_func)
    try:
        dispatcher._cache = _Cache(py_func)
    except RuntimeError:  # no locator: the folder is not writable, and the user was told
        dispatcher._cache = _NoCache(py_func.__name__)
    return dispatcher


class _NoCache(caching.NullCache):
    def __init__(self, name):
        self._name = name

    def load_overload(self, sig, target_context):
        _notice(self._name, sig)


def _notice(name, sig):
    bits = next(t.dtype.bitwidth for t in sig if getattr(t, "dtype", None) in types.real_domain)
    print(
        f"cupy_flash: compiling the CPU kernel {name} for float{bits} arithmetic "
        "(some seconds, once per machine)",
        file=sys.stderr,
        flush=True,
    )


@functools.cache
def _warn_once(message):
    warnings.warn(message, RuntimeWarning, stacklevel=2)


@intrinsic
def as_pointer(typingctx, address):
    """The integer `address` as a pointer for `numba.carray`."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


@intrinsic
def next_task(typingctx, counter):
    """Atomically: counter[0]++, the old value. One counter serves all threads of a launch."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", data, context.get_constant(types.int64, 1), "monotonic")

    return types.int64(counter), codegen

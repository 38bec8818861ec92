"""How the CPU kernels are compiled: three decorators and two intrinsics."""

import functools

from numba import config, njit, types
from numba.extending import intrinsic

from .cache import KernelCache

if config.DISABLE_JIT:
    raise RuntimeError(
        "NUMBA_DISABLE_JIT is set, which switches Numba's compiler off, and the CPU kernels are "
        "made by it: unset NUMBA_DISABLE_JIT, or set it to 0, before Python starts (plain NumPy "
        "code to step through is in cupy_flash.reference)")

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


def kernel(py_func):
    """Decorator of a kernel: compiled at its first call, without the GIL, kept on disk."""
    dispatcher = njit(**_FLAGS)(py_func)
    cache = dispatcher._cache = KernelCache(py_func.__name__)
    compile_now = dispatcher.compile

    @functools.wraps(compile_now)
    def compile_once(sig):
        with cache.exclusive(sig, dispatcher.targetctx):
            return compile_now(sig)

    dispatcher.compile = compile_once
    return dispatcher


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

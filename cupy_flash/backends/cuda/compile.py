"""Compiled kernels: NVRTC through CuPy, once per device and unit, kept in CuPy's cache on disk."""

import os
import warnings
from functools import cache, lru_cache

import cupy

from . import source
from .unit import unit

MOST_BLOCKS = 2**31 - 1


def launches(plan):
    """(function, grid, block, bytes of shared memory, tasks) of each launch.

    To be called with the plan's device current.
    """
    number = plan.device.number
    return tuple(
        (_function(number, *unit(x.entry, x.config, x.smem_bytes), x.smem_bytes),
         (min(x.tasks, plan.device.sms if x.resident else MOST_BLOCKS),), (x.threads,),
         x.smem_bytes, x.tasks)
        for x in plan.launches)


def options(name=""):
    """What NVRTC is told beside CuPy's own options, of which it overrules the architecture."""
    return ("-std=c++17", f"-I{source.folder()}",
            *(["--gpu-architecture=sm_90a"] if name.startswith("hopper_") else []))


@cache
def _function(number, name, text, smem_bytes):
    """The kernel of a unit on the device `number`, allowed to have its shared memory."""
    try:
        kernel = _load(name, text)
    except cupy.cuda.compiler.CompileException as error:
        raise RuntimeError(
            f"the CUDA kernel {name} does not compile; `python -m cupy_flash doctor` looks for the "
            f"cause. NVRTC says: {error}") from error
    # Once, to what this kernel needs: a later, smaller value would lower the limit again.
    kernel.max_dynamic_shared_size_bytes = smem_bytes
    return kernel.kernel


def _load(name, text):
    """Compile or take from CuPy's cache; in memory if the cache cannot be written."""
    try:
        return _compiled(name, text)
    except OSError as error:
        _warn_once(f"cupy_flash: CuPy cannot keep compiled kernels ({error}); every process "
                   "compiles anew. Set CUPY_CACHE_DIR to a writable folder.")
    before = os.environ.get("CUPY_CACHE_IN_MEMORY")
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
    try:
        return _compiled(name, text)
    finally:
        os.environ.pop("CUPY_CACHE_IN_MEMORY")
        if before is not None:
            os.environ["CUPY_CACHE_IN_MEMORY"] = before


def _compiled(name, text):
    kernel = cupy.RawModule(code=text, options=options(name)).get_function(name)
    kernel.compile()
    return kernel


@lru_cache(maxsize=1)
def _warn_once(message):
    warnings.warn(message, RuntimeWarning, stacklevel=2)

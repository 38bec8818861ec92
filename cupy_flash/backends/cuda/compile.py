"""Compiled kernels: NVRTC through CuPy, once per device and unit, kept in CuPy's cache on disk."""

import os
from threading import Lock

import cupy

from ...console import warn_once
from . import source
from .side_by_side import side_by_side
from .unit import unit

MOST_BLOCKS = 2**31 - 1
_functions = {}                             # (device, name, text, bytes of shared memory): kernel
_environment = Lock()


def launches(plan):
    """(function, grid, block, bytes of shared memory, tasks) of each launch."""
    units = [(plan.device.number, *unit(x.entry, x.config, x.smem_bytes), x.smem_bytes)
             for x in plan.launches]
    _make(units)
    return tuple(
        (_functions[one], (min(x.tasks, plan.device.sms if x.resident else MOST_BLOCKS),),
         (x.threads,), x.smem_bytes, x.tasks)
        for one, x in zip(units, plan.launches, strict=True))


def prepare(number, launch):
    """Compile the kernel of one launch on the device `number`, unless it is there already."""
    _make([(number, *unit(launch.entry, launch.config, launch.smem_bytes), launch.smem_bytes)])


def _make(units):
    """The kernels of those that nobody has used yet, side by side: NVRTC takes a core for each."""
    new = [one for one in units if one not in _functions]
    _functions.update(zip(new, side_by_side(_function, new), strict=True))


def options(name=""):
    """What NVRTC is told beside CuPy's own options, of which it overrules the architecture."""
    return ("-std=c++17", f"-I{source.folder()}",
            *(["--gpu-architecture=sm_90a"] if name.startswith("hopper_") else []))


def _function(number, name, text, smem_bytes):
    """The kernel of a unit on the device `number`, allowed to have its shared memory."""
    with cupy.cuda.Device(number):          # a thread begins on the first device
        try:
            kernel = _load(name, text)
        except cupy.cuda.compiler.CompileException as error:
            raise RuntimeError(
                f"the CUDA kernel {name} does not compile; `python -m cupy_flash doctor` looks for "
                f"the cause. NVRTC says: {error}") from error
        # Once, to what this kernel needs: a later, smaller value would lower the limit again.
        kernel.max_dynamic_shared_size_bytes = smem_bytes
        return kernel.kernel


def _load(name, text):
    """Compile or take from CuPy's cache; in memory if the cache cannot be written."""
    try:
        return _compiled(name, text)
    except OSError as error:
        warn_once(f"cupy_flash: CuPy cannot keep compiled kernels ({error}); every process "
                  "compiles anew. Set CUPY_CACHE_DIR to a writable folder.")
    with _environment:
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

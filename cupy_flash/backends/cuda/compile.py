"""Compiled kernels: NVRTC through CuPy, once per device and unit, kept in CuPy's cache on disk."""

import os
from threading import Lock

import cupy

from ...console import warn_once
from ...plan.cuda import kernel_of
from ...plan.kernel import MOST_BLOCKS, RESIDENT
from . import source
from .side_by_side import side_by_side
from .unit import unit

_functions = {}                 # (device, name, text, bytes of shared memory, target): kernel
_environment = Lock()


def launches(plan):
    """(function, grid, block, bytes of shared memory, tasks) of each launch."""
    units = [_unit_of(plan.device.number, x) for x in plan.launches]
    _make(units)
    blocks = [plan.device.sms if kernel_of(x.entry).grid == RESIDENT else MOST_BLOCKS
              for x in plan.launches]
    return tuple(
        (_functions[one], (min(x.tasks, most),), (x.threads,), x.smem_bytes, x.tasks)
        for one, most, x in zip(units, blocks, plan.launches, strict=True))


def prepare(number, launch):
    """Compile the kernel of one launch on the device `number`, unless it is there already."""
    _make([_unit_of(number, launch)])


def _unit_of(number, launch):
    """The unit of a launch on the device `number`, as `_functions` has it."""
    return (number, *unit(launch.entry, launch.config, launch.smem_bytes), launch.smem_bytes,
            kernel_of(launch.entry).target)


def _make(units):
    """The kernels of those that nobody has used yet, side by side: NVRTC takes a core for each."""
    new = [one for one in units if one not in _functions]
    _functions.update(zip(new, side_by_side(_function, new), strict=True))


def options(target=""):
    """What NVRTC is told beside CuPy's own options, of which a target overrules one."""
    return ("-std=c++17", f"-I{source.folder()}",
            *([f"--gpu-architecture=sm_{target}"] if target else []))


def _function(number, name, text, smem_bytes, target=""):
    """The kernel of a unit on the device `number`, allowed to have its shared memory."""
    with cupy.cuda.Device(number):          # a thread begins on the first device
        try:
            kernel = _load(name, text, target)
        except cupy.cuda.compiler.CompileException as error:
            raise RuntimeError(
                f"the CUDA kernel {name} does not compile; `python -m cupy_flash doctor` looks for "
                f"the cause. NVRTC says: {error}") from error
        # Once, to what this kernel needs: a later, smaller value would lower the limit again.
        kernel.max_dynamic_shared_size_bytes = smem_bytes
        return kernel.kernel


def _load(name, text, target=""):
    """Compile or take from CuPy's cache; in memory if the cache cannot be written."""
    try:
        return _compiled(name, text, target)
    except OSError as error:
        warn_once(f"cupy_flash: CuPy cannot keep compiled kernels ({error}); every process "
                  "compiles anew. Set CUPY_CACHE_DIR to a writable folder.")
    with _environment:
        before = os.environ.get("CUPY_CACHE_IN_MEMORY")
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
        try:
            return _compiled(name, text, target)
        finally:
            os.environ.pop("CUPY_CACHE_IN_MEMORY")
            if before is not None:
                os.environ["CUPY_CACHE_IN_MEMORY"] = before


def _compiled(name, text, target=""):
    kernel = cupy.RawModule(code=text, options=options(target)).get_function(name)
    kernel.compile()
    return kernel

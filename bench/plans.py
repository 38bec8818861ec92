"""Kernels of plans: which GPU the planner sees, what is compiled beforehand, what is stale."""

from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from multiprocessing import get_context

from cupy_flash import device


@cache
def _portable(number):
    """The GPU as if it had only what every GPU has."""
    return replace(device.gpu(number), targets=())


@contextmanager
def device_of(portable):
    """Within the context, `portable` plans are made without the kernels of one GPU alone."""
    original = device.gpu
    if portable:
        _portable(0)               # while `gpu` is still the original
        device.gpu = _portable
    try:
        yield
    finally:
        device.gpu = original


def units_of(plan):
    """(name, text, target) of each kernel of a plan."""
    from cupy_flash.backends.cuda.unit import unit
    from cupy_flash.plan.cuda import kernel_of

    return [(*unit(one.entry, one.config, one.smem_bytes), kernel_of(one.entry).target)
            for one in plan.launches]


def compile_one(unit):
    """Bring one unit into CuPy's cache."""
    from cupy_flash.backends.cuda.compile import _load

    _load(*unit)


@contextmanager
def compiling(units, jobs):
    """Compile while the body runs, and have compiled all when it is left.

    What does not compile is left to the call that needs it, which fails with the compiler's words.
    """
    with ProcessPoolExecutor(min(jobs, 16), get_context("spawn")) as pool:
        for unit in units:
            pool.submit(compile_one, unit)
        yield


def sources_of(kernels):
    """Digest of the CUDA sources that kernels with these names are made of, now.

    Empty if one of them is a kernel no more.
    """
    from cupy_flash.backends.cuda import source
    from cupy_flash.backends.cuda.unit import headers_of

    try:
        return source.digest(*headers_of(kernels))[:16]
    except KeyError:
        return ""


def stale(line):
    """Whether the CUDA sources of a line's kernels have changed since."""
    return line["sources"] != sources_of(line["kernels"])

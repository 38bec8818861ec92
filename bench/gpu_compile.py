"""The kernels of plans, compiled into CuPy's cache by many processes before they are needed."""

from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context


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

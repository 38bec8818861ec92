"""The threads of the CPU path: a plain pool, safe for forks, Dask and eight callers at once.

Numba's own threading layers abort the process when two threads enter them, or break forked
children.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ...device import cpu

_executor = None


def run(kernel, params, slabs):
    """The kernel once per slab; the workers, the caller among them, take tasks from one counter."""
    tasks = np.zeros(1, np.int64)
    helpers = [_pool().submit(kernel, params, slab, tasks) for slab in slabs[1:]]
    kernel(params, slabs[0], tasks)
    for helper in helpers:
        if not helper.cancel():  # still waiting behind another call: its work is done already
            helper.result()


def _pool():
    global _executor
    if _executor is None:
        _executor = ThreadPoolExecutor(max(1, cpu().threads - 1), "cupy_flash")
    return _executor


def _forget_pool():
    """A forked child has none of its parent's threads."""
    global _executor
    _executor = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)

"""Which GPU the planner sees while a cell is measured."""

from contextlib import contextmanager
from dataclasses import replace
from functools import cache

from cupy_flash import device


@cache
def _without_wgmma(number):
    """The GPU as if it had only what every GPU has."""
    return replace(device.gpu(number), wgmma=False)


@contextmanager
def device_of(cell):
    """Within the context, plans for a portable cell are made without the kernels of one GPU."""
    original = device.gpu
    if cell.portable:
        _without_wgmma(0)               # while `gpu` is still the original
        device.gpu = _without_wgmma
    try:
        yield
    finally:
        device.gpu = original

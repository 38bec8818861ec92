"""Which GPU the planner sees while a call is measured or checked."""

from contextlib import contextmanager
from dataclasses import replace
from functools import cache

from cupy_flash import device


@cache
def _without_wgmma(number):
    """The GPU as if it had only what every GPU has."""
    return replace(device.gpu(number), wgmma=False)


@contextmanager
def device_of(portable):
    """Within the context, `portable` plans are made without the kernels of one GPU alone."""
    original = device.gpu
    if portable:
        _without_wgmma(0)               # while `gpu` is still the original
        device.gpu = _without_wgmma
    try:
        yield
    finally:
        device.gpu = original

"""Which GPU the planner sees while a call is measured or checked."""

from contextlib import contextmanager
from dataclasses import replace
from functools import cache

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

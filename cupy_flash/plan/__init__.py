"""Planning: pure functions of a problem and a device, cached, testable without either backend."""

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache

from . import cpu
from .types import Buffer, CpuConfig, Launch, Plan

__all__ = ["Buffer", "CpuConfig", "Launch", "Plan", "make_plan", "tuned"]

_CONFIG = ContextVar("cupy_flash_config", default=CpuConfig())


def make_plan(direction, problem, device):
    """The `Plan` for ``"forward"`` or ``"backward"`` of a problem on a device."""
    return _make_plan(direction, problem, device, _CONFIG.get())


@lru_cache(maxsize=4096)
def _make_plan(direction, problem, device, config):
    planner = cpu.plan_forward if direction == "forward" else cpu.plan_backward
    return planner(problem, device, config)


@contextmanager
def tuned(**changes):
    """Within the context, plans are made with these fields of `CpuConfig`."""
    token = _CONFIG.set(replace(_CONFIG.get(), **changes))
    try:
        yield
    finally:
        _CONFIG.reset(token)

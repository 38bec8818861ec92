"""Planning: pure functions of a problem and a device, cached, testable without either backend."""

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache

from . import cpu, cuda
from .types import Buffer, CpuConfig, CudaConfig, Launch, Plan

__all__ = ["Buffer", "CpuConfig", "CudaConfig", "Launch", "Plan", "make_plan", "tuned"]

_DEFAULT = CpuConfig()
_CONFIG = ContextVar("cupy_flash_config", default=_DEFAULT)


def make_plan(direction, problem, device):
    """The `Plan` for ``"forward"`` or ``"backward"`` of a problem on a device."""
    if device.kind == "cuda":
        return _cuda_plan(direction, problem, device)
    return _cpu_plan(direction, problem, device, _CONFIG.get())


@lru_cache(maxsize=4096)
def _cuda_plan(direction, problem, device):
    planner = cuda.plan_forward if direction == "forward" else cuda.plan_backward
    return planner(problem, device)


@lru_cache(maxsize=4096)
def _cpu_plan(direction, problem, device, config):
    planner = cpu.plan_forward if direction == "forward" else cpu.plan_backward
    return planner(problem, device, config)


@contextmanager
def tuned(**changes):
    """Within the context, plans for the CPU are made with these fields of `CpuConfig`."""
    token = _CONFIG.set(replace(_CONFIG.get(), **changes))
    try:
        yield
    finally:
        _CONFIG.reset(token)

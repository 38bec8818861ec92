"""Planning: pure functions of a problem and a device, cached, testable without either backend."""

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, replace
from functools import lru_cache

from . import cpu
from .types import Buffer, CpuConfig, CudaConfig, Launch, Plan

__all__ = ["Buffer", "CpuConfig", "CudaConfig", "Launch", "Plan", "make_plan", "tuned"]

_DEFAULT = CpuConfig()
_CPU = ContextVar("cupy_flash_cpu", default=_DEFAULT)
_CUDA = ContextVar("cupy_flash_cuda", default=None)      # a `cuda.Tuning`; None: the usual one
# What `tuned` has set here and now: with problem and device all that a plan follows from.
cpu_settings, cuda_settings = _CPU.get, _CUDA.get


def make_plan(direction, problem, device):
    """The `Plan` for ``"forward"`` or ``"backward"`` of a problem on a device."""
    if device.kind == "cuda":
        return _cuda_plan(direction, problem, device, _CUDA.get())
    return _cpu_plan(direction, problem, device, _CPU.get())


@lru_cache(maxsize=4096)
def _cuda_plan(direction, problem, device, tuning):
    from . import cuda  # only now: `import cupy_flash` loads no tables

    tuning = tuning or cuda.Tuning()
    planner = cuda.plan_forward if direction == "forward" else cuda.plan_backward
    return planner(problem, device, tuning)


@lru_cache(maxsize=4096)
def _cpu_plan(direction, problem, device, config):
    planner = cpu.plan_forward if direction == "forward" else cpu.plan_backward
    return planner(problem, device, config)


@contextmanager
def tuned(**changes):
    """Within the context, plans are made with these fields of `CpuConfig` and of `cuda.Tuning`."""
    from . import cuda

    settings = {_CPU: _CPU.get(), _CUDA: _CUDA.get() or cuda.Tuning()}
    for variable, value in settings.items():
        names = {field.name for field in fields(value)} & changes.keys()
        settings[variable] = replace(value, **{name: changes.pop(name) for name in names})
    if changes:
        raise TypeError(f"plans have no settings {', '.join(changes)}")
    tokens = [(variable, variable.set(value)) for variable, value in settings.items()]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)

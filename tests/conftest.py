"""The backends the one suite runs on, and how hypothesis runs."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
from cases import Inputs
from hypothesis import HealthCheck, settings

from cupy_flash.backends.cuda import probe

# A first example may compile kernels for seconds, which says nothing about the example.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@dataclass(frozen=True)
class Backend:
    """Where a test runs: its array module, and the way there and back."""

    name: str
    xp: ModuleType
    asarray: Callable
    asnumpy: Callable

    def move(self, inputs):
        """The `Inputs` with every array on this backend."""
        return Inputs(*(self.asarray(x) for x in inputs[:-1]), self.move_options(inputs.options))

    def move_options(self, options):
        """The options with every array on this backend; numbers stay on the host."""
        return {name: self.asarray(x) if isinstance(x, np.ndarray) and x.ndim else x
                for name, x in options.items()}


CPU = Backend("cpu", np, np.asarray, np.asarray)
GPU_MISSING = probe.cuda().missing


def backends():
    """The CPU, and CUDA where there is a device; tests on it can be picked with ``-m gpu``."""
    yield pytest.param(CPU, id="cpu")
    if GPU_MISSING is None:
        import cupy

        def asarray(x):
            """CuPy cannot take in every bfloat16 array of NumPy; it can take in its bits."""
            if isinstance(x, np.ndarray) and x.dtype.name == "bfloat16":
                return cupy.asarray(x.view(np.uint16)).view(x.dtype)
            return cupy.asarray(x)

        cuda = Backend("cuda", cupy, asarray, cupy.asnumpy)
        yield pytest.param(cuda, id="cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=backends(), scope="session")
def backend(request):
    """Each backend in turn; a test that uses it runs once on every one."""
    return request.param


@pytest.fixture
def launches(monkeypatch):
    """Records of what a pretended GPU is asked to do with CuPy arrays in host memory."""
    from fake_cupy import pretended_gpu

    with pretended_gpu(monkeypatch) as records:
        yield records


def pytest_collection_modifyitems(items):
    """What only a GPU can show is skipped where there is none."""
    if GPU_MISSING is not None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=GPU_MISSING))

"""The backends the one suite runs on, and how hypothesis runs."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
from cases import Inputs
from hypothesis import HealthCheck, settings

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
        options = {name: self.asarray(value) if isinstance(value, np.ndarray) else value
                   for name, value in inputs.options.items()}
        return Inputs(*(self.asarray(x) for x in inputs[:-1]), options)


CPU = Backend("cpu", np, np.asarray, np.asarray)


@pytest.fixture(params=[CPU], ids=lambda backend: backend.name, scope="session")
def backend(request):
    """Each backend in turn; a test that uses it runs once on every one."""
    return request.param

"""Kernels are compiled once for each device and unit; without a GPU."""

from contextlib import nullcontext
from threading import Barrier

import cupy
import numpy as np
import pytest
from fake_cupy import H200, fake

from cupy_flash.backends.cuda import compile as compiled
from cupy_flash.backends.cuda import source
from cupy_flash.backends.cuda.unit import unit
from cupy_flash.bind import Options, bind_backward
from cupy_flash.plan import make_plan


class Module:
    """`cupy.RawModule` that compiles nothing."""

    made: tuple = ()
    failure = None

    def __init__(self, code, options):
        if Module.failure is not None and not compiled.os.environ.get("CUPY_CACHE_IN_MEMORY"):
            raise Module.failure
        self.name = None
        Module.made += ((code, options, self),)

    def get_function(self, name):
        self.sizes, self.kernel = [], f"kernel {name}"
        return self

    def compile(self):
        pass

    @property
    def max_dynamic_shared_size_bytes(self):
        return self.sizes[-1]

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size):
        self.sizes.append(size)


@pytest.fixture
def modules(monkeypatch):
    """`Module` in the place of `cupy.RawModule`."""
    monkeypatch.setattr(cupy, "RawModule", Module)
    monkeypatch.setattr(cupy.cuda, "Device", lambda number: nullcontext())
    monkeypatch.setattr(Module, "made", ())
    monkeypatch.setattr(Module, "failure", None)
    monkeypatch.setattr(compiled, "_functions", {})
    compiled.warn_once.cache_clear()
    return Module


def test_modules_are_kept_per_device_and_unit(modules):
    units = [(number, "f", text, 50000) for number in (1, 0, 1, 0) for text in ("a", "b", "a")]
    for one in units:
        compiled._make([one])
    assert compiled._functions == dict.fromkeys(units, "kernel f")
    assert [code for code, _, _ in modules.made] == ["a", "b"] * 2
    assert {tuple(module.sizes) for _, _, module in modules.made} == {(50000,)}
    assert modules.made[0][1] == ("-std=c++17", f"-I{source.folder()}")


def test_kernels_of_a_plan_are_compiled_side_by_side(modules, monkeypatch):
    """Each is not through before all have begun; they come in the order of the plan."""
    x = fake(np.zeros((1, 2, 16, 64), np.float32))
    problem = bind_backward(x, x, x, x, x, x[..., 0], Options())[0]
    plan = make_plan("backward", problem, H200)
    assert len(plan.launches) == 3
    monkeypatch.setattr(Module, "compile", lambda self: begun.wait())
    begun = Barrier(3, timeout=60)
    names = [f"kernel {unit(one.entry, one.config, one.smem_bytes)[0]}" for one in plan.launches]
    assert [function for function, *_ in compiled.launches(plan)] == names


def test_a_cache_that_cannot_be_written(modules, monkeypatch):
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    modules.failure = PermissionError("read-only home")
    with pytest.warns(RuntimeWarning, match=r"read-only home.*CUPY_CACHE_DIR"):
        assert compiled._function(0, "f", "a", 0) == "kernel f"
    assert compiled._function(0, "g", "b", 0) == "kernel g"     # and it is said once
    assert "CUPY_CACHE_IN_MEMORY" not in compiled.os.environ


def test_a_unit_that_does_not_compile(modules):
    modules.failure = cupy.cuda.compiler.CompileException("no such file", "", "x", (), "nvrtc")
    with pytest.raises(RuntimeError, match=r"kernel f does not compile.*doctor.*no such file") as e:
        compiled._function(0, "f", "a", 0)
    assert e.value.__cause__ is modules.failure

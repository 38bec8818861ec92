"""The doctor on machines that are only pretended: each says what is missing and what mends it."""

import sys
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest

from cupy_flash.backends.cuda import doctor
from cupy_flash.cli import main


def refuse(*_):
    """A library that is not there."""
    raise RuntimeError("cannot open libnvrtc.so.13")


class Machine:
    """What CuPy finds; a test changes what it is about."""

    def __init__(self, monkeypatch, folder):
        self.packages = {"cupy-cuda13x": "14.2.0"}
        self.version, self.driver, self.built = "14.2.0", 13010, 13000
        self.available, self.arch, self.known = True, (9, 0), ["75", "80", "90", "120"]
        self.nvrtc, self.result = lambda: (13, 0), self.attention
        monkeypatch.setenv("CUPY_CACHE_DIR", str(folder))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(metadata, "version", self.version_of)
        monkeypatch.setattr(doctor, "_attention", lambda x: self.result(x))
        self.monkeypatch = monkeypatch

    def version_of(self, name):
        """Of an installed package."""
        if name not in self.packages:
            raise metadata.PackageNotFoundError(name)
        return self.packages[name]

    @staticmethod
    def attention(x):
        """What a working kernel returns."""
        P = np.exp(x.astype(np.float64) @ x.T.astype(np.float64) / 4)
        return (P @ x / P.sum(axis=1, keepdims=True)).astype(np.float16)

    def examine(self):
        """(last finding, all findings) with this machine's CuPy."""
        major, minor = self.arch
        properties = {"name": b"Imaginary 1", "major": major, "minor": minor,
                      "totalGlobalMem": 80 * 2**30}
        runtime = SimpleNamespace(
            runtimeGetVersion=lambda: self.built, driverGetVersion=lambda: self.driver,
            getDeviceCount=lambda: 1, getDeviceProperties=lambda number: properties)
        nvrtc = SimpleNamespace(getVersion=self.nvrtc, getSupportedArchs=lambda: self.known)
        cuda = SimpleNamespace(runtime=runtime, nvrtc=nvrtc)
        cupy = SimpleNamespace(__version__=self.version, __file__="cupy/__init__.py", cuda=cuda,
                               is_available=lambda: self.available, asarray=np.asarray,
                               asnumpy=np.asarray)
        self.monkeypatch.setitem(sys.modules, "cupy", cupy)
        self.monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
        found = list(doctor.examine())
        return found[-1], found


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path / "cache")


def test_all_is_well(machine, capsys):
    last, found = machine.examine()
    assert [finding.state for finding in found] == [doctor.OK] * 7, found
    assert "one tile is right" in last.text
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("The GPU path works.\n")


def test_no_cupy(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "MISSING CuPy is not installed" in text and "cupy-cuda13x[ctk]" in text


def test_two_cupys(machine):
    machine.packages["cupy-cuda12x"] = "14.1.0"
    finding = machine.examine()[1][0]
    assert finding.state == doctor.WARNING
    assert "cupy-cuda12x 14.1.0, cupy-cuda13x 14.2.0" in finding.text
    assert "pip uninstall cupy-cuda12x cupy-cuda13x" in finding.remedy


def kernel_raises(x):
    """A kernel that does not run."""
    raise RuntimeError("does not compile: no such file")


@pytest.mark.parametrize("changes, text, remedy", [
    ({"version": "13.6.0"}, "older than 14", "cuda13x"),
    ({"driver": 0}, "no NVIDIA driver", "--gpus all"),
    ({"driver": 12080}, "knows CUDA 12.8, and CuPy was built for CUDA 13.0", "cuda12x"),
    ({"available": False}, "no CUDA device", "nvidia-smi"),
    ({"arch": (7, 5)}, "sm_75, 80 GiB is older than sm_80", "CPU"),
    ({"nvrtc": refuse}, "libnvrtc.so.13", "pip install nvidia-cuda-nvrtc"),
    ({"nvrtc": refuse, "built": 12080}, "NVRTC", "nvidia-cuda-nvrtc-cu12"),
    ({"known": ["100", "120"]}, "begins with sm_100", "cuda12x"),
    ({"result": kernel_raises}, "no such file", "info"),
    ({"result": np.zeros_like}, "wrong values", "selftest"),
], ids=lambda value: " ".join(value) if isinstance(value, dict) else value)
def test_what_is_missing_and_what_mends_it(machine, changes, text, remedy):
    for name, value in changes.items():
        setattr(machine, name, value)
    last, found = machine.examine()
    assert last.state == doctor.MISSING and all(f.state == doctor.OK for f in found[:-1]), found
    assert text in last.text and remedy in last.remedy, last


def test_hidden_devices(machine, monkeypatch):
    machine.available = False
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    last, _ = machine.examine()
    assert "CUDA_VISIBLE_DEVICES is '-1'" in last.text and last.remedy.startswith("unset")


@pytest.mark.parametrize("changes, text, remedy", [
    ({"arch": (13, 0)}, "ends with sm_120", "upgrade"),
], ids=str)
def test_what_works_all_the_same(machine, changes, text, remedy):
    for name, value in changes.items():
        setattr(machine, name, value)
    last, found = machine.examine()
    assert last.state == doctor.OK
    (warning,) = (finding for finding in found if finding.state == doctor.WARNING)
    assert text in warning.text and remedy in warning.remedy


def test_a_folder_that_cannot_be_written(machine, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    last, found = machine.examine()
    assert last.state == doctor.OK
    (warning,) = (finding for finding in found if finding.state == doctor.WARNING)
    assert "cannot be kept" in warning.text and "CUPY_CACHE_DIR" in warning.remedy


def test_a_cupy_that_raises(machine):
    machine.built = "no number"
    last, _ = machine.examine()
    assert last.state == doctor.MISSING and last.text.startswith("driver: TypeError")

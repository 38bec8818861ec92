"""The command line, on this machine and on machines that are only pretended."""

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cupy_flash as cf
from cupy_flash import console
from cupy_flash.backends.cuda import probe
from cupy_flash.cli import COMMANDS, devices, main, selftest
from cupy_flash.cli.progress import Progress

ROOT = Path(__file__).resolve().parents[1]


def without_cupy(monkeypatch):
    """`import cupy` fails as where it is not installed."""
    monkeypatch.setitem(sys.modules, "cupy", None)


def pretend_cupy(monkeypatch, *, available=True):
    """`import cupy` gives a module that knows one device; otherwise neither driver nor NVRTC."""
    def nvrtc_version():
        if not available:
            raise RuntimeError("libnvrtc.so is missing")
        return 13, 0

    properties = {"name": b"Imaginary 1", "major": 9, "minor": 0, "totalGlobalMem": 80 * 2**30}
    runtime = SimpleNamespace(
        runtimeGetVersion=lambda: 13000, driverGetVersion=lambda: 13010 * available,
        getDeviceCount=lambda: 1, getDeviceProperties=lambda number: properties)
    nvrtc = SimpleNamespace(getVersion=nvrtc_version)
    cupy = SimpleNamespace(__version__="14.2.0", is_available=lambda: available,
                           cuda=SimpleNamespace(runtime=runtime, nvrtc=nvrtc))
    monkeypatch.setitem(sys.modules, "cupy", cupy)


class PretendedGpu(devices.CpuDevice):
    """A device whose arrays are marked, and whose results are a little off if asked for."""

    name = "0: Imaginary 1"

    def __init__(self, error=0.0):
        self.error, self.arrays_seen = error, 0

    def asarray(self, x):
        self.arrays_seen += 1
        return np.asarray(x)

    def asnumpy(self, x):
        return x + np.asarray(self.error, x.dtype)


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert all(f"\n    {name} " in text for name in COMMANDS)
    for name in COMMANDS:
        assert (ROOT / "cupy_flash" / "cli" / f"{name}.py").is_file()


def test_without_a_command_it_says_what_there_is(capsys):
    assert main([]) == 0
    with pytest.raises(SystemExit):
        main(["--help"])
    first, second = capsys.readouterr().out.split("usage:")[1:]
    assert first == second


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"cupy_flash {cf.__version__}\n"


@pytest.mark.parametrize("arguments", [["dance"], ["info", "--dance"], ["warmup", "int8"],
                                       ["warmup", "--options", "dropout"]], ids=" ".join)
def test_what_is_unknown_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert "usage: python -m cupy_flash" in capsys.readouterr().err


def test_info_without_cupy(monkeypatch, capsys):
    without_cupy(monkeypatch)
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for part in (cf.__version__, np.__version__, "threads", "kernel cache", "digest",
                 "CuPy is not installed", "cupy-cuda13x[ctk]"):
        assert part in text


def test_info_with_a_gpu(monkeypatch, capsys):
    pretend_cupy(monkeypatch)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(ROOT / "no such folder"))
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for part in ("Imaginary 1, sm_90, 80 GiB", "14.2.0", "13.0", "13.1", "no such folder (empty)"):
        assert part in text
    assert "pip install" not in text


def test_info_with_cupy_and_no_driver(monkeypatch, capsys):
    pretend_cupy(monkeypatch, available=False)
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "finds no CUDA device" in text
    assert re.search(r"CUDA driver +none\n", text)
    assert re.search(r"NVRTC +not available \(RuntimeError\)\n", text)


def test_info_as_a_program():
    result = subprocess.run([sys.executable, "-m", "cupy_flash", "info"], cwd=ROOT, text=True,
                            capture_output=True)
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.startswith("Versions\n")


def test_selftest_is_content(monkeypatch, capsys):
    without_cupy(monkeypatch)
    assert main(["selftest", "--verbose"]) == 0
    text = capsys.readouterr().out
    assert text.count("  ok    ") >= 36 and text.endswith("all is well\n")
    assert "no GPU is tested: CuPy is not installed" in text


@pytest.mark.parametrize("result", ["out", "lse", "dq", "dk", "dv", "dbias"])
def test_selftest_sees_a_wrong_result(result, monkeypatch, capsys):
    right = cf.attention_vjp

    def wrong(*arrays, **options):
        (out, lse), pullback = right(*arrays, **options)
        made = {"out": out, "lse": lse}

        def wrong_pullback(dout, dlse):
            grads = pullback(dout, dlse)._asdict()
            if grads.get(result) is not None:
                grads[result] = grads[result] * grads[result].dtype.type(1.1)
            return cf.Gradients(**grads)

        if result in made:
            made[result] = made[result] * made[result].dtype.type(1.1)
        return tuple(made.values()), wrong_pullback

    monkeypatch.setattr(cf, "attention_vjp", wrong)
    assert main(["selftest", "--cpu"]) == 1
    text = capsys.readouterr().out
    assert f": {result} is off by" in text and "FAILED" in text


def test_selftest_sees_misplaced_infinities(monkeypatch, capsys):
    case = selftest.cases()[0]
    results, bounds, faults = selftest.check(devices.CpuDevice(), case)
    assert faults == [] and set(results) == set(bounds) == {"out", "lse", "dq", "dk", "dv"}
    lse = results["lse"].copy()
    lse.flat[0] = -np.inf
    (fault,) = selftest._fault(case, "lse", results["lse"], lse, bounds["lse"])
    assert "infinities" in fault
    (fault,) = selftest._fault(case, "lse", lse, results["lse"], bounds["lse"])
    assert "is off by inf" in fault
    (fault,) = selftest._fault(case, "out", results["out"][:1], results["out"], bounds["out"])
    assert "has shape" in fault


def test_selftest_compares_a_gpu_with_the_cpu(monkeypatch, capsys):
    gpu = PretendedGpu()
    monkeypatch.setattr(devices, "cuda_devices", lambda: ([gpu], None))
    assert main(["selftest"]) == 0
    assert gpu.arrays_seen > 100 and "0: Imaginary 1: 56 of 56 right" in capsys.readouterr().out
    gpu.error = 0.5
    assert main(["selftest"]) == 1
    assert "out beside the CPU's is off by 5.0e-01" in capsys.readouterr().out


def test_a_gpu_that_is_not_supported_is_left_out(monkeypatch):
    pretend_cupy(monkeypatch)
    gpu = PretendedGpu()
    monkeypatch.setattr(probe, "cuda_devices", lambda: [gpu])

    def not_yet(*_):
        raise NotImplementedError("CuPy arrays are not supported")

    monkeypatch.setattr(cf, "attention", not_yet)
    assert devices.cuda_devices() == ([], "0: Imaginary 1: CuPy arrays are not supported")
    monkeypatch.setattr(cf, "attention", lambda *_: None)
    assert devices.cuda_devices() == ([gpu], None)


class Terminal(io.StringIO):
    """A stream that calls itself a terminal."""

    def isatty(self):
        return True


def test_progress_is_silent_for_short_work():
    terminal = Terminal()
    with Progress(3, "work", stream=terminal) as progress:
        for _ in range(3):
            progress.step()
    assert terminal.getvalue() == ""


def test_progress_is_silent_without_a_terminal():
    log = io.StringIO()
    with Progress(3, "work", stream=log, delay=0) as progress:
        progress.step()
    assert log.getvalue() == ""


def test_progress_draws_and_wipes_a_bar():
    terminal = Terminal()
    with Progress(4, "work", stream=terminal, delay=0) as progress:
        progress.step()
        assert terminal.getvalue().endswith("work [#######.......................] 1/4")
        progress.step()
        assert terminal.getvalue().endswith("work [###############...............] 2/4")
    assert terminal.getvalue().endswith("\r\033[K")


def test_progress_appears_while_the_first_step_takes_its_time():
    terminal = Terminal()
    with Progress(5, "work", stream=terminal, delay=0.01):
        for _ in range(1000):
            if terminal.getvalue():
                break
            time.sleep(0.01)
        assert terminal.getvalue().endswith("work [..............................] 0/5")
    assert terminal.getvalue().endswith("\r\033[K")


def test_notices_do_not_tear_the_bar(monkeypatch):
    """Each is a line of its own above the bar, which is drawn again."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(2, "work", delay=0) as progress:
        progress.step()
        bar = "\r\033[Kwork [###############...............] 1/2"
        console.say("a notice")
        assert terminal.getvalue().endswith(f"{bar}\r\033[Ka notice\n{bar}")
        progress.step()
    console.say("another")
    assert terminal.getvalue().endswith("2/2\r\033[Kanother\n")


def test_results_are_printed_above_the_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with Progress(2, "work", stream=terminal, delay=0) as progress:
        progress.step()
        bar = "\r\033[Kwork [###############...............] 1/2"
        progress.print("a result")
        assert terminal.getvalue().endswith(f"{bar}\r\033[Ka result\n{bar}")


@pytest.mark.parametrize("stream", [None, SimpleNamespace(), open(os.devnull)],  # noqa: SIM115
                         ids=["none", "without isatty", "no terminal"])
def test_progress_needs_no_terminal(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(1, "work", delay=0) as progress:
        progress.step()


@pytest.mark.parametrize("name, what", [
    ("picture.bmp2", "does not end in one of .avif, "), ("picture", "does not end in one of "),
    ("no such folder/picture.png", "there is no folder "), ("folder.png", "cannot be written"),
])
def test_a_picture_that_cannot_be_saved_is_refused_at_once(name, what, tmp_path, monkeypatch,
                                                           capsys):
    (tmp_path / "folder.png").mkdir()
    monkeypatch.setattr(cf, "attention", None)      # nothing is computed
    assert main(["demo", "--picture", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("--picture: ") and what.partition(".avif")[0] in err
    assert len(err.splitlines()) == 1 and len(list(tmp_path.iterdir())) == 1


def test_an_interrupt_ends_a_command_with_one_line(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(selftest, "cases", interrupted)
    assert main(["selftest"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


@pytest.mark.parametrize("arguments, status", [(["info"], 141), (["--help"], 0)],
                         ids=["info", "help"])      # argparse drops what it cannot print
def test_output_that_nobody_reads_on(arguments, status):
    """As with `python -m cupy_flash info | head -1`: no traceback, and the status of the signal."""
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run([sys.executable, "-m", "cupy_flash", *arguments], cwd=ROOT, text=True,
                             stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (process.returncode, process.stderr) == (status, "")

"""Why the GPU path does not work on this machine, and what mends it: one sentence and one command.

Nothing here raises: every check turns what it meets into a `Finding`. No header of CUDA and no
toolkit is looked for, since the kernels need neither.
"""

import os
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...bind import Options, bind_forward
from ...device import OLDEST_GPU
from . import probe, source

OK, WARNING, MISSING = "ok", "warning", "missing"
_OTHER_CACHE = "export CUPY_CACHE_DIR=a folder to write to"
_CUPY = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")


class Finding(NamedTuple):
    """What a check says: its state, a sentence, and the command that mends it."""

    state: str
    text: str
    remedy: str | None = None


def examine():
    """Yield a `Finding` for each check, up to the first that keeps the GPU path from working."""
    for check in CHECKS:
        try:
            finding = check()
        except Exception as error:      # a broken installation raises what it likes
            finding = Finding(MISSING, f"{check.__name__[1:]}: {type(error).__name__}: {error}")
        yield finding
        if finding.state == MISSING:
            return


def _packages():
    """One CuPy, not none and not two."""
    found = []
    for name in _CUPY:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    if len(found) > 1:
        names = " ".join(line.split()[0] for line in found)
        return Finding(WARNING, f"two CuPy packages overwrite each other: {', '.join(found)}",
                       f"pip uninstall {names}, then {probe.INSTALL_HINT}")
    return Finding(OK, f"CuPy package: {found[0] if found else 'none that pip knows'}, "
                       f"NumPy {np.__version__}")


def _importable():
    """CuPy can be imported."""
    try:
        import cupy
    except ImportError as error:
        if error.name == "cupy":
            return Finding(MISSING, "CuPy is not installed", probe.INSTALL_HINT)
        return Finding(MISSING, f"CuPy cannot be imported: {error}",
                       f"pip uninstall the CuPy there is, then {probe.INSTALL_HINT}")
    except OSError:
        return Finding(MISSING, probe.cuda().missing, _OTHER_CACHE)
    major = int(cupy.__version__.split(".")[0])
    if major < 14:
        return Finding(MISSING, f"CuPy {cupy.__version__} is older than 14, which is needed",
                       probe.INSTALL_HINT)
    return Finding(OK, f"CuPy {cupy.__version__} is imported from {Path(cupy.__file__).parent}")


def _driver():
    """A driver, no older than the CUDA runtime that CuPy was built for."""
    from cupy.cuda import runtime

    built = runtime.runtimeGetVersion()
    try:
        driver = runtime.driverGetVersion()
    except Exception:
        driver = 0
    if driver == 0:
        return Finding(MISSING, "there is no NVIDIA driver: libcuda.so.1 is not found",
                       "install NVIDIA's driver, or start the container with --gpus all")
    if driver // 1000 < built // 1000:
        return Finding(MISSING, f"the driver knows CUDA {_dotted(driver)}, and CuPy was built for "
                       f"CUDA {_dotted(built)}", f"pip install 'cupy-cuda{driver // 1000}x[ctk]' "
                       "after pip uninstall of the CuPy there is")
    return Finding(OK, f"the driver knows CUDA {_dotted(driver)}, CuPy was built for "
                       f"{_dotted(built)}")


def _device():
    """A device, and new enough."""
    import cupy

    if not cupy.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None:
            return Finding(MISSING, f"no CUDA device: CUDA_VISIBLE_DEVICES is {hidden!r}",
                           "unset CUDA_VISIBLE_DEVICES")
        return Finding(MISSING, "no CUDA device is found, although there is a driver", "nvidia-smi")
    arch = _arch(cupy)
    if arch < OLDEST_GPU:
        return Finding(MISSING, f"device {probe.cuda().devices[0]} is older than "
                       f"sm_{OLDEST_GPU}, which the kernels need", "use NumPy arrays: they are "
                       "computed on the CPU")
    return Finding(OK, f"device {probe.cuda().devices[0]}")


def _nvrtc():
    """The compiler is there and knows the device."""
    import cupy

    arch = _arch(cupy)
    try:
        version = cupy.cuda.nvrtc.getVersion()
        known = [int(number) for number in cupy.cuda.nvrtc.getSupportedArchs()]
    except Exception as error:
        major = cupy.cuda.runtime.runtimeGetVersion() // 1000
        package = "nvidia-cuda-nvrtc" + ("" if major >= 13 else f"-cu{major}")
        return Finding(MISSING, f"NVRTC, the compiler, is not found: {error}",
                       f"pip install {package}")
    if arch < min(known):
        return Finding(MISSING, f"the GPU is sm_{arch}, and NVRTC {version[0]}.{version[1]} begins "
                       f"with sm_{min(known)}", "pip install 'cupy-cuda12x[ctk]' after pip "
                       "uninstall of the CuPy there is")
    if arch > max(known):
        return Finding(WARNING, f"the GPU is sm_{arch}, and NVRTC {version[0]}.{version[1]} ends "
                       f"with sm_{max(known)}: kernels are compiled for that",
                       "pip install --upgrade 'cupy-cuda13x[ctk]'")
    return Finding(OK, f"NVRTC {version[0]}.{version[1]} knows sm_{min(known)} to sm_{max(known)}")


def _cache():
    """Compiled kernels can be kept."""
    folder = Path(probe.cuda().cache)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding(WARNING, f"compiled kernels cannot be kept in {folder} ({error.strerror}): "
                       "every process compiles anew", _OTHER_CACHE)
    if str(folder).startswith("~"):
        return Finding(WARNING, f"no home folder is known: compiled kernels are kept in {folder} "
                       "of the folder in which Python is started", _OTHER_CACHE)
    return Finding(OK, f"compiled kernels are kept in {folder}")


def _kernel():
    """One tile of attention, compiled and compared with NumPy."""
    import cupy

    start = time.perf_counter()
    x = np.random.default_rng(0).standard_normal((16, 16), np.float32).astype(np.float16)
    try:
        out = _attention(cupy.asarray(x))
    except RuntimeError as error:
        return Finding(MISSING, f"a kernel of one tile cannot be run: {error}",
                       "python -m cupy_flash info, and report what it prints")
    seconds = time.perf_counter() - start
    P = np.exp(x.astype(np.float64) @ x.T.astype(np.float64) / 4)
    error = np.abs(cupy.asnumpy(out) - P @ x / P.sum(axis=1, keepdims=True)).max()
    if not error < 4e-3:
        return Finding(MISSING, "a kernel of one tile gives wrong values: they are off by "
                       f"{error:.1e}", "python -m cupy_flash selftest --verbose")
    return Finding(OK, f"a kernel of one tile is right, {seconds:.1f} s after the start "
                       f"(sources {source.digest()[:16]})")


def _attention(x):
    """Attention of x to itself on its device."""
    from .launch import run

    return run("forward", *bind_forward(x, x, x, Options()))["out"]


def _arch(cupy):
    """Compute capability of device 0, 90 for 9.0."""
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    return 10 * properties["major"] + properties["minor"]


def _dotted(version):
    """13000 -> 13.0."""
    return f"{version // 1000}.{version % 1000 // 10}"


CHECKS = (_packages, _importable, _driver, _device, _nvrtc, _cache, _kernel)

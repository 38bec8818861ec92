"""``python -m cupy_flash info``: what is installed and what was found."""

import os
import platform
from importlib import metadata
from pathlib import Path

import cupy_flash as cf
from cupy_flash.backends.cuda import probe, source
from cupy_flash.device import cpu

_PACKAGES = ("numpy", "numba", "llvmlite", "ml_dtypes")


def add_arguments(parser):
    """Add the options of the command: there are none."""


def run(_arguments) -> int:
    """Print the report; return 0."""
    for title, lines in report().items():
        print(title)
        width = max(map(len, lines), default=0)
        for name, value in lines.items():
            print(f"  {name:{width}}  {value}")
    return 0


def report():
    """Return the report.

    Returns
    -------
    dict of str to dict of str to str
        Section -> name -> value.
    """
    return {"Versions": _versions(), "CPU path": _cpu(), "CUDA": _cuda()}


def _versions():
    """Versions of Python and of all packages that may take part."""
    versions = {"cupy_flash": f"{cf.__version__}, {Path(cf.__file__).parent}",
                "Python": f"{platform.python_version()}, {platform.platform()}"}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _cpu():
    """Processor, threads and the cache of compiled kernels."""
    lines = {"processor": _processor(),
             "threads": f"{cpu().threads} used, of {os.cpu_count()} processors"}
    try:
        from cupy_flash.backends.cpu import cache
    except Exception as error:      # whatever keeps Numba from being imported
        return lines | {"kernels": f"cannot be compiled: {error}"}
    folder = cache.cache_folder()
    lines["kernel cache"] = f"{folder} ({_size(folder)})" if folder else (
        "none, as no home folder is known: set NUMBA_CACHE_DIR or XDG_CACHE_HOME")
    return lines


def _cuda():
    """Devices, CuPy and the CUDA sources."""
    found = probe.cuda()
    lines = {"devices": found.missing} if found.missing else {
        f"device {line.split(':')[0]}": line.split(": ", 1)[1] for line in found.devices}
    lines |= found.versions
    if found.cache is not None:
        lines["CuPy's kernel cache"] = f"{found.cache} ({_size(Path(found.cache))})"
    lines["sources"] = (f"{source.folder()} ({len(source.names())} files, "
                        f"digest {source.digest()[:16]})")
    if "CuPy" not in found.versions:
        lines["to install CuPy"] = probe.INSTALL_HINT
    return lines


def _processor():
    """The processor's name; Linux tells it in a file, other systems through `platform`."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines()
             if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _size(folder):
    """Number and size of the files in a folder, as text."""
    try:
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    except OSError as error:
        return f"not readable: {error.strerror}"
    return f"{len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB" if sizes else "empty"

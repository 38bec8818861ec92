"""NVRTC by its C interface: compiles a unit for any architecture, on a machine without a GPU."""

import ctypes
import re
from functools import cache
from importlib import metadata

from cupy_flash.backends.cuda import source

# What CuPy adds to the options of every kernel belongs to what is tested.
OPTIONS = ("-std=c++17", "-ftz=true")


@cache
def _library():
    """The library: from a wheel of NVIDIA's, from where CuPy finds it, or from the loader."""
    names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib  # comes with CuPy
        names[:0] = [load_nvidia_dynamic_lib("nvrtc").abs_path]
    except (ImportError, RuntimeError):
        pass
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            files = metadata.files(package) or ()
        except metadata.PackageNotFoundError:
            continue
        names[:0] = (str(path.locate()) for path in files
                     if re.fullmatch(r"libnvrtc\.so\.\d+", path.name))
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ImportError("NVRTC is not found: pip install nvidia-cuda-nvrtc")


def version():
    """The version of NVRTC as "major.minor"."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def ptx(text, arch):
    """The PTX of a unit, as text."""
    return _compile(text, (f"-arch=compute_{arch}",), "PTX")[0].decode()


def compile(text, arch, folder=None):
    """Compile a unit, with the sources in a folder; without one, those of the package.

    Returns
    -------
    cubin : bytes or None
        None if it does not compile.
    log : str
        What the compiler and ptxas say.
    """
    return _compile(text, (f"-arch=sm_{arch}", "--ptxas-options=-v"), "CUBIN", folder)


def _compile(text, options, product, folder=None):
    nvrtc, program = _library(), ctypes.c_void_p()
    _done(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"unit.cu", 0, None, None))
    try:
        words = [*OPTIONS, *options, f"-I{folder or source.folder()}"]
        given = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
        failed = nvrtc.nvrtcCompileProgram(program, len(words), given)
        log = _read(program, "ProgramLog").rstrip(b"\0").decode()
        return (None if failed else _read(program, product)), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def resources(log):
    """Registers, spilled bytes, stack and static shared memory of the one kernel of a log."""
    numbers = {
        "registers": r"Used (\d+) registers", "stack": r"(\d+) bytes stack frame",
        "spill_stores": r"(\d+) bytes spill stores", "spill_loads": r"(\d+) bytes spill loads",
        "static_smem": r"(\d+) bytes smem",
    }
    found = {name: re.search(pattern, log) for name, pattern in numbers.items()}
    return {name: int(match[1]) if match else 0 for name, match in found.items()}


def _read(program, product):
    """A product of the program: its CUBIN, PTX or ProgramLog."""
    size = ctypes.c_size_t()
    _done(getattr(_library(), f"nvrtcGet{product}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _done(getattr(_library(), f"nvrtcGet{product}")(program, buffer))
    return buffer.raw


def _done(status):
    if status:
        raise RuntimeError(f"NVRTC returned the status {status}")

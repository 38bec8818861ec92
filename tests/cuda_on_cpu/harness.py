"""Plans, units and parameters of the GPU, run by a C++ compiler's program on NumPy arrays.

The text that is compiled and the bytes of the parameter struct are those that a GPU gets; only the
tiles may be smaller than any of the planner's table, so that a test is quick.
"""

import ctypes
import hashlib
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Lock

import numpy as np

from cupy_flash.axes import four_axes
from cupy_flash.backends.cuda import params, source, tensor_maps
from cupy_flash.backends.cuda.unit import params_bytes, unit
from cupy_flash.bind import Options, bind_backward, bind_forward
from cupy_flash.device import GpuDevice
from cupy_flash.plan import make_plan, tuned
from cupy_flash.plan.cuda import KERNELS, kernel_of
from cupy_flash.plan.cuda_backward_sm80 import FusedTile
from cupy_flash.plan.cuda_wmma import Tile
from cupy_flash.plan.kernel import ONE_TASK
from cupy_flash.results import missing, numpy_arrays

HERE = Path(__file__).parent
# None where the fibers cannot run: they need the contexts and the memory map of Linux.
COMPILER = (shutil.which("g++") or shutil.which("clang++")) if sys.platform == "linux" else None
# Aliasing: tiles are written as 16-byte chunks and read as elements, which CUDA's compilers allow.
# Fortified longjmp refuses to jump between stacks.
FLAGS = ("-std=c++17", "-fPIC", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE",
         "-ffp-contract=off", "-fvisibility=hidden", "-fno-gnu-unique")
NAN_BYTE = 0xFF
FAULTS = {1: "its threads wait for each other", 2: "it used memory that is not there",
          3: "structs.py and the compiler differ in the size of its parameters"}
SAME_NAME = 4
_jobs = ThreadPoolExecutor(2)
_compiled_once = Lock()


@cache
def build_folder():
    """A folder for this session's libraries; it goes when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="cuda_on_cpu_")
    build_folder.keep = folder
    return Path(folder.name)


@cache
def build(entry, config, smem_bytes, flags):
    """Start to compile a unit; returns a future of the path of its library."""
    name, text = unit(entry, replace(config, lazy=0.0), smem_bytes)
    key = hashlib.sha256(repr((text, flags)).encode()).hexdigest()[:8]
    return _jobs.submit(_compile, build_folder() / f"{name}_{key}", name, text, entry, flags)


def _compile(stem, name, text, entry, flags):
    """One run of the compiler, in a thread of its own."""
    return compile_unit(stem.name, text, name, f"cf::{kernel_of(entry).params}", flags)


def compile_unit(stem, text, name, params, flags):
    """Compile the function `name` of a text, which takes one `params`; returns the library."""
    library, code = (build_folder() / f"{stem}{suffix}" for suffix in (".so", ".cu"))
    code.write_text(text)
    with _compiled_once:
        fibers = compiled_fibers(flags)
    run_compiler(flags, f"-I{fibers}", "-include", "fibers.h", f"-I{HERE}",
                 f"-I{source.folder()}", '-DCF_PTX_TWIN="ptx_twin.h"', f'-DCF_UNIT="{code}"',
                 f"-DCF_ENTRY={name}", f"-DCF_PARAMS={params}", "-shared",
                 str(HERE / "driver.cpp"), str(fibers / "fibers.o"), "-o", str(library))
    return library


@cache
def compiled_fibers(flags):
    """A folder with what all units share, header and code: two thirds of a small unit's time."""
    folder = Path(tempfile.mkdtemp(prefix="fibers_", dir=build_folder()))
    flags = [flag for flag in flags if not flag.startswith(("-l", "-Wl,"))]     # nothing is linked
    run_compiler(flags, "-x", "c++-header", str(HERE / "fibers.h"), "-o",
                 str(folder / "fibers.h.gch"))
    run_compiler(flags, "-c", str(HERE / "fibers.cpp"), "-o", str(folder / "fibers.o"))
    return folder


def run_compiler(flags, *arguments):
    """Run it with these flags; RuntimeError with what it complains of."""
    done = subprocess.run([COMPILER, *FLAGS, *arguments, *flags], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{arguments[-1]} does not compile:\n{done.stderr[:4000]}")


def kernels_with(Br, Bc, warps, registers, hopper, fused, simt):
    """All kernels, with these tiles instead of those of their tables, for problems of any size."""
    changes = {"forward_sm80": {"rows": (registers,) if registers else ()},
               "backward_sm80": {"rows": (FusedTile(256, *fused[:6], 1, "of a test", *fused[6:]),)
                                 if fused else ()},
               "forward_sm90": {"rows": (hopper,), "fewest_rows": 1, "many_keys": 10**6}}
    for entry in ("forward_wmma", "dkdv_wmma", "dq_wmma", "dbias_wmma", "normalise"):
        changes[entry] = {"rows": (Tile(Br, Bc, warps, "of a test"),)}
    for entry in ("forward_simt", "dkdv_simt", "dq_simt", "dbias_simt", "normalise_simt"):
        changes[entry] = {"rows": (simt,) if simt else ()}
    for entry, change in changes.items():
        if isinstance(kernel_of(entry).rows, dict):     # one row for all types
            change["rows"] = dict.fromkeys(kernel_of(entry).rows, change["rows"])
    return tuple(replace(kernel, **changes.get(kernel.entry, {})) for kernel in KERNELS)


class HostMap:
    """What stands for a tensor map on fibers: its arguments as they are."""

    def __init__(self, dtype, extents, strides, box):
        self.words = np.zeros(16, np.uint64)
        self.words[1:12] = *extents, *strides, *box

    def __call__(self, address):
        """The 128 bytes."""
        self.words[0] = address
        return self.words.tobytes()


def put_maps(packed, plan, operands):
    """The maps of q, k, v and out or dout into a struct."""
    kept, tensor_maps.MapMaker = tensor_maps.MapMaker, HostMap
    try:
        maps = tensor_maps.TensorMaps(plan, operands)
    finally:
        tensor_maps.MapMaker = kept
    for name, make in zip(maps.names, maps.makers, strict=True):
        address = params.address(getattr(operands, name))
        packed[f"{name}_map"] = np.frombuffer(make(address), "V128")


class KernelError(RuntimeError):
    """A kernel did not come to its end."""


class Fibers:
    """The GPU that there is not.

    Parameters
    ----------
    Br, Bc, warps : int
        The tile of every kernel.
    seed : int
        Of the order in which fibers run.
    grid : int
        At most so many blocks a launch; fewer than tasks make a block do several.
    sms : int
        Multiprocessors in the eyes of the planner; many of them make it split the keys.
    skip : str
        The name of a barrier, wait or fence that is left out.
    fill : int
        The byte that shared memory starts with; 0xFF makes NaN of it.
    missing : int
        Bytes of shared memory that blocks get less than they ask for.
    flags : tuple of str
        For the compiler.
    registers : cuda_forward_sm80.Row or tuple ()
        The row of the forward kernel in registers; without one the general kernels serve.
    hopper : cuda_forward_sm90.Row or None
        The row of the kernel for sm_90a; without one it does not serve.
    fused : tuple of int
        Br, Bc, warps, roles, parts, stages and, if it is to be, `split_late` of the fused backward
        kernel; the same without.
    simt : cuda_simt.Tile or tuple ()
        The row of all kernels without tensor cores; the same without.
    """

    def __init__(self, Br=16, Bc=16, warps=2, seed=1, grid=3, sms=1, skip="", fill=NAN_BYTE,
                 missing=0, flags=("-O1",), registers=(), hopper=None, fused=(),
                 simt=()):
        self.kernels = kernels_with(Br, Bc, warps, registers, hopper, fused, simt)
        self.seed, self.grid, self.skip, self.fill, self.flags = seed, grid, skip, fill, flags
        self.missing = missing
        self.device = GpuDevice(0, "fibers", 80, sms, 227 << 10,
                                targets=("90a",) if hopper else ())
        self.only = ()                  # the kernels to run; empty: all of a plan
        self.barriers = {}              # entry: the names of the barriers that it reached

    def forward(self, q, k, v, *, out_dtype=None, **options):
        """out and lse, as `cupy_flash.attention` returns them."""
        problem, arrays = bind_forward(q, k, v, Options(**options), out_dtype=out_dtype)
        results = self.run(self.plan("forward", problem), arrays.named)
        return results["out"], results["lse"]

    def backward(self, dout, q, k, v, out, lse, *, dlse=None, grad_dtype=None, wrt=None,
                 deterministic=False, **options):
        """The five fields of `cupy_flash.Gradients`, as `attention_backward` returns them."""
        problem, arrays = bind_backward(dout, q, k, v, out, lse, Options(**options), dlse=dlse,
                                        grad_dtype=grad_dtype, wrt=wrt,
                                        deterministic=deterministic)
        results = self.run(self.plan("backward", problem), arrays.named)
        return tuple(results.get(name) for name in ("dq", "dk", "dv", "dbias", "dsink"))

    def plan(self, direction, problem):
        """The plan that a GPU would get, with this tile."""
        with tuned(kernels=self.kernels):
            return make_plan(direction, problem, self.device)

    def run(self, plan, arrays):
        """Every launch of a plan, in order; workspace and results start as NaN."""
        results = numpy_arrays(missing(plan.direction, plan.problem))
        operands = four_axes(plan.problem, arrays | results)
        for result in results.values():
            _poison(result)
        buffers = {b.name: np.empty(b.extent, b.dtype) for b in plan.workspace}
        for buffer in buffers.values():
            _poison(buffer)
        addresses = {name: params.address(buffer) for name, buffer in buffers.items()}
        launches = [x for x in plan.launches if not self.only or x.entry in self.only]
        for launch in launches:
            build(launch.entry, launch.config, launch.smem_bytes, self.flags)
        for launch in launches:
            packed = params.pack(plan, launch, operands, addresses)
            if any(kernel_of(x.entry).maps for x in plan.launches):
                put_maps(packed, plan, operands)
            self.launch(launch, packed)
        return results

    def launch(self, launch, packed):
        """One kernel."""
        library = _load(build(launch.entry, launch.config, launch.smem_bytes, self.flags).result())
        one_task = kernel_of(launch.entry).grid == ONE_TASK
        grid = launch.tasks if one_task else min(launch.tasks, self.grid)
        code = library.run(packed.ctypes.data, params_bytes(launch.entry), grid, launch.threads,
                           max(0, launch.smem_bytes - self.missing), self.seed,
                           self.skip.encode(), self.fill)
        names = library.barriers().decode().splitlines()
        if code == SAME_NAME:
            raise ValueError(f"{launch.entry}: barriers at two places have the name {names[0]}; "
                             "give each its own, by which it can be left out")
        if code:
            raise KernelError(f"{launch.entry}: {FAULTS[code]}")
        self.barriers[launch.entry] = names


@cache
def _load(path):
    library = ctypes.CDLL(str(path))
    library.run.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_uint,
                            ctypes.c_size_t, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_int)
    library.barriers.restype = ctypes.c_char_p
    return library


def _poison(array):
    array[...] = np.float64(np.nan).astype(array.dtype)

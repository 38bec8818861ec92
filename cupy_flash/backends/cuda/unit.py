"""The text that is compiled: a `Config`, one include, what both sides must agree on, one entry.

There is nothing generated in it but names and numbers; the kernels are templates over `Config`.
"""

from functools import lru_cache

from ...plan.cuda import KERNELS, kernel_of
from . import source
from .structs import structs

ELEMENTS = {"float16": "cf::half_t", "bfloat16": "cf::bfloat16_t", "float32": "float",
            "float64": "double"}
PRECISIONS = {None: 0, "tf32": 1, "tf32x3": 2}

_TEXT = """\
// sources sha256: {digest}
#include "attention/options.cuh"
struct Config {{
  using element = {element};
  static constexpr int precision = {precision};
  static constexpr int d = {d}, d_v = {d_v};
  static constexpr int Br = {Br}, Bc = {Bc}, warps = {warps};
  static constexpr int options = {options};
{constants}}};
#include "{header}"
static_assert(cf::{traits}<Config>::threads == {threads},
              "the planner and the kernel disagree on the threads of a block");
static_assert(cf::{traits}<Config>::smem_bytes == {smem_bytes},
              "the planner and the kernel disagree on the shared memory of a block");
static_assert(sizeof(cf::{params}) == {size},
              "structs.py and the compiler disagree on the size of {params}");
extern "C" __global__ void __launch_bounds__(32 * Config::warps{blocks})
{name}(const __grid_constant__ cf::{params} p) {{
  cf::{entry}<Config>(p);
}}
"""


@lru_cache(maxsize=4096)
def unit(entry, config, smem_bytes):
    """The unit of one kernel.

    Parameters
    ----------
    entry : str
        Of one of `plan.cuda.KERNELS`.
    config : CudaConfig
    smem_bytes : int
        Dynamic shared memory as the planner computed it.

    Returns
    -------
    name : str
        Of the function, readable in a profiler.
    text : str
        What NVRTC compiles, with the folder of the CUDA sources as include path.
    """
    kernel = kernel_of(entry)
    name = name_of(entry, config)
    constants = dict(config.constants)
    lines = (f"  static constexpr int {x} = {value};\n" for x, value in constants.items())
    return name, _TEXT.format(
        digest=source.digest(kernel.header), element=ELEMENTS[config.element],
        precision=PRECISIONS[config.precision], d=config.d, d_v=config.d_v, Br=config.Br,
        Bc=config.Bc, warps=config.warps,
        options=" | ".join(f"cf::{x.upper()}" for x in config.options) or "0",
        header=kernel.header, traits=traits_of(entry), smem_bytes=smem_bytes,
        threads=32 * config.warps, params=kernel.params, size=params_bytes(entry), name=name,
        entry=entry, constants="".join(lines),
        blocks=", Config::blocks" if "blocks" in constants else "",
    )


def name_of(entry, config):
    """The function's name: entry, type, head dims, tile, options and constants."""
    kind = config.element if config.precision is None else config.precision
    width = f"d{config.d}" if config.d == config.d_v else f"d{config.d}v{config.d_v}"
    tile = f"{config.Br}x{config.Bc}"
    constants = [f"{x}{value}" for x, value in config.constants if value]
    return "_".join([entry, kind, width, tile, *config.options, *constants])


def params_bytes(entry):
    """What a kernel takes of the struct that is packed for a plan: all of it, or its beginning."""
    return structs()[kernel_of(entry).params].itemsize


def headers_of(kernels):
    """The headers of which kernels are made, by their names, without what these include."""
    return tuple(sorted({kernel_named(name).header for name in kernels}))


def kernel_named(name):
    """The record of the kernel that a function with the name of a unit is made of."""
    return max((kernel for kernel in KERNELS if name.startswith(f"{kernel.entry}_")),
               key=lambda kernel: len(kernel.entry))


def traits_of(entry):
    """The C++ name of an entry's traits: dq_wmma -> DqWmmaTraits."""
    return "".join(word.capitalize() for word in entry.split("_")) + "Traits"

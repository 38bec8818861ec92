"""Fragments in registers: every way into a product, on fibers, and under NVRTC for every GPU."""

from pathlib import Path

import numpy as np
import nvrtc
import pytest
from cases import DTYPES, KINDS
from cuda_on_cpu import harness
from cuda_on_cpu.harness import COMPILER
from units import SMEM

from cupy_flash.backends.cuda.params import _tensor
from cupy_flash.backends.cuda.structs import structs
from cupy_flash.backends.cuda.unit import ELEMENTS, PRECISIONS

# The largest difference in units of the largest product: the operands are exact but in TF32.
LIMIT = {"float16": 1e-6, "bfloat16": 1e-6, "tf32": 2e-3, "tf32x3": 1e-6, "float64": 1e-15}
Tensor = structs()["Tensor"]
Params = np.dtype([("a", Tensor), ("b", Tensor), ("a_t", Tensor), ("b_t", Tensor), ("out", "u8"),
                   ("vector_bytes", "i8")])
TEXT = """\
#include "base.cuh"
struct Config {{
  using element = {element};
  static constexpr int precision = {precision}, warps = 1;
}};
#include "{header}"
extern "C" __global__ void fragments(const __grid_constant__ cf::FragmentsParams p) {{
  cf::fragments<Config>(p);
}}
"""


def text(kind):
    """The unit of a kind."""
    element, precision = KINDS[kind]
    return TEXT.format(element=ELEMENTS[element], precision=PRECISIONS[precision],
                       header=Path(__file__).parent / "fragments.cuh")


def products(kind, vector_bytes, skip="", diagonal=False):
    """A, B and three times A B on fibers; the names of waits and barriers."""
    dtype = DTYPES[KINDS[kind][0]]
    rng = np.random.default_rng(7)
    a, b = (rng.standard_normal((16, 16)).astype(dtype) for _ in range(2))
    if diagonal:                            # of all positions between two numbers of TF32
        values = (1 + np.linspace(0, 2**-9, 16)).astype(dtype)
        a, b = np.diag(values), np.tile(values, (16, 1))
    tiles = [np.ascontiguousarray(x) for x in (a, b.T, a.T, b)]
    out = np.full((3, 16, 16), np.nan, np.float64 if kind == "float64" else np.float32)
    packed = np.zeros(1, Params)
    for name, x in zip(("a", "b", "a_t", "b_t"), tiles, strict=True):
        packed[name] = _tensor(x[None, None])
    packed["out"], packed["vector_bytes"] = out.ctypes.data, vector_bytes
    path = harness.compile_unit(f"fragments_{kind}", text(kind), "fragments",
                                "cf::FragmentsParams", ("-O1",))
    library = harness._load(path)
    assert not library.run(packed.ctypes.data, packed.nbytes, 1, 32, 1 << 14, 1, skip.encode(), 255)
    return a.astype(np.float64), b.astype(np.float64), out, library.barriers().decode().split()


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler on Linux")
@pytest.mark.parametrize("vector_bytes", [16, 8, 4, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_into_a_product(kind, vector_bytes):
    a, b, out, _ = products(kind, vector_bytes)
    assert np.abs(out - a @ b).max() <= LIMIT[kind] * np.abs(a @ b).max()


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler on Linux")
def test_no_single_product_of_3xtf32_is_far_off():
    """The product of the rests, which is left out, and what is cut off a rest: of either sign."""
    a, b, out, _ = products("tf32x3", 16, diagonal=True)
    error = (out - a @ b) / (a @ b)
    assert np.abs(error).max() <= 2**-20.6 and np.abs(error.mean()) <= 2**-25


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler on Linux")
def test_every_wait_is_needed():
    """In TF32 each group of copies is rounded behind the wait for it."""
    *_, want, names = products("tf32", 16)
    waits = {"first_copied", "second_copied"}
    assert set(names) == {*waits, "tiles_ready"}        # which one warp does not need
    for name in waits:
        assert not np.array_equal(products("tf32", 16, name)[2], want), name


@pytest.mark.parametrize("arch", SMEM)
@pytest.mark.parametrize("kind", KINDS)
def test_instructions_of_every_architecture(kind, arch):
    cubin, log = nvrtc.compile(text(kind), arch)
    assert cubin is not None, log

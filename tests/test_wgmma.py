"""The products of sm_90a alone, with operands whose products are exact: on fibers and on a GPU."""

from pathlib import Path

import numpy as np
import nvrtc
import pytest
from cases import DTYPES
from conftest import GPU_MISSING
from cuda_on_cpu import harness
from cuda_on_cpu.harness import COMPILER

from cupy_flash.backends.cuda import compile as compiled
from cupy_flash.backends.cuda import tensor_maps
from cupy_flash.backends.cuda.unit import ELEMENTS

# Columns of the first product and of the second.
WIDTHS = ((128, 64), (128, 128), (112, 192), (80, 256), (176, 80))
Params = np.dtype([("a_map", "V128"), ("b_map", "V128"), ("v_map", "V128"), ("S", "u8"),
                   ("out", "u8"), ("across", "u8"), ("plain", "u8"), ("copied", "u8"),
                   ("pad", "V24")])
RESULTS = ("S", "out", "across", "copied")
TEXT = """\
#include "{header}"
static_assert(sizeof(cf::WgmmaParams) == {size}, "the sizes differ");
extern "C" __global__ void hopper_products(const __grid_constant__ cf::WgmmaParams p) {{
  cf::wgmma_products<{element}, {N}, {M}>(p);
}}
"""


def text(dtype, N, M):
    """The unit of a type and widths."""
    return TEXT.format(header=Path(__file__).parent / "wgmma.cuh", element=ELEMENTS[dtype], N=N,
                       M=M, size=Params.itemsize)


def smem_bytes(N, M):
    """Shared memory of the unit."""
    return 1024 + 128 * (64 + N + N * -(-M // 64))


def operands(dtype, N, M):
    """Small integers: all sums are exact, and A B^T is exact in the element type."""
    rng = np.random.default_rng(N)
    A = np.zeros((64, 64))
    A[np.arange(64), rng.permutation(64)] = rng.integers(-2, 3, 64)
    B, V = rng.integers(-7, 8, (N, 64)), rng.integers(-7, 8, (N, M))
    return [x.astype(DTYPES[dtype]) for x in (A, B, V)]


def pack(make, arrays, addresses, results, dtype):
    """The parameters; `make` is a `MapMaker` or stands for one."""
    packed = np.zeros(1, Params)
    for name, x, address in zip(("a_map", "b_map", "v_map"), arrays, addresses, strict=True):
        rows, columns = x.shape
        box = make(dtype, (columns, rows, 1, 1), (2 * columns, 16, 16), (64, rows, 1, 1))
        packed[name] = np.frombuffer(box(address), "V128")
    packed["plain"], *places = results
    for name, place in zip(RESULTS, places, strict=True):
        packed[name] = place
    return packed


def results(N, M):
    """32 numbers to be copied, and NaN for what the unit writes."""
    shapes = ((64, N), (64, M), (64, 64), (32,))
    return [np.arange(32, dtype=np.float32), *(np.full(x, np.nan, np.float32) for x in shapes)]


def expected(arrays):
    A, B, V = (x.astype(np.float64) for x in arrays)
    return A @ B.T, A @ B.T @ V, B.T @ V[:, :64], np.arange(32)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler on Linux")
@pytest.mark.parametrize("N, M", WIDTHS)
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_products_on_fibers(dtype, N, M):
    arrays = [np.ascontiguousarray(x) for x in operands(dtype, N, M)]
    written = results(N, M)
    packed = pack(harness.HostMap, arrays, [x.ctypes.data for x in arrays],
                  [x.ctypes.data for x in written], dtype)
    path = harness.compile_unit(f"wgmma_{dtype}_{N}_{M}", text(dtype, N, M), "hopper_products",
                                "cf::WgmmaParams", ("-O1",))
    library = harness._load(path)
    assert not library.run(packed.ctypes.data, packed.nbytes, 1, 128, smem_bytes(N, M), 1, b"", 255)
    for got, want in zip(written[1:], expected(arrays), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_products_compile(dtype):
    for N, M in WIDTHS:
        cubin, log = nvrtc.compile(text(dtype, N, M), "90a")
        assert cubin is not None and "C75" not in log, log


@pytest.mark.gpu
@pytest.mark.skipif(GPU_MISSING is not None, reason="needs a GPU")
@pytest.mark.parametrize("N, M", WIDTHS)
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_products_on_a_gpu(dtype, N, M):
    import cupy

    from cupy_flash import device

    if "90a" not in device.gpu(0).targets:
        pytest.skip("needs sm_90")
    arrays = operands(dtype, N, M)
    on_gpu = [cupy.asarray(x.view(np.uint16)) for x in arrays]
    written = [cupy.asarray(x) for x in results(N, M)]
    packed = pack(tensor_maps.MapMaker, on_gpu, [x.data.ptr for x in on_gpu],
                  [x.data.ptr for x in written], dtype)
    kernel = compiled._compiled("hopper_products", text(dtype, N, M), "90a")
    kernel.max_dynamic_shared_size_bytes = smem_bytes(N, M)
    kernel((1,), (128,), (packed.view(f"V{Params.itemsize}"),), shared_mem=smem_bytes(N, M))
    for got, want in zip(written[1:], expected(arrays), strict=True):
        np.testing.assert_array_equal(got.get(), want)

"""The way of results through shared memory alone: on fibers and on a GPU."""

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

COLUMNS, SMEM_BYTES = 128, 2048
# Rows, heads of each and columns that the array has, of [8, 2, 104] elements in memory; the boxes
# have 8 rows of 2 heads.
SHAPE, INSIDE = (8, 2, 104), (6, 2, 96)
OUTSIDE = 99
TEXT = """\
#include "{header}"
extern "C" __global__ void hopper_stores(const __grid_constant__ cf::StoreParams p) {{
  cf::store_rows<{element}, {columns}>(p);
}}
"""
KINDS = pytest.mark.parametrize("dtype", ("float16", "bfloat16"))


def text(dtype):
    """The unit of a type."""
    return TEXT.format(header=Path(__file__).parent / "stores.cuh", element=ELEMENTS[dtype],
                       columns=COLUMNS)


def pack(make, dtype, address):
    """The parameters; `make` is a `MapMaker` or stands for one."""
    rows, heads, columns = INSIDE
    box = make(dtype, (columns, heads, rows, 1), (208, 416, 16), (64, 2, 8, 1))
    return np.frombuffer(box(address), "V128").copy()


def expected(dtype):
    """The array after the kernel: outside of it nothing has changed."""
    row, head, column = np.indices(SHAPE)
    value = (37 * (2 * row + head) + column) % 251 - 125
    inside = (row < INSIDE[0]) & (column < INSIDE[2])
    return np.where(inside, value, OUTSIDE).astype(DTYPES[dtype])


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler on Linux")
@KINDS
def test_stores_on_fibers(dtype):
    path = harness.compile_unit(f"stores_{dtype}", text(dtype), "hopper_stores",
                                "cf::StoreParams", ("-O1",))
    library = harness._load(path)
    for seed in range(8):
        out = np.full(SHAPE, OUTSIDE).astype(DTYPES[dtype])
        packed = pack(harness.HostMap, dtype, out.ctypes.data)
        assert not library.run(packed.ctypes.data, packed.nbytes, 1, 32, SMEM_BYTES, seed, b"", 255)
        assert out.tobytes() == expected(dtype).tobytes()


@KINDS
def test_stores_compile(dtype):
    cubin, log = nvrtc.compile(text(dtype), "90a")
    assert cubin is not None, log


@pytest.mark.gpu
@pytest.mark.skipif(GPU_MISSING is not None, reason="needs a GPU")
@KINDS
def test_stores_on_a_gpu(dtype):
    import cupy

    from cupy_flash import device

    if "90a" not in device.gpu(0).targets:
        pytest.skip("needs sm_90")
    out = cupy.asarray(np.full(SHAPE, OUTSIDE).astype(DTYPES[dtype]).view(np.uint16))
    packed = pack(tensor_maps.MapMaker, dtype, out.data.ptr)
    kernel = compiled._compiled("hopper_stores", text(dtype), "90a")
    kernel((1,), (32,), (packed,), shared_mem=SMEM_BYTES)
    assert out.get().tobytes() == expected(dtype).tobytes()

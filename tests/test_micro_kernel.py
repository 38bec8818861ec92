"""The micro-kernels of the CPU path: which one fits, and each by name, whatever this processor has.

Each sum has the same terms in the same order in all of them, so they have the same bits.
"""

import os
import subprocess
import sys
from functools import cache

import numba
import numpy as np
import pytest

from cupy_flash import device, processors, reference
from cupy_flash.backends.cpu import micro_kernel as products
from cupy_flash.plan import cpu as planner
from cupy_flash.plan import make_plan
from cupy_flash.plan.cpu import CHAIN, MICRO_KERNELS, VECTOR_BYTES, micro_kernel
from cupy_flash.problem import Mask, Problem

# Beside a processor without the width, LLVM splits the vectors: every kernel runs everywhere.
PROGRAM = """\
import sys
import numpy as np
import cupy_flash as cf
name, q, k, v, dout = sys.argv[1], *np.load(sys.argv[2]).values()
out, lse = cf.attention(q, k, v, causal=True, return_lse=True)
gradients = cf.attention_backward(dout, q, k, v, out, lse, causal=True)
np.savez(name, out, lse, *gradients[:3])
"""


@pytest.mark.parametrize("bits, name", [(128, "6x1"), (256, "6x1"), (512, "4x4")])
def test_the_vector_registers_decide(bits, name):
    kernel = micro_kernel(device.Device("cpu", 2, bits))
    assert kernel == MICRO_KERNELS[name]
    assert "{}x{}".format(*kernel.shapes[0]) == name


def test_a_name_decides_before_the_registers_do(monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_MICRO_KERNEL", "6x1")
    asked = device.cpu.__wrapped__()
    assert micro_kernel(asked) == MICRO_KERNELS["6x1"]
    assert "CUPY_FLASH_MICRO_KERNEL=6x1" in str(asked)


def test_a_name_that_no_micro_kernel_has():
    with pytest.raises(ValueError, match="CUPY_FLASH_MICRO_KERNEL is '8x8', expected one of 6x1"):
        micro_kernel(device.Device("cpu", 2, 512, "8x8"))


@pytest.mark.parametrize("features, bits", [("+sse2,+ssse3", 128), ("+avx,+avx2,+fma", 256),
                                            ("+avx2,+avx512f", 512), ("+avx2,-avx512f", 256)])
def test_the_registers_are_those_that_numba_compiles_for(monkeypatch, features, bits):
    from numba.core.registry import cpu_target

    codegen = cpu_target.target_context.codegen()
    monkeypatch.setattr(codegen, "_tm_features", features)
    assert processors.vector_bits() == bits


def test_shapes_fit_each_other_and_the_tiles():
    for kernel in MICRO_KERNELS.values():
        vectors = [vectors for _, vectors in kernel.shapes]
        assert vectors == sorted(vectors, reverse=True) and vectors[-1] == 1
        assert all(kernel.rows % rows == 0 for rows, _ in kernel.shapes)
        assert kernel.rows <= planner.SURPLUS_ROWS
        assert kernel.Br % (vectors[0] * VECTOR_BYTES // 4) == 0 == planner.KEYS % kernel.rows


@cache
def compiled(rows, vectors):
    """A product of one micro-kernel, as a function."""
    kernel = products._make_micro_kernel(rows, vectors)

    @numba.njit(fastmath={"contract"}, error_model="numpy")
    def product(c, a, b, first, end, accumulate, factor):
        kernel(c, a, b, 0, 0, first, end, accumulate, factor)

    return product


def by_hand(c, a, b, first, end, accumulate, factor):
    """The same, one rounding at a time: chains of CHAIN terms, then their total."""
    total = np.zeros_like(c)
    for start in range(first, end, CHAIN):
        chain = np.zeros_like(c)
        for i in range(start, min(start + CHAIN, end)):
            # The product is exact in long double, so this is rounded once, like an FMA.
            term = a[:, i, None].astype(np.longdouble) * b[i].astype(np.longdouble)
            chain = (chain + term).astype(c.dtype)
        total += chain
    return c + total if accumulate else total * factor


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("rows, vectors", [
    (1, 4), *sorted({shape for kernel in MICRO_KERNELS.values() for shape in kernel.shapes})])
def test_every_shape_has_the_bits_of_a_sum_by_hand(rows, vectors, accumulate):
    columns, depth, first, end = vectors * VECTOR_BYTES // 4, 70, 3, 66
    rng = np.random.default_rng(0)
    shapes = (rows, columns), (depth, rows), (depth, columns)
    c, a, b = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    arguments = a.T, b, first, end, accumulate, np.float32(0.3)
    want = by_hand(c, *arguments)
    compiled(rows, vectors)(c, *arguments)
    np.testing.assert_array_equal(c, want)


def test_every_micro_kernel_in_the_whole_path(tmp_path):
    """Nq below a tile of either kernel, so that rows are cut alike: the same bits of everything."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 2, 83, d)).astype(np.float32) for d in (40, 40, 24, 24)]
    np.savez(tmp_path / "arrays.npz", *arrays)
    results = {}
    for name in MICRO_KERNELS:
        environment = os.environ | {"CUPY_FLASH_MICRO_KERNEL": name}
        path = tmp_path / f"{name}.npz"
        subprocess.run([sys.executable, "-c", PROGRAM, path, tmp_path / "arrays.npz"], check=True,
                       env=environment, timeout=300)
        results[name] = list(np.load(path).values())
    out = reference.attention(*arrays[:3], causal=True)[0]
    np.testing.assert_allclose(results["6x1"][0], out, atol=1e-6)
    for x, y in zip(results["6x1"], results["4x4"], strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_plan_says_how_wide_the_vectors_are():
    problem = Problem(1, 8, 8, 1000, 1000, 64, 64, "float32", "float32", "tf32x3", 0.125, 0.0,
                      Mask())
    plan = str(make_plan("forward", problem, device.Device("cpu", 2, 512)))
    assert "512-bit vectors" in plan and "Br 128" in plan

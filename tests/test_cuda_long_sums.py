"""Sums over many rows and keys on a GPU: the rows in pieces and splits, products added up outside
of the tensor cores. The kernels run on fibers, with short pieces; which calls get them is planned.
"""

from dataclasses import replace

import numpy as np
import pytest
from answers import answers_to
from cases import KINDS, Case, inputs
from cuda_on_cpu.harness import COMPILER, Fibers
from problems import problem_of
from test_cuda_on_cpu import assert_same, on_cpu, wide
from test_cuda_on_cpu_fused import small_tile

import cupy_flash as cf
from cupy_flash.device import GpuDevice
from cupy_flash.plan import long_sums, make_plan
from cupy_flash.plan.cuda_forward_sm80 import Row
from cupy_flash.problem import UNLIMITED, Mask

PIECE = 64
HOPPER = GpuDevice(0, "a pretended H200", 90, 132, 227 * 1024, targets=("90a",))
CASES = {
    "plain": {},
    "gqa-causal": {"Hq": 4, "causal": True},
    "window-lens": {"B": 2, "window": (90, 70), "q_lens": (230, 77), "kv_lens": (90, 41)},
    "own-dbias": {"bias": "bhqk", "causal": True, "q_offset": -60},
    "added-dbias": {"bias": "11qk", "causal": True},
    "dbias-over-rows": {"bias": "b11k", "B": 2, "Hq": 4, "q_lens": (250, 70)},
    "dbias-over-keys": {"bias": "1hq1"},
    "broadcast-dbias": {"bias": "1h1k", "softcap": 9.0, "mask": "dense"},
    "no-rows": {"q_lens": (0,)},
}


@pytest.fixture
def short_pieces(monkeypatch):
    """Pieces of a few tiles, and splits of more than one piece."""
    monkeypatch.setattr(long_sums, "PIECE", PIECE)
    monkeypatch.setattr(long_sums, "IN_TENSOR_CORES",
                        dict.fromkeys(long_sums.IN_TENSOR_CORES, 2 * PIECE))


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler on Linux")
@pytest.mark.parametrize("kind", ["float16", "tf32x3", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_pieces(name, kind, short_pieces):
    """The general and the fused kernel give what they give in one walk."""
    dtype, precision = KINDS[kind]
    x = inputs(Case("pieces", Nq=250, Nk=90, d=20, d_v=36, dtype=dtype, precision=precision,
                    **({"Hq": 2, "Hk": 2} | CASES[name])))
    out, lse, *want = on_cpu(x)
    for tile in ((), small_tile(x, kind)):
        gpu = Fibers(fused=tile, sms=12, Br=32, Bc=32, warps=4)
        got = gpu.backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse, grad_dtype=wide(x),
                           **x.options)
        assert "backward_sum" in gpu.barriers
        assert_same(name, kind, (out, lse, *got), (out, lse, *want))


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler on Linux")
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_forward_sums_leave_the_tensor_cores(kind, short_pieces):
    x = inputs(Case("long", Nq=40, Nk=300, d=32, d_v=32, Hq=1, Hk=1, dtype=kind, data="mean1"))
    out, lse, *_ = on_cpu(x)
    for registers in ((), Row(32, 16, 2, 256, "of a test"),
                      Row(32, 32, 4, 256, "of a test", pairs=True)):
        got = Fibers(registers=registers, Br=32, Bc=32, warps=4).forward(
            x.q, x.k, x.v, out_dtype=np.float32, **x.options)
        assert_same(kind, kind, got, (out, lse))


def problem(dtype, Nq, Nk, out_dtype, **options):
    precision = {"float32": "tf32x3"}.get(dtype)
    return problem_of(batch=1, heads_q=8, heads_k=8, Nq=Nq, Nk=Nk, d=64, d_v=64, dtype=dtype,
                      out_dtype=out_dtype, precision=precision, scale=0.125, softcap=0.0,
                      **({"mask": Mask()} | options))


def main_launch(direction, *args, **options):
    plan = make_plan(direction, problem(*args, **options), HOPPER)
    return next(x for x in plan.launches
                if x.entry not in ("backward_preprocess", "combine"))


@pytest.mark.parametrize("dtype, out_dtype, most", [
    ("float16", "float32", 2**11), ("bfloat16", "float32", 2**13),
    ("float16", "float16", 2**17), ("bfloat16", "bfloat16", 2**20)])
def test_which_sums_leave_the_tensor_cores(dtype, out_dtype, most):
    for Nk, entry in ((most, "forward_sm90"), (most + 1, "forward_sm80")):
        launch = main_launch("forward", dtype, 20000, Nk, out_dtype)
        assert launch.entry == entry
        assert ("fresh", 1) in launch.config.constants or Nk == most
    for Nq, entry in ((most, "backward_sm90"), (most + 1, "backward_sm80")):
        launch = main_launch("backward", dtype, Nq, 20000, out_dtype)
        assert launch.entry == entry
        assert ("fresh", 1) in launch.config.constants or Nq == most


def test_a_window_keeps_sums_short():
    mask = Mask(left=500, right=0)
    assert main_launch("forward", "float16", 9000, 9000, "float32", mask=mask).entry == (
        "forward_sm90")
    assert main_launch("backward", "float16", 9000, 9000, "float32", mask=mask).entry == (
        "backward_sm90")
    assert long_sums.keys_of_a_row(problem("float16", 9, 70, "float32", mask=mask)) == 70
    assert Mask().left == UNLIMITED


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_few_keys_and_many_rows_fill_the_gpu(dtype):
    """One tile of keys and 2^20 rows: the rows are split, and sums stay within their pieces."""
    one = replace(problem(dtype, 2**20, 40, dtype), batch=1, heads_q=1, heads_k=1)
    plan = make_plan("backward", one, HOPPER)
    main = next(x for x in plan.launches if x.entry == "backward_sm80")
    assert main.splits == main.tasks == 256
    assert dict(main.config.constants)["pieces"] == 2**11
    sums = sum(b.nbytes for b in plan.workspace if b.name in ("dk_sums", "dv_sums"))
    assert sums == 256 * 40 * (64 + 64) * (8 if dtype == "float64" else 4)
    assert long_sums.split_rows(2**20, main.splits) == 2**12


LOWEST = float(np.finfo(np.float32).min)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler on Linux")
@pytest.mark.parametrize("kind", ["float16", "tf32x3", "float64"])
@pytest.mark.parametrize("shape", [(1, 4, 45, 70), (1, 1, 45, 70)], ids=["own", "broadcast"])
def test_rows_whose_lse_cannot_hold_ln_l(shape, kind):
    """A bias of the lowest number for every key of a row: P is 1 / n there, not 1."""
    dtype, precision = KINDS[kind]
    x = inputs(Case("lowest", Nq=45, Nk=70, Hq=4, Hk=2, d=20, d_v=36, dtype=dtype,
                    precision=precision))
    bias = np.zeros(shape, np.float32)
    bias[:, :, [0, 17, 44]] = LOWEST
    bias[:, :, 17, 30:] = -np.inf
    x.options["bias"] = bias
    want, _ = answers_to(x)
    out, lse = cf.attention(x.q, x.k, x.v, return_lse=True, out_dtype=wide(x), **x.options)
    for tile in ((), small_tile(x, kind)):
        gpu = Fibers(fused=tile, Br=32, Bc=32, warps=4)
        got = gpu.backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse, grad_dtype=wide(x),
                           **x.options)
        # Against the reference itself, which rounds no P: twice what two devices may differ by.
        assert_same(str(shape), kind, (out, lse, *got), want, factor=2)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler on Linux")
@pytest.mark.parametrize("kind", ["float16", "tf32x3", "float64"])
def test_splits_of_unequal_length_beside_a_large_score(kind):
    """The last split has fewer keys than the others, and a weight that says so."""
    dtype, precision = KINDS[kind]
    x = inputs(Case("splits", Nq=2, Nk=1100, Hq=1, Hk=1, d=20, d_v=36, dtype=dtype,
                    precision=precision, data="mean1"))
    x.options["bias"] = np.full((1, 1, 2, 1100), LOWEST, np.float32)
    x.v[..., 1000:, :] += 3
    want, _ = answers_to(x)
    gpu = Fibers(sms=4, Br=32, Bc=32, warps=4)
    out, lse = gpu.forward(x.q, x.k, x.v, out_dtype=wide(x), **x.options)
    assert "combine" in gpu.barriers
    assert_same("splits", kind, (out, lse), want[:2])

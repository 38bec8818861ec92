"""Sums over very many rows and keys on a GPU, and rows whose lse cannot hold ln l."""

from functools import cache

import numpy as np
import pytest
from answers import Answer
from cases import DTYPES
from numerics import assert_as_accurate_as_baseline

import cupy_flash as cf
from cupy_flash import reference

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
D = 64


@pytest.fixture
def cp():
    """CuPy."""
    return pytest.importorskip("cupy")


def arrays(dtype, Nq, Nk):
    """q, k, v, dout with values of mean 1 in v and dout: their sums lose what a chain cuts off."""
    rng = np.random.default_rng(Nq + Nk)
    q, k = (factor * rng.standard_normal((1, n, D), np.float32)
            for factor, n in ((1, Nq), (0.3, Nk)))
    v, dout = (rng.uniform(0.5, 1.5, (1, n, D)).astype(np.float32) for n in (Nk, Nq))
    return [x.astype(DTYPES[dtype]) for x in (q, k, v, dout)]


@cache
def answers(dtype, rows, out_dtype):
    """The reference's and the baseline's answers."""
    q, k, v, dout = arrays(dtype, rows, 40)
    wide = np.longdouble if q.dtype == np.float64 else np.float64
    want = (*reference.attention(q, k, v, compute_dtype=wide),
            *reference.attention_backward(dout, q, k, v, compute_dtype=wide))
    plain = (*reference.baseline(q, k, v),
             *reference.baseline_backward(dout, q, k, v, out_dtype=out_dtype))
    return Answer(*want), Answer(*plain)


def judge(name, got, want, plain):
    """Hold the arrays of `got` (a dict) against the reference and the baseline."""
    for field, array in got.items():
        truth = getattr(want, field)
        assert_as_accurate_as_baseline(f"{name} {field}", array, truth,
                                       [(truth, getattr(plain, field))])


def to_gpu(cp, x):
    """A CuPy array with the same bits."""
    return cp.asarray(x) if x.dtype.name != "bfloat16" else cp.asarray(
        x.view(np.uint16)).view(x.dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_over_very_many_rows(cp, dtype, deterministic):
    rows = 2**15 if dtype == "float64" else 2**18       # the reference is slow in long double
    q, k, v, dout = (to_gpu(cp, a) for a in arrays(dtype, rows, 40))
    wide = "float64" if dtype == "float64" else "float32"
    out, lse = cf.attention(q, k, v, return_lse=True, out_dtype=wide)
    known = answers(dtype, rows, wide)
    for grad_dtype in dict.fromkeys((wide, None)):
        g = cf.attention_backward(dout, q, k, v, out, lse, grad_dtype=grad_dtype,
                                  deterministic=deterministic)
        judge(f"{dtype} {grad_dtype}", {n: getattr(g, n).get() for n in ("dq", "dk", "dv")}, *known)


@pytest.mark.parametrize("Nk", [2**18, 2**22])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_results_over_very_many_keys(cp, dtype, Nk):
    """Eight queries whose keys are split, and float32 results, which are finer than P."""
    x = arrays(dtype, 8, Nk)
    q, k, v = (to_gpu(cp, a) for a in x[:3])
    out, lse = cf.attention(q, k, v, return_lse=True, out_dtype="float32")
    want, plain = reference.attention(*x[:3]), reference.baseline(*x[:3])
    none = (None,) * 4
    judge(dtype, {"out": out.get(), "lse": lse.get()}, Answer(*want, *none), Answer(*plain, *none))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_many_rows_over_many_keys(cp, dtype):
    """More tiles of rows than multiprocessors: nothing is split, and no sum loses digits."""
    x = arrays(dtype, 20000, 2**14)
    q, k, v = (to_gpu(cp, a) for a in x[:3])
    out = cf.attention(q, k, v, out_dtype="float32").get()[:, ::40]
    some = (x[0][:, ::40], *x[1:3])
    none = (None,) * 5
    judge(dtype, {"out": out}, Answer(reference.attention(*some)[0], *none),
          Answer(reference.baseline(*some)[0], *none))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 70, 50), (1, 1, 70, 50), (1, 2, 70, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rows_whose_lse_cannot_hold_ln_l(cp, dtype, shape, deterministic):
    """Every key of three rows has the lowest bias: P is 1 / n there, and gradients are finite."""
    rng = np.random.default_rng(0)
    x = [rng.standard_normal((1, 2, n, D)).astype(dtype) for n in (70, 50, 50, 70)]
    bias = np.zeros(shape, np.float32)
    bias[:, :, [0, 5, 69]] = np.finfo(np.float32).min
    q, k, v, dout = (cp.asarray(a) for a in x)
    options = {"bias": cp.asarray(bias)}
    out, lse = cf.attention(q, k, v, return_lse=True, **options)
    g = cf.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic, **options)
    want = reference.attention_backward(x[3], *x[:3], bias=bias)
    # The same rows at 0: their P is the same, and lse holds it.
    zero = reference.baseline_backward(x[3], *x[:3], bias=np.zeros_like(bias), out_dtype=dtype)
    level = reference.attention_backward(x[3], *x[:3], bias=np.zeros_like(bias))
    for name, got, right, plain, exact in zip(("dq", "dk", "dv"), g, want, zero, level,
                                              strict=False):
        judge(name, {name: got.get()}, answer(name, right), answer(name, right + (plain - exact)))


def answer(name, array):
    """An `Answer` that has one array."""
    return Answer(*(array if field == name else None for field in Answer._fields))

"""Sums of any length keep the rule: over keys in forward and dQ, over rows in dK, dV and dbias.

Data are of one sign, so that what a sum loses shows beside its value, or all alike, so that all of
its roundings go one way.
"""

import numpy as np
import pytest
from answers import answers_to, judge
from cases import Inputs
from numerics import assert_as_accurate_as_baseline

import cupy_flash as cf
from cupy_flash import device, reference


def uniform(rng, shape, dtype, low=1.0):
    return rng.uniform(low, 2, shape).astype(dtype)


def judge_forward(name, backend, q, k, v):
    """out and lse of many keys."""
    wide = np.longdouble if q.dtype == np.float64 else np.float64
    want = reference.attention(q, k, v, compute_dtype=wide)
    plain = reference.baseline(q, k, v)
    got = cf.attention(*map(backend.asarray, (q, k, v)), return_lse=True)
    for field, *answer in zip(("out", "lse"), got, want, plain, strict=True):
        assert_as_accurate_as_baseline(f"{name} {field}", backend.asnumpy(answer[0]), answer[1],
                                       [answer[1:]])


def judge_all(name, backend, x):
    """All results, the gradients of lse = 1 among them: without it, rows of dS add up to 0."""
    y = backend.move(x)
    out, lse = cf.attention(y.q, y.k, y.v, return_lse=True, **y.options)
    g = cf.attention_backward(y.dout, y.q, y.k, y.v, out, lse, dlse=y.dlse, **y.options)
    got = {"out": out, "lse": lse, **g._asdict()}
    got = {key: None if a is None else backend.asnumpy(a) for key, a in got.items()}
    judge(name, got, *answers_to(x))


def problem(q_shape, k_shape, dtype=np.float32, bias=None, seed=0):
    """q, k of both signs but small, v, dout, dlse about 1.5."""
    rng = np.random.default_rng(seed)
    q = 0.3 * rng.standard_normal(q_shape)
    k = uniform(rng, k_shape, dtype)
    options = {} if bias is None else {"bias": rng.standard_normal(bias).astype(dtype)}
    return Inputs(q.astype(dtype), k, uniform(rng, k_shape, dtype), uniform(rng, q_shape, dtype),
                  uniform(rng, q_shape[:-1], dtype), options)


def test_keys_by_the_tile(backend):
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((n, 64)).astype(np.float32) for n in (64, 65536))
    judge_forward("64 x 65536", backend, q, np.float32(0.3) * k,
                  uniform(rng, (65536, 64), np.float32))


@pytest.mark.parametrize("rows, keys, d, dtype", [
    (1, 2**21, 1, np.float32), (6, 2**20, 1, np.float32), (6, 2**18, 1, np.float64),
    (1, 2**19, 16, np.float32), (3, 2**18, 8, np.float64),
])
def test_keys_of_few_rows(backend, rows, keys, d, dtype):
    """With whole vectors of keys read in place, and without."""
    rng = np.random.default_rng(1)
    q, k = (0.1 * rng.standard_normal((n, d)) for n in (rows, keys))
    q, k, v = q.astype(dtype), k.astype(dtype), uniform(rng, (keys, d), dtype)
    judge_forward("uniform", backend, q, k, v)
    judge_forward("alike", backend, q, np.full_like(k, 0.3), np.full_like(v, 1.1))


def test_a_maximum_that_comes_late(backend):
    """What has left the nearest level is rescaled with it."""
    rng = np.random.default_rng(2)
    q, k = np.ones((7, 1), np.float32), rng.standard_normal((2**16, 1)).astype(np.float32)
    for at in (5000, 20000, 60000):
        k[at] = at / 2000
    judge_forward("late", backend, q, k, uniform(rng, (2**16, 3), np.float32))


def test_infinities_stay_infinities():
    """The rounding error of an infinite sum is NaN, and so is what 3xTF32 keeps of an infinity."""
    v = np.ones((20000, 2), np.float32)
    v[100, 0] = np.inf
    for rows in (1, 5):
        q, k = np.ones((rows, 2), np.float32), np.ones((20000, 2), np.float32)
        out, lse = cf.attention(q, k, v, return_lse=True)
        assert (out == np.float32([np.inf, 1])).all()
        assert np.isfinite(lse).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows(backend, dtype):
    rows = 2**18 if dtype == np.float32 else 2**15
    judge_all("rows", backend, problem((rows, 16), (16, 16), dtype))


def test_rows_of_grouped_heads(backend):
    judge_all("heads", backend, problem((64, 1024, 16), (1, 16, 16)))


def test_keys_of_the_gradient_of_q(backend):
    judge_all("keys", backend, problem((20, 16), (2**17, 16)))


@pytest.mark.parametrize("q_shape, keys, bias", [
    ((2, 2, 2**14, 4), 30, (1, 30)), ((2, 2, 2**14, 4), 30, (1, 1)), ((5, 4), 2**17, (5, 1)),
    ((256, 32, 6, 4), 7, (6, 7)),
], ids=["rows", "rows and keys", "keys", "batch and heads"])
def test_the_gradient_of_a_broadcast_bias(backend, q_shape, keys, bias):
    judge_all("dbias", backend, problem(q_shape, (*q_shape[:-2], keys, 4), bias=bias))


def test_splits_and_chunks(backend, monkeypatch):
    """Many of them: the sums over splits and over chunks are sums as well."""
    monkeypatch.setattr(device, "cpu", lambda: device.Device("cpu", 256))
    rng = np.random.default_rng(3)
    keys = uniform(rng, (2**18, 1), np.float32)
    judge_forward("splits", backend, np.zeros((7, 1), np.float32), np.full_like(keys, 0.3),
                  np.full_like(keys, 1.1))
    judge_all("chunks", backend, problem((2**16, 1), (7, 1)))

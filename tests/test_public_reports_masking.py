"""Faults that users of attention kernels met, as small inputs with the answers worked out by hand.

This file: which keys are seen, rows that see none, minus infinity and very large logits.
"""

import numpy as np
import pytest
from answers import answers_to, judge
from cases import DTYPES, Case, inputs
from numerics import assert_bit_equal
from test_backward import gradients
from test_forward import attend

import cupy_flash as cf

INF = np.inf
ALL = tuple(DTYPES)


def assert_one_value(backend, name, got, want):
    """A single value with weight 1 comes back bit for bit; from TF32 parts within a unit or two."""
    if backend.name == "cuda" and got.dtype == np.float32:
        np.testing.assert_allclose(got, want, rtol=2.0**-22, err_msg=name)
    else:
        assert_bit_equal(name, got, want)


def same_scores(backend, Nq, Nk, d=8, d_v=None, dtype="float32", **options):
    """Forward with q = k = 0 and v = rows of the identity: a row is uniform over what it sees."""
    zeros = np.zeros((Nq, d), DTYPES[dtype]), np.zeros((Nk, d), DTYPES[dtype])
    v = np.eye(Nk, d_v or d, dtype=np.float32).astype(DTYPES[dtype])
    out, lse = cf.attention(*(backend.asarray(x) for x in (*zeros, v)), return_lse=True, **options)
    return backend.asnumpy(out).astype(np.float64), backend.asnumpy(lse)


def same_score_gradients(backend, Nq, Nk, v, d=8, **options):
    """The gradients of the same with dout = 1."""
    arrays = (np.ones((Nq, v.shape[1])), np.zeros((Nq, d)), np.zeros((Nk, d)), v)
    dout, q, k, v = (backend.asarray(x.astype(np.float32)) for x in arrays)
    out, lse = cf.attention(q, k, v, return_lse=True, **options)
    g = cf.attention_backward(dout, q, k, v, out, lse, **options)
    return [backend.asnumpy(x) for x in g[:3]]


def uniform(columns, rows):
    """What `same_scores` must return when row i sees the keys `rows[i]`."""
    out = np.zeros((len(rows), columns))
    for i, keys in enumerate(rows):
        out[i, list(keys)] = 1 / max(1, len(keys))
    return out


def assert_rows(backend_result, rows, dtype):
    """Uniform rows to the unit of `dtype`, lse = ln(number of keys)."""
    out, lse = backend_result
    tolerance = {"float16": 5e-4, "bfloat16": 4e-3, "float32": 1e-6, "float64": 1e-15}[dtype]
    np.testing.assert_allclose(out, uniform(out.shape[1], rows), rtol=tolerance, atol=0)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse, np.log([len(keys) for keys in rows]), rtol=1e-6, atol=1e-7)


# A1 and A2: the newest query sees every key, forward and backward.


@pytest.mark.parametrize("dtype", ALL)
def test_causal_with_fewer_queries_than_keys(backend, dtype):
    rows = [range(4), range(5)]
    assert_rows(same_scores(backend, 2, 5, dtype=dtype, causal=True), rows, dtype)
    with pytest.raises(AssertionError):  # and top-left is another answer
        assert_rows(same_scores(backend, 2, 5, dtype=dtype, causal=True, q_offset=0), rows, dtype)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("Nq, Nk, d", [(70, 197, 64), (3, 128, 128)])
def test_several_partly_masked_tiles_in_a_row_of_tiles(backend, Nq, Nk, d, dtype):
    x = inputs(Case("offset-127", Nq=Nq, Nk=Nk, d=d, Hq=1, Hk=1, causal=True, dtype=dtype))
    out, lse = attend(backend, x)
    judge(dtype, {"out": out, "lse": lse}, *answers_to(x))


def test_gradients_with_the_offset_of_forward(backend):
    v = np.eye(5, 8)
    dq, dk, dv = same_score_gradients(backend, 2, 5, v, causal=True)
    assert (dq == 0).all() and (dk == 0).all()
    np.testing.assert_allclose(dv, np.repeat([[0.45, 0.45, 0.45, 0.45, 0.2]], 8, 0).T, rtol=1e-6)


def test_gradients_are_not_masked_when_nothing_was(backend):
    v = np.random.default_rng(0).standard_normal((128, 8))
    dq, dk, dv = same_score_gradients(backend, 128, 128, v)
    np.testing.assert_allclose(dv, 1, rtol=1e-6)
    np.testing.assert_allclose(dk, 0, atol=1e-6)
    np.testing.assert_allclose(dq, 0, atol=1e-6)


@pytest.mark.parametrize("Nq, Nk", [(70, 197), (197, 70)])
@pytest.mark.parametrize("options", [
    {"causal": True},
    {"window": (17, 5)},
    {"mask": "dense", "softcap": 5.0},
    {"causal": True, "window": (17, 5), "mask": "dense", "softcap": 5.0},
], ids=str)
def test_backward_knows_every_option_of_forward(backend, Nq, Nk, options):
    x = inputs(Case("options", Nq=Nq, Nk=Nk, d=32, Hq=4, Hk=2, **options))
    judge(str(options), gradients(backend, x), *answers_to(x))


# A3: rows that see no key.


@pytest.mark.parametrize("dtype", ALL)
def test_more_queries_than_keys(backend, dtype):
    rows = [(), (), (), (0,), (0, 1)]
    assert_rows(same_scores(backend, 5, 2, dtype=dtype, causal=True), rows, dtype)


@pytest.mark.parametrize("dtype", ALL)
def test_sequences_of_one_key(backend, dtype):
    """Only the last query sees its only key; P = 1 there, so dq and dk vanish.

    Exactly so in 16-bit types, where dP and delta are sums without any rounding.
    """
    x = inputs(Case("one-key", B=3, Hq=1, Hk=1, Nq=146, Nk=1, d=32, causal=True, dtype=dtype,
                    q_lens=(76, 34, 146), kv_lens=(1, 1, 1)))
    three = DTYPES[dtype].type(3)
    x = x._replace(q=x.q * three, k=x.k * three, v=x.v * three, dout=np.ones_like(x.dout))
    out, lse = attend(backend, x)
    g = gradients(backend, x, use_dlse=False)
    last = [(0, 0, 75), (1, 0, 33), (2, 0, 145)]
    for at in last:
        assert_one_value(backend, "out", out[at], x.v[at[0], 0, 0])
        assert np.isfinite(lse[at])
        out[at], lse[at] = 0, -INF
    assert (out == 0).all() and (lse == -INF).all()
    assert (g["dv"] == 1).all()
    rounding = {"float32": 1e-4, "float64": 1e-13}.get(dtype, 0)
    np.testing.assert_allclose(g["dq"].astype(np.float64), 0, atol=rounding)
    np.testing.assert_allclose(g["dk"].astype(np.float64), 0, atol=rounding)


def test_the_first_half_of_the_queries_sees_nothing(backend):
    """2048 x 1024 in the report; 256 x 128 cross as many kinds of tile edges here."""
    x = inputs(Case("half", Nq=256, Nk=128, d=16, Hq=1, Hk=1, causal=True))
    out, lse = attend(backend, x)
    assert (out[..., :128, :] == 0).all() and (lse[..., :128] == -INF).all()
    assert np.isfinite(lse[..., 128:]).all()
    g = gradients(backend, x)
    assert (g["dq"][..., :128, :] == 0).all()
    assert all(np.isfinite(g[name]).all() for name in ("dq", "dk", "dv"))
    judge("half", {"out": out, "lse": lse, **g}, *answers_to(x))


# A4: both ends of a window belong to it.


@pytest.mark.parametrize("window, counts", [
    ((2, 0), [1, 2, 3, 3, 3, 3, 3, 3]),
    ((2, 1), [2, 3, 4, 4, 4, 4, 4, 3]),
    ((0, 0), [1] * 8),
    ((None, 0), range(1, 9)),
    ((0, None), range(8, 0, -1)),
    ((None, None), [8] * 8),
])
@pytest.mark.parametrize("dtype", ALL)
def test_window_bounds_are_inclusive(backend, window, counts, dtype):
    left, right = (100 if side is None else side for side in window)
    rows = [[j for j in range(8) if i - left <= j <= i + right] for i in range(8)]
    assert [len(keys) for keys in rows] == list(counts)
    assert_rows(same_scores(backend, 8, 8, dtype=dtype, window=window), rows, dtype)


@pytest.mark.parametrize("left", [0, 1, 15, 16, 17, 63, 64, 65, 95, 96, 97])
def test_windows_around_the_tile_edges(backend, left):
    """The number of keys that each row sees, and, by the gradient of v, each key's queries."""
    N = 200
    i, j = np.arange(N)[:, None], np.arange(N)
    for right in (0, 1, 15, 16, 17, 63, 64, 65, 95, 96, 97):
        visible = (j >= i - left) & (j <= i + right)
        _, lse = same_scores(backend, N, N, d=1, window=(left, right))
        np.testing.assert_allclose(np.exp(lse), visible.sum(1), rtol=1e-5)
        _, _, dv = same_score_gradients(backend, N, N, np.ones((N, 1)), d=1, window=(left, right))
        want = (visible / visible.sum(1, keepdims=True)).sum(0)
        np.testing.assert_allclose(dv[:, 0], want, rtol=1e-5)


# B1: a mask with empty rows and columns.


@pytest.mark.parametrize("dtype", ALL)
def test_an_empty_row_and_an_empty_column(backend, dtype):
    x = inputs(Case("rows", Nq=4, Nk=4, d=8, Hq=1, Hk=1, dtype=dtype))
    mask = np.ones((4, 4), bool)
    mask[2], mask[:, 1] = False, False
    x.options["mask"] = mask
    out, lse = attend(backend, x)
    g = gradients(backend, x, deterministic=True)
    judge(dtype, {"out": out, "lse": lse, **g}, *answers_to(x))
    assert (out[0, 0, 2] == 0).all() and lse[0, 0, 2] == -INF and (g["dq"][0, 0, 2] == 0).all()
    assert (g["dk"][0, 0, 1] == 0).all() and (g["dv"][0, 0, 1] == 0).all()
    # All other rows are as if row 2 were not there.
    rest = [0, 1, 3]
    y = x._replace(q=x.q[:, :, rest], dout=x.dout[:, :, rest], dlse=x.dlse[:, :, rest],
                   options={"mask": mask[rest]})
    h = gradients(backend, y, deterministic=True)
    assert_bit_equal("out", attend(backend, y)[0], out[:, :, rest])
    assert_bit_equal("dq", h["dq"], g["dq"][:, :, rest])
    assert_bit_equal("dk", h["dk"], g["dk"])
    assert_bit_equal("dv", h["dv"], g["dv"])


# B3 and B4: no score is too low, no matter what was masked before.


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("how", ["causal-gqa", "first-128", "last-128", "window"])
def test_scores_of_minus_300_behind_masked_tiles(backend, dtype, how):
    Nq, Nk, Hq = (88, 448, 4) if how == "causal-gqa" else (200, 200, 2)
    case = Case(how, Nq=Nq, Nk=Nk, Hq=Hq, Hk=2, d=64, dtype=dtype,
                causal=how == "causal-gqa",
                window=(10, 60) if how == "window" else None,
                q_offset=100 if how == "window" else None)
    x = inputs(case)
    x = x._replace(q=np.ones_like(x.q), k=np.full_like(x.k, -37.5))
    visible = np.ones((Nq, Nk), bool)
    if how.endswith("128"):
        visible[:, slice(0, 128) if how == "first-128" else slice(72, 200)] = False
        x.options["mask"] = visible
    i, j = np.arange(Nq)[:, None], np.arange(Nk)
    if how == "causal-gqa":
        visible = j <= i + Nk - Nq
    if how == "window":
        visible = (j >= i + 90) & (j <= i + 160)
    count = visible.sum(1)
    out, lse = attend(backend, x)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse, np.broadcast_to(-300 + np.log(count), lse.shape), rtol=2e-7)
    v = np.repeat(x.v.astype(np.float64), Hq // 2, axis=1)
    mean = visible @ v / np.maximum(count, 1)[:, None]
    unit = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 2e-15}[dtype]
    np.testing.assert_allclose(out.astype(np.float64), mean, rtol=unit, atol=unit)


@pytest.mark.parametrize("dtype, q, k, score", [
    *((dtype, 100, -75, -60000) for dtype in ALL),
    *((dtype, 2.0**50, -(2.0**50), -(2.0**103)) for dtype in ("bfloat16", "float32", "float64")),
])
@pytest.mark.parametrize("Nk", [4, 70])
def test_scores_below_any_stand_in_for_minus_infinity(backend, dtype, q, k, score, Nk):
    x = inputs(Case("low", Nq=5, Nk=Nk, d=64, Hq=1, Hk=1, dtype=dtype))
    x = x._replace(q=np.full_like(x.q, q), k=np.full_like(x.k, k), dlse=np.zeros_like(x.dlse))
    out, lse = attend(backend, x)
    np.testing.assert_allclose(lse, score + np.log(Nk), rtol=1.2e-7)
    unit = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-15}[dtype]
    mean = np.broadcast_to(x.v.astype(np.float64).mean(2, keepdims=True), out.shape)
    np.testing.assert_allclose(out.astype(np.float64), mean, atol=unit)
    if score == -60000:
        # Equal weights: dv is the sum of dout over the queries, divided by the number of keys.
        # (Beyond, exp(score - lse) is not 1 / Nk: no lse of this dtype holds both terms.)
        g = gradients(backend, x)
        want = np.broadcast_to(x.dout.astype(np.float64).sum(2, keepdims=True) / Nk, g["dv"].shape)
        rounding_of_lse = 60000 * 2.0**-24 if dtype != "float64" else 1e-11
        np.testing.assert_allclose(g["dv"].astype(np.float64), want,
                                   rtol=2 * (unit + rounding_of_lse), atol=1e-9)
    # Equal halves: the number of keys does not show in an lse of that size.
    halves = [attend(backend, x._replace(k=x.k[:, :, part], v=x.v[:, :, part]))
              for part in (slice(0, Nk // 2), slice(Nk // 2, None))]
    merged, merged_lse = cf.merge(*zip(*halves, strict=True))
    np.testing.assert_allclose(merged_lse, lse, rtol=1.2e-7)
    np.testing.assert_allclose(merged.astype(np.float64), mean, atol=2 * unit)


# B6: very large logits.


def test_one_logit_of_1e11(backend):
    x = np.full((1, 64), 133120, DTYPES["bfloat16"])
    out, lse = cf.attention(*[backend.asarray(x)] * 3, return_lse=True)
    assert_bit_equal("out", backend.asnumpy(out), x)
    np.testing.assert_allclose(backend.asnumpy(lse), 1.417674752e11, rtol=1e-7)


def test_products_beyond_float16(backend):
    v = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float16)
    q = np.full((3, 64), 60, np.float16)
    k = np.repeat(np.float16([[60], [59.875]]), 64, 1)
    out, lse = cf.attention(*(backend.asarray(x) for x in (q, k, v)), return_lse=True)
    np.testing.assert_allclose(backend.asnumpy(lse), 28800, rtol=1e-7)
    assert_bit_equal("out", backend.asnumpy(out), np.repeat(v[:1], 3, axis=0))


@pytest.mark.parametrize("dtype", ALL)
def test_one_dominant_key_per_row(backend, dtype):
    """Scores up to 3e4 with a gap of at least 50: the weight is 1, and out is v bit for bit."""
    rng = np.random.default_rng(1)
    N, d = 200, 8
    winner = rng.permutation(N)
    k = np.zeros((N, d))
    k[:, 0], k[:, 1] = np.arange(N) - 100, (np.arange(N) - 100) ** 2 // 128
    k[:, 2] = (np.arange(N) - 100) ** 2 % 128
    # score_ij = -(w_i - j)^2 scale + const: the next key is one step away.
    w = winner - 100
    q = np.stack([2 * w, -128 * np.ones(N), -np.ones(N), *np.zeros((5, N))], axis=1)
    v = rng.standard_normal((N, 4))
    q, k, v = (x.astype(DTYPES[dtype]) for x in (q, k, v))
    out, lse = cf.attention(*(backend.asarray(x) for x in (q, k, v)), scale=60.0, return_lse=True)
    # All integers here are exact in every dtype, and so is 2 w j - j^2.
    np.testing.assert_allclose(backend.asnumpy(lse), 60.0 * w**2, rtol=2e-7, atol=0)
    assert np.abs(60.0 * w**2).max() > 3e4
    assert_one_value(backend, "out", backend.asnumpy(out), v[winner])

"""The sink: what it is in closed form, rows that see only it, and what must not reach the rest."""

from dataclasses import replace

import numpy as np
import pytest
from answers import answers_to, floors, judge
from cases import DTYPES, SINK, SINKS, Case, inputs
from numerics import assert_bit_equal
from test_backward import assert_same_gradients, gradients
from test_forward import attend

import cupy_flash as cf
from cupy_flash import reference

INF = np.inf
SIZES = {"Nq": 120, "Nk": 203, "d": 24, "d_v": 16, "B": 2, "Hq": 4, "Hk": 2}
BLIND = (0, 17, 18, 63, 119)        # queries that see no key


def results(backend, x):
    """Forward and all gradients, `out` kept in the accumulators' type for these."""
    out, lse = attend(backend, x)
    return {"out": out, "lse": lse, **gradients(backend, x, wide_out=True, deterministic=True)}


def blinded(how, dtype="float32", **more):
    """Inputs with sinks and fully masked rows, and where these are, as (batch, query)."""
    case = Case("blind", **{**SIZES, "sink": (1.0, -2.0, 0.5, 9.0), "dtype": dtype, **more})
    blind = np.zeros((case.B, case.Nq), bool)
    if how == "causal":
        case, blind[:, :50] = replace(case, causal=True, q_offset=-50), True
    elif how == "window":
        case, blind[:, 80:] = replace(case, window=(3, 3), q_offset=case.Nk - 77), True
    elif how == "kv_lens":
        case, blind[1] = replace(case, kv_lens=(100, 0)), True
    else:
        blind[:, BLIND] = True
    x = inputs(case)
    if how in ("mask", "mask-bias"):
        x.options["mask"] = np.random.default_rng(1).random((case.Nq, case.Nk)) < 0.7
        x.options["mask"][BLIND, :] = False
    if how == "mask-bias":      # each of the two hides one half of the keys
        x.options["mask"][BLIND, 100:] = True
    if how in ("bias", "mask-bias"):
        bias = np.random.default_rng(2).standard_normal((case.Hq, case.Nq, case.Nk))
        bias[:, BLIND, 100 * (how == "mask-bias"):] = -INF
        x.options["bias"] = bias.astype(x.q.dtype)
    return x, blind


@pytest.mark.parametrize("value", [np.nan, INF])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["causal", "window", "kv_lens", "mask", "bias", "mask-bias"])
def test_rows_that_see_only_the_sink(backend, how, dtype, value):
    """out 0, lse the sink, dq 0, and whatever their q and dout hold reaches no other gradient."""
    x, blind = blinded(how, dtype)
    want = results(backend, x)
    judge(f"{how} {dtype}", want, *answers_to(x))
    rows = np.broadcast_to(blind[:, None], want["lse"].shape)
    assert (want["out"][rows] == 0).all() and (want["dq"][rows] == 0).all()
    sinks = np.broadcast_to(x.options["sink"][:, None], want["lse"].shape)
    assert (want["lse"][rows] == sinks[rows]).all()
    for name in ("q", "dout"):
        array = getattr(x, name).copy()
        array[rows] = value
        got = results(backend, x._replace(**{name: array}))
        assert_same_gradients(f"{how} {dtype} {name}", got, want)


def test_a_bias_beyond_the_accumulators_type_hides_its_key(backend):
    """-1e300 is -inf in float32, forward and where backward looks for a key that is seen."""
    x = inputs(Case("beyond", bias="hqk", bias_dtype="float64", sink=(1.0, 2.0, 0.0, 3.0), **SIZES))
    x.options["bias"][:, BLIND, :] = -1e300
    want = results(backend, x)
    assert (want["lse"][:, :, BLIND] == x.options["sink"][:, None]).all()
    x.q[:, :, BLIND], x.dout[:, :, BLIND] = np.nan, np.nan
    assert_same_gradients("beyond", results(backend, x), want)


def test_a_fully_masked_row_adds_its_dlse(backend):
    """P_sink is exactly 1 there, and D is 0: sums of integers are exact."""
    x = inputs(Case("dlse", mask="nothing", sink=(0.3, 7.0, -1e4, 1e9), **SIZES))
    dlse = np.random.default_rng(0).integers(-99, 99, x.dlse.shape).astype(np.float32)
    for nothing in ({}, {"mask": None, "kv_lens": np.int32([0, 0])}):
        options = {name: a for name, a in (x.options | nothing).items() if a is not None}
        g = gradients(backend, x._replace(dlse=dlse, options=options))
        assert_bit_equal("dsink", g["dsink"], dlse.sum(axis=(0, 2)))


@pytest.mark.parametrize("shape", [(2, 4, 7, 0), (2, 4, 0, 5), (0, 4, 7, 5)])
def test_no_keys_no_queries_no_batch(backend, shape):
    B, H, Nq, Nk = shape
    x = inputs(Case("empty", B=B, Hq=H, Hk=H, Nq=Nq, Nk=Nk, d=16, sink=(1.0, -INF, 3.0, 0.5)))
    got = results(backend, x)
    assert (got["out"] == 0).all() and got["dsink"].shape == (H,)
    if Nk == 0:
        assert (got["lse"] == x.options["sink"][:, None]).all()
        judge("no keys", got, *answers_to(x), floors(x))
    else:
        assert (got["dsink"] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("label", ["sink", "sink-lens", "sink-mask-gqa", "sink-bias-holes-gqa",
                                   "sink-decode-long", "sink-all-options"])
def test_minus_infinity_is_no_sink(backend, label, dtype):
    """For all heads, and for one beside others: the bits of a call without it, and dsink 0."""
    feature = next(case for case in SINK if case.label == label)
    x = inputs(replace(feature, dtype=dtype))
    heads = x.options["sink"].size
    without = {name: a for name, a in x.options.items() if name != "sink"}
    want = results(backend, x._replace(options=without))
    for off in (np.ones(heads, bool), np.arange(heads) == 0):
        sinks = np.where(off, -INF, x.options["sink"]).astype(x.options["sink"].dtype)
        got = results(backend, x._replace(options=x.options | {"sink": sinks}))
        assert (got["dsink"][off] == 0).all()
        for name in ("out", "lse", "dq"):
            assert_bit_equal(f"{label} {name}", got[name][:, off], want[name][:, off])
    assert_bit_equal("dlse of no head", got["dsink"][off], np.zeros(off.sum(), np.float32))


def test_a_nan_stays_in_its_head(backend):
    """Its rows are NaN but for those that see no key; other heads have the same bits."""
    x, blind = blinded("mask", Hk=4)
    want = results(backend, x)
    sinks = x.options["sink"].copy()
    sinks[1] = np.nan
    got = results(backend, x._replace(options=x.options | {"sink": sinks}))
    others = [0, 2, 3]
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert_bit_equal(name, got[name][:, others], want[name][:, others])
    assert_bit_equal("dsink", got["dsink"][others], want["dsink"][others])
    assert np.isnan(got["lse"][:, 1]).all() and np.isnan(got["dsink"][1])
    for name in ("out", "dq"):
        assert np.isnan(got[name][:, 1][~blind]).all() and (got[name][:, 1][blind] == 0).all()
    for name in ("dk", "dv"):
        assert np.isnan(got[name][:, 1]).all()


def test_a_nan_where_keys_are_split(backend):
    """A row without keys is 0 there, too, and its lse the NaN."""
    x = inputs(Case("split", B=2, Nq=3, Nk=4200, d=32, kv_lens=(4200, 0), sink=(np.nan, 1.0)))
    out, lse = attend(backend, x)
    assert np.isnan(lse[:, 0]).all() and np.isnan(out[0, 0]).all() and (out[1] == 0).all()
    assert np.isfinite(lse[:, 1]).all() and np.isfinite(out[0, 1]).all()


def test_rows_behind_the_lengths_add_nothing(backend):
    x = inputs(Case("lens", sink=(1.0, -1.0, 5.0, -INF), q_lens=(120, 40), kv_lens=(203, 90),
                    causal=True, **SIZES))
    want = results(backend, x)
    judge("lens", want, *answers_to(x))
    assert (want["lse"][1, :, 40:] == -INF).all() and (want["out"][1, :, 40:] == 0).all()
    arrays = {name: getattr(x, name).copy() for name in ("q", "dout", "dlse")}
    for array in arrays.values():
        array[1, :, 40:] = np.nan
    assert_same_gradients("lens", results(backend, x._replace(**arrays)), want)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("sinks", [(1e4, 3e5), (1e30, -1e30), (-1e4, -1e9), (8192.0, -8192.0)])
@pytest.mark.parametrize("bias", [0.0, -1e4, -1e9, -3e38])
def test_large_normalisers_have_the_sink(backend, dtype, sinks, bias):
    """Rows with a large lse are normalised anew in backward, with the sink among their scores."""
    x = inputs(Case("large", Nq=40, Nk=120, Hq=4, Hk=2, d=16, bias="1hqk", bias_dtype="float32",
                    dtype=dtype, sink=sinks))
    x.options["bias"][..., ::3, :] = bias
    x.options["bias"][..., 5, :] = -INF
    x.options["sink"][2:] = bias + np.arange(2)     # as heavy as a key, or nearly
    got = results(backend, x)
    judge(f"{dtype} {sinks} {bias}", got, *answers_to(x))
    assert np.isfinite(got["dsink"]).all()


@pytest.mark.parametrize("label", ["sink-mask-gqa", "sink-all-options", "sink-causal-tall"])
def test_is_a_key_without_a_value(label):
    """A key of score 0 whose bias is the sink and whose value is 0."""
    case = next(case for case in SINK if case.label == label)
    case = replace(case, Nq=50, Nk=60, kv_lens=None, q_lens=None, dtype="float64", sink=SINKS)
    x = inputs(case)
    options = {n: a for n, a in x.options.items() if n not in ("sink", "causal", "window",
                                                               "alibi_slopes", "softcap")}
    x = x._replace(options=options | {"sink": x.options["sink"]})
    want = (*reference.attention(x.q, x.k, x.v, **x.options),
            *reference.attention_backward(x.dout, x.q, x.k, x.v, dlse=x.dlse, **x.options))
    B, H, Nq, Nk = (*x.q.shape[:3], x.k.shape[2])
    k, v = (np.concatenate([a, np.zeros_like(a[:, :, :1])], 2) for a in (x.k, x.v))
    bias = np.zeros((B, H, Nq, Nk + 1))
    bias[..., :-1] = np.where(options.pop("mask", True), options.pop("bias", 0.0), -INF)
    bias[..., -1] = x.options["sink"][:, None]
    out, lse = reference.attention(x.q, k, v, **options | {"bias": bias})
    dq, dk, dv, dbias, _ = reference.attention_backward(x.dout, x.q, k, v, dlse=x.dlse,
                                                        **options | {"bias": bias})
    got = out, lse, dq, dk[:, :, :-1], dv[:, :, :-1], None, dbias[..., -1].sum(axis=(0, 2))
    for one, other in zip(got, want, strict=True):
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_bits_do_not_depend_on_layout_or_out(backend):
    """A sink of any strides, one in a (1,) array for one head."""
    x = inputs(Case("strided", sink=(1.0, 2.0, 3.0, -1.0), **SIZES))
    y = backend.move(x)
    want = attend(backend, x)
    wide = backend.xp.repeat(y.options["sink"], 3)[::3]
    got = cf.attention(y.q, y.k, y.v, return_lse=True, sink=wide)
    for a, b in zip(got, want, strict=True):
        assert_bit_equal("strided", backend.asnumpy(a), b)
    one = cf.attention(y.q[0, 0], y.k[0, 0], y.v[0, 0], sink=y.options["sink"][:1])
    assert_bit_equal("one head", backend.asnumpy(one), want[0][0, 0])

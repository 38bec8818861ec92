"""What is masked cannot matter, what is seen does, and a row that sees nothing is zero."""

import numpy as np
import pytest
from answers import answers_to, judge
from cases import DTYPES, Case, inputs
from ml_dtypes import finfo
from numerics import assert_bit_equal
from test_backward import assert_same_gradients, gradients
from test_forward import attend

import cupy_flash as cf

SIZES = {"Nq": 120, "Nk": 203, "d": 24, "d_v": 16, "Hq": 2, "Hk": 1}
HIDDEN = slice(100, 150)  # in the middle of a tile, across a tile edge

DTYPE_AND_PRECISION = [*((dtype, None) for dtype in DTYPES), ("float32", "tf32"),
                       ("float32", "tf32x3")]


def hide_keys(how, x):
    """Options under which no query of `x` sees the keys that the returned index names."""
    Nq, Nk = x.q.shape[-2], x.k.shape[-2]
    if how == "kv_lens":
        return {"kv_lens": np.array([131], np.int32)}, slice(131, None)
    if how == "causal":
        return {"causal": True, "q_offset": 5}, slice(Nq + 5, None)
    if how == "window":
        return {"window": (7, 9), "q_offset": 40}, np.r_[0 : 40 - 7, Nq + 49 : Nk]
    if how == "mask":
        mask = np.ones((1, Nk), bool)
        mask[:, HIDDEN] = False
        return {"mask": mask}, HIDDEN
    raise ValueError(how)


def results(backend, x):
    """Forward and all gradients of `x` in one dict."""
    out, lse = attend(backend, x)
    return {"out": out, "lse": lse, **gradients(backend, x, deterministic=True)}


@pytest.mark.parametrize("how", ["kv_lens", "causal", "window", "mask"])
@pytest.mark.parametrize("dtype, precision", DTYPE_AND_PRECISION)
@pytest.mark.parametrize("poison", ["nan", "inf", "-inf", "max"])
def test_keys_hidden_from_every_query(backend, how, dtype, precision, poison):
    x = inputs(Case("hidden", dtype=dtype, precision=precision, softcap=9.0, **SIZES))
    options, hidden = hide_keys(how, x)
    x.options.update(options)
    want = results(backend, x)
    assert (want["dk"][..., hidden, :] == 0).all() and (want["dv"][..., hidden, :] == 0).all()
    value = finfo(DTYPES[dtype]).max if poison == "max" else float(poison)
    for name in ("k", "v"):
        array = getattr(x, name).copy()
        array[..., hidden, :] = value
        got = results(backend, x._replace(**{name: array}))
        assert_same_gradients(f"{how} {dtype} {poison} in {name}", got, want)


@pytest.mark.parametrize("dtype, precision", DTYPE_AND_PRECISION)
@pytest.mark.parametrize("softcap", [None, 9.0])
@pytest.mark.parametrize("how", ["mask", "bias"])
def test_the_largest_values_behind_a_mask_of_their_own(backend, dtype, precision, how, softcap):
    """Rows that do not see key 77 have the same bits whatever finite values it holds.

    Its scores may overflow to inf - inf; with a softcap, even the derivative of the cap is NaN.
    """
    x = inputs(Case("finite", dtype=dtype, precision=precision, softcap=softcap, **SIZES))
    rng = np.random.default_rng(5)
    visible = rng.random((1, 2, 120, 203)) < 0.7
    visible[..., 77] = rng.random((1, 2, 120)) < 0.5
    if how == "mask":
        x.options["mask"] = visible
    else:
        x.options["bias"] = np.where(visible, np.float32(0.5), np.float32(-np.inf))
    blind = ~visible[..., 77]
    want = results(backend, x)
    for sign in (1, -1):
        k, v = x.k.copy(), x.v.copy()
        k[..., 77, :] = v[..., 77, :] = sign * finfo(DTYPES[dtype]).max
        with np.errstate(all="ignore"):
            got = results(backend, x._replace(k=k, v=v))
        for field in ("out", "lse", "dq"):
            assert_bit_equal(f"{how} {field}", got[field][blind], want[field][blind])
        if how == "bias":
            assert_bit_equal("dbias", got["dbias"][blind], want["dbias"][blind])
            assert (got["dbias"][~visible] == 0).all()


def test_the_bias_behind_a_mask(backend):
    """A bias where nothing is seen is never read, NaN included."""
    case = Case("bias-poison", B=2, causal=True, kv_lens=(203, 120), q_lens=(120, 90), bias="bhqk",
                mask="dense", **SIZES)
    x = inputs(case)
    want = results(backend, x)
    i, j = np.arange(120)[:, None], np.arange(203)
    q_lens, kv_lens = (x.options[n][:, None, None, None] for n in ("q_lens", "kv_lens"))
    visible = (i < q_lens) & (j < kv_lens) & (j <= i + kv_lens - q_lens) & x.options["mask"]
    for value in (np.nan, np.inf, np.finfo(np.float32).max):
        x.options["bias"] = np.where(visible, x.options["bias"], np.float32(value))
        got = results(backend, x)
        assert_same_gradients(f"{value}", got, want)
        assert (got["dbias"][~np.broadcast_to(visible, got["dbias"].shape)] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_behind_the_lengths_changes_a_bit(backend, dtype, causal):
    case = Case("lens", B=3, q_lens=(120, 61, 0), kv_lens=(97, 0, 203), causal=causal, dtype=dtype,
                mask="dense", bias="bhqk", alibi="bh", sink=(1.0, -1.0), **SIZES)
    x = inputs(case)
    want = results(backend, x)
    judge(case.id, want, *answers_to(x, x.q.dtype))
    y = backend.move(x)
    out, lse = (backend.asnumpy(a).copy()
                for a in cf.attention(y.q, y.k, y.v, return_lse=True, **y.options))
    arrays = {name: getattr(x, name).copy() for name in ("q", "k", "v", "dout", "dlse")}
    bias, mask = x.options["bias"].copy(), x.options["mask"].copy()
    for b, (n, m) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        for array in (arrays["q"], arrays["dout"], arrays["dlse"], out, lse):
            array[b, :, n:] = np.nan
        arrays["k"][b, :, m:], arrays["v"][b, :, m:] = np.nan, -np.inf
        bias[b, :, n:], bias[b, :, :, m:] = np.nan, np.inf
        mask[b, :, n:], mask[b, :, :, m:] = True, True
    x.options.update(bias=bias, mask=mask)
    poisoned = x._replace(**arrays)
    got = results(backend, poisoned)
    assert_same_gradients(case.id, got, want)
    z = backend.move(poisoned)
    g = cf.attention_backward(z.dout, z.q, z.k, z.v, backend.asarray(out), backend.asarray(lse),
                              dlse=z.dlse, deterministic=True, **z.options)
    assert_same_gradients(f"{case.id} with NaN in out and lse",
                          {name: backend.asnumpy(a) for name, a in g._asdict().items()},
                          {name: want[name] for name in g._fields})


EMPTY = {
    "causal-tall": {"Nq": 200, "Nk": 60, "causal": True},
    "causal-offset": {"causal": True, "q_offset": -50},
    "causal-all": {"causal": True, "q_offset": -500},
    "window-left-of-the-keys": {"window": (5, 5), "q_offset": -40},
    "window-right-of-the-keys": {"window": (5, 5), "q_offset": 150},
    "mask-nothing": {"mask": "nothing"},
    "mask-rows": {"mask": "per-query"},
    "mask-rows-causal-softcap-bias": {"mask": "per-query", "causal": True, "softcap": 2.0,
                                      "bias": "hqk", "alibi": "h"},
    "lens": {"q_lens": (70,), "kv_lens": (0,)},
    "q-lens": {"q_lens": (0,)},
    "no-keys": {"Nk": 0, "bias": "1hq1", "softcap": 2.0},
    "no-keys-causal-window": {"Nk": 0, "causal": True, "window": (3, 3)},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", EMPTY)
def test_a_row_that_sees_no_key(backend, how, dtype):
    case = Case(how, dtype=dtype, **{**SIZES, **EMPTY[how]})
    x = inputs(case)
    want, plain = answers_to(x)
    got = results(backend, x)
    judge(case.id, got, want, plain)
    empty = want.lse == -np.inf
    assert empty.any()
    assert (got["out"][empty] == 0).all()
    assert (got["lse"][empty] == -np.inf).all()
    assert (got["dq"][empty] == 0).all()
    if empty.all():
        for name in ("dq", "dk", "dv"):
            assert (got[name] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_whose_bias_is_minus_infinity(backend, dtype):
    x = inputs(Case("bias-rows", dtype=dtype, **SIZES))
    bias = np.zeros((120, 203), DTYPES[dtype])
    bias[[0, 50, 119]] = -np.inf
    bias[:, 20] = -np.inf
    x.options["bias"] = bias
    got = results(backend, x)
    judge("bias-rows", got, *answers_to(x))
    for name, value in (("out", 0), ("lse", -np.inf), ("dq", 0)):
        assert (got[name][..., [0, 50, 119], *([slice(None)] * (name != "lse"))] == value).all()
    assert (got["dk"][..., 20, :] == 0).all() and (got["dv"][..., 20, :] == 0).all()
    assert (got["dbias"][[0, 50, 119]] == 0).all() and (got["dbias"][:, 20] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("array", ["q", "k", "v"])
def test_a_visible_nan_propagates_to_those_who_see_it(backend, array, dtype):
    """And to no other batch, head or, for a NaN in a query, row."""
    case = Case("nan", Nq=120, Nk=203, d=24, d_v=16, B=2, Hq=4, Hk=2, causal=True, dtype=dtype)
    x = inputs(case)
    clean, clean_lse = attend(backend, x)
    broken = getattr(x, array).copy()
    row = 31 if array == "q" else 31 + 83  # the first key that query 31 and later ones see
    broken[1, 1, row, 3] = np.nan
    out, lse = attend(backend, x._replace(**{array: broken}))
    heads = slice(1, 2) if array == "q" else slice(2, 4)
    rows = slice(31, 32) if array == "q" else slice(31, None)
    columns = slice(3, 4) if array == "v" else slice(None)
    assert np.isnan(out[1, heads, rows, columns]).all()
    assert array == "v" or np.isnan(lse[1, heads, rows]).all()
    touched = np.zeros(lse.shape, bool)
    touched[1, heads, slice(31, 32) if array == "q" else slice(None)] = True
    assert_bit_equal("out", out[~touched], clean[~touched])
    assert_bit_equal("lse", lse[~touched], clean_lse[~touched])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(12))
def test_nan_of_one_sequence_reaches_no_other(backend, dtype, seed):
    """Scratch memory passes from one sequence to the next: rows that see nothing stay at zero."""
    rng = np.random.default_rng(seed)
    Nq, Nk, d = (int(n) for n in rng.integers(1, (130, 130, 70)))
    case = Case("neighbours", Nq=Nq, Nk=Nk, d=d, B=6, Hq=2, Hk=1, dtype=dtype, causal=seed % 2 == 1,
                bias="bhqk" if seed % 3 == 0 else None, seed=seed,
                q_lens=tuple(map(int, rng.integers(0, Nq + 1, 6))),
                kv_lens=tuple(map(int, rng.integers(0, Nk + 1, 6))))
    x = inputs(case)
    want = results(backend, x)
    arrays = {name: getattr(x, name).copy() for name in ("q", "k", "v", "dout")}
    for array in arrays.values():
        array[::2] = np.nan
    got = results(backend, x._replace(**arrays))
    for name, array in got.items():
        if array is not None:
            assert_bit_equal(f"{case.id} {name}", array[1::2], want[name][1::2])


def test_nan_reaches_the_gradients(backend):
    """A NaN in dout of one row: its dq, and dk and dv of the keys it sees."""
    x = inputs(Case("nan-dout", Nq=120, Nk=203, d=24, causal=True, Hq=2, Hk=2))
    dout = x.dout.copy()
    dout[0, 1, 20, :] = np.nan
    g = gradients(backend, x._replace(dout=dout))
    assert np.isnan(g["dq"][0, 1, 20]).all()
    assert np.isnan(g["dk"][0, 1, :104]).all() and np.isnan(g["dv"][0, 1, :104]).all()
    for name in ("dq", "dk", "dv"):
        assert not np.isnan(g[name][0, 0]).any(), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_ways_to_say_the_same(backend, dtype):
    """Options that hide the same keys give the same bits.

    On a GPU a mask has a kernel of its own, and what it gives is judged like any other result.
    """
    case = Case("same", Nq=120, Nk=203, d=24, Hq=2, Hk=1, dtype=dtype)
    causal = np.arange(203) <= np.arange(120)[:, None] + 83
    groups = [
        [{}, {"window": None}, {"window": (None, None)}, {"softcap": 0}, {"softcap": None},
         {"mask": np.ones((1, 1), bool)}, {"window": (10**12, 10**12)},
         {"causal": True, "q_offset": 10**12}, {"kv_lens": np.array([203], np.int32)},
         {"q_lens": np.array([120], np.int32)}, {"scale": 24 ** -0.5}],
        [{"causal": True}, {"causal": True, "q_offset": 83}, {"window": (None, 0)},
         {"causal": True, "window": (None, 50)}, {"mask": causal}, {"mask": causal[None, None]}],
    ]
    for group in groups:
        want = None
        for options in group:
            x = inputs(case)
            x.options.update(options)
            got = results(backend, x)
            want = want or got
            if backend.name == "cuda" and "mask" in options:
                judge(f"{options}", got, *answers_to(x))
                continue
            for field in ("out", "lse", "dq", "dk", "dv"):
                assert_bit_equal(f"{options} {field}", got[field], want[field])


def test_the_default_offset_follows_the_true_lengths(backend):
    case = Case("offset", B=2, Hq=2, Hk=2, d=24, causal=True, q_lens=(60, 113), kv_lens=(150, 100))
    got, lse = attend(backend, inputs(case))
    for b in range(2):
        n, m = case.q_lens[b], case.kv_lens[b]
        x = inputs(case)
        one = x._replace(q=x.q[b, :, :n], k=x.k[b, :, :m], v=x.v[b, :, :m],
                         dout=x.dout[b, :, :n], dlse=x.dlse[b, :, :n], options={"causal": True})
        judge(f"sequence {b}", {"out": got[b, :, :n], "lse": lse[b, :, :n]}, *answers_to(one))

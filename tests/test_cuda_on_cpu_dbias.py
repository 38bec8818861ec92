"""dbias of the fused backward kernel on fibers: stored, added, or summed over rows or keys."""

import re
from itertools import product

import numpy as np
import pytest
from answers import answers_to, judge
from cases import KINDS, Case, Inputs, inputs
from cuda_on_cpu.harness import COMPILER, Fibers
from numerics import assert_bit_equal
from test_cuda_on_cpu import HIDDEN, assert_same, hidden_places, on_cpu, wide
from test_cuda_on_cpu_fused import run_all, small_tile

import cupy_flash as cf
from cupy_flash.backends.cuda import source
from cupy_flash.plan import cuda_dbias

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler on Linux")

SHAPES = ["".join(axes) for axes in product("b1", "h1", "q1", "k1")]
# A shape for each way: added, summed over rows, over keys; added where rows are of several heads.
WAYS = {"11qk": cuda_dbias.ADDED, "111k": cuda_dbias.OVER_ROWS, "1hq1": cuda_dbias.OVER_KEYS,
        "bh1k": cuda_dbias.ADDED}
CASES = {
    "gqa": {"Hq": 6},
    "causal": {"causal": True, "q_offset": -40},
    "window-mask": {"window": (9, 4), "mask": "dense", "Hq": 2},
    "lens-holes": {"q_lens": (70, 13), "kv_lens": (20, 66), "Hq": 4, "bias_holes": True},
    "softcap": {"softcap": 9.0},
    "one-row": {"Nq": 1, "Hq": 4},
    "one-key": {"Nk": 1},
    "sink": {"sink": (0.5, -1.0), "Hq": 4, "bias_holes": True},
}
# A kernel is compiled for mask and softcap: those in fewer kinds.
TURNS = [(axes, name, kinds[(i + j) % len(kinds)])
         for i, axes in enumerate(SHAPES) for j, (name, changes) in enumerate(CASES.items())
         for kinds in (("tf32x3", "float64") if {"mask", "softcap"} & {*changes} else [*KINDS],)]


def case(kind, axes, **changes):
    """Several tiles of rows and of keys, none of them full."""
    dtype, precision = KINDS[kind]
    return Case("dbias", **{"Nq": 75, "Nk": 69, "B": 2, "Hq": 2, "Hk": 2, "d": 20, "d_v": 36,
                            "bias": axes, "dtype": dtype, "precision": precision, **changes})


def backward(x, kind, out, lse, **options):
    """All gradients, in the dtypes of their operands; the fibers."""
    gpu = Fibers(fused=small_tile(x, kind), **options)
    return gpu.backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse, **x.options), gpu


@pytest.mark.parametrize("axes, name, kind", TURNS)
def test_each_shape(axes, name, kind):
    """In one pass but behind a softcap; in rows and keys that see nothing, too."""
    x = inputs(case(kind, axes, **CASES[name]))
    out, lse, *want = on_cpu(x)
    gpu = Fibers(fused=small_tile(x, kind))
    got = gpu.backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse, grad_dtype=wide(x),
                       **x.options)
    assert ("dbias_wmma" in gpu.barriers) == (name == "softcap")
    assert_same(f"{axes} {name}", kind, (out, lse, *got), (out, lse, *want))


def test_the_ways_are_those_of_the_sources():
    text = (source.folder() / "attention/dbias_sums.cuh").read_text(encoding="utf-8")
    names = re.search(r"enum DbiasSum : int \{(.*?)\}", text)[1]
    for name, value in re.findall(r"(\w+) = (\d)", names):
        assert getattr(cuda_dbias, name) == int(value)
    assert len(cuda_dbias.REASONS) == names.count("=") == 4


@pytest.mark.parametrize("kind, bias", [
    ("bfloat16", "float16"), ("float16", "bfloat16"), ("float16", "float32"),
    ("tf32", "bfloat16"), ("tf32x3", "float16"), ("float64", "float16"), ("float64", "bfloat16"),
    ("float64", "float32")])
@pytest.mark.parametrize("axes", ["bhqk", *WAYS])
def test_dbias_of_another_dtype(axes, kind, bias):
    """It is rounded once."""
    x = inputs(case(kind, axes, Nq=45, B=1, Hk=1, bias_dtype=bias))
    out, lse, *want = on_cpu(x)
    got, _ = backward(x, kind, out, lse)
    assert got[3].dtype == x.options["bias"].dtype
    exact = run_all(x, small_tile(x, kind), out, lse)
    assert_bit_equal("dbias", got[3], exact[3].astype(bias))
    assert_same("dbias", kind, (out, lse, *exact[:4]), (out, lse, *want[:4]))


@pytest.mark.parametrize("kind", ["float16", "tf32x3", "float64"])
@pytest.mark.parametrize("axes", WAYS)
def test_what_may_vary_from_run_to_run(axes, kind):
    """dq, and dbias that threads add to in memory, in whatever order they come."""
    x = inputs(case(kind, axes, Hk=1, causal=True))
    out, lse, *_ = on_cpu(x)
    want, _ = backward(x, kind, out, lse)
    for seed, grid in ((2, 3), (3, 2), (4, 1000), (5, 7)):
        got, _ = backward(x, kind, out, lse, seed=seed, grid=grid)
        for name, a, b in list(zip(("dq", "dk", "dv", "dbias"), got, want, strict=False))[1:]:
            if name != "dbias" or WAYS[axes] == cuda_dbias.OVER_ROWS:
                assert_bit_equal(f"seed {seed}, grid {grid}, {name}", a, b)


@pytest.mark.parametrize("wrt", [("bias",), ("q", "bias"), ("k", "v"), ("q", "k", "v")], ids=str)
@pytest.mark.parametrize("axes", WAYS)
def test_wrt(axes, wrt):
    """dbias alone, and a bias whose gradient is not asked for: nothing is compiled in for it."""
    x = inputs(case("tf32x3", axes, Hk=1))
    out, lse, *_ = on_cpu(x)
    want, _ = backward(x, "tf32x3", out, lse)
    gpu = Fibers(fused=small_tile(x, "tf32x3"))
    got = gpu.backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse, wrt=wrt, **x.options)
    assert "dbias_wmma" not in gpu.barriers
    assert ("dbias_sum" in gpu.barriers) == ("bias" in wrt and WAYS[axes] != cuda_dbias.ADDED)
    for name, a, b in zip(("q", "k", "v", "bias"), got, want, strict=False):
        assert (a is None) == (name not in wrt)
        if name in wrt and (name in "kv" or WAYS[axes] == cuda_dbias.OVER_ROWS):
            assert_bit_equal(name, a, b)
        elif name in wrt:       # added up in any order
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("kind", ["bfloat16", "float64"])
def test_an_array_with_strides_of_0_is_no_broadcast_bias(kind):
    """Each element of the array has its gradient, whatever lies in memory."""
    x = inputs(case(kind, "11qk"))
    out, lse, *_ = on_cpu(x)
    shape = (*x.q.shape[:3], x.k.shape[2])
    whole = x._replace(options=x.options | {"bias": np.broadcast_to(x.options["bias"], shape)})
    one, many = (run_all(y, small_tile(x, kind), out, lse)[3] for y in (x, whole))
    assert many.shape == shape
    assert_same("dbias", kind, (many.sum((0, 1), keepdims=True),), (one,))


# What is hidden must not matter, whatever it holds.

@pytest.mark.parametrize("kind", ["bfloat16", "tf32x3", "float64"])
@pytest.mark.parametrize("how", [how for how in HIDDEN if "softcap" not in how])
def test_hidden_values_do_not_matter(how, kind):
    for axes in ["b11k"] if how == "bias" else WAYS:
        x = inputs(case(kind, **{"axes": axes, "Nq": 41, "Nk": 37, "Hk": 1} | {
            name: value for name, value in HIDDEN[how].items() if name != "bias"}))
        keys, rows = hidden_places(x, how)
        where = {"q": rows, "k": keys, "v": keys, "dout": rows}
        found = []
        for value in (0, np.nan, np.inf, float(np.finfo(np.float32).max)):
            with np.errstate(over="ignore"):
                bad = np.array(value).astype(x.q.dtype)
            y = x._replace(**{name: np.where(w, bad, getattr(x, name))
                              for name, w in where.items()})
            out, lse = Fibers().forward(y.q, y.k, y.v, **y.options)
            found.append(run_all(y, small_tile(x, kind), out, lse)[3])
        for got in found[1:]:
            assert_bit_equal(f"{axes} dbias", got, found[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axes", WAYS)
def test_a_row_of_nan_shows_in_the_keys_that_it_sees_alone(axes, kind):
    """Others of its tile are hidden from it, and their element has the sum of other rows."""
    x = inputs(case(kind, axes, Nq=40, Nk=40, Hk=1, causal=True))
    x.q[1, 0, 20] = np.nan
    out, lse = Fibers().forward(x.q, x.k, x.v, **x.options)
    got = run_all(x, small_tile(x, kind), out, lse)[3]
    seen = np.zeros((*x.q.shape[:3], 40), bool)
    seen[1, 0, 20, :21] = True
    kept = tuple(axis for axis in range(4) if got.shape[axis] == 1)
    assert (np.isnan(got) == seen.any(kept, keepdims=True)).all()


# Long sums. Every dS is dlse / Nk, to the last digits, so that all roundings go one way.

def alike(kind, axes, Nq, Nk):
    dtype, precision = KINDS[kind]
    x = inputs(Case("alike", Nq=Nq, Nk=Nk, Hq=1, Hk=1, d=20, d_v=36, bias=axes, dtype=dtype,
                    bias_dtype=None if dtype == "float64" else "float32", precision=precision))
    x.options["bias"][...] = 0
    return Inputs(0 * x.q, x.k, x.v, 0 * x.dout, np.full_like(x.dlse, 1.7), x.options)


@pytest.mark.parametrize("kind", ["bfloat16", "tf32x3", "float64"])
@pytest.mark.parametrize("axes, Nq, Nk", [("1hq1", 20, 2999), ("111k", 2999, 20),
                                          ("1111", 1499, 31)])
def test_long_sums_are_exact(axes, Nq, Nk, kind):
    x = alike(kind, axes, Nq, Nk)
    out, lse = cf.attention(x.q, x.k, x.v, return_lse=True, out_dtype=wide(x), **x.options)
    judge(axes, {"dbias": run_all(x, small_tile(x, kind), out, lse)[3]}, *answers_to(x))

"""`wrt`: the gradients that are not asked for are neither returned nor computed."""

from itertools import combinations

import numpy as np
import pytest
from cases import Case, inputs
from fake_cupy import fake
from numerics import assert_bit_equal

import cupy_flash as cf
from cupy_flash import device
from cupy_flash.bind import Options, bind_backward
from cupy_flash.plan import make_plan, tuned
from cupy_flash.plan.cpu import SURPLUS_ROWS
from cupy_flash.results import missing

NAMES = ("q", "k", "v", "bias", "sink")
SUBSETS = [names for n in range(1, 6) for names in combinations(NAMES, n)]
CASES = {
    "a task per head": Case("wrt", Nq=60, Nk=70, d=16, Hq=4, Hk=2, bias="hqk", sink=(1.0, 2.0)),
    "tiles in turns": Case("wrt", Nq=500, Nk=1100, d=16, Hq=2, Hk=2, bias="1hq1", sink=(0.0, 1.0),
                           causal=True),
    "chunks": Case("wrt", Nq=2000, Nk=90, d=16, d_v=24, Hq=2, Hk=1, bias="11qk", sink=(0.0, 1.0),
                   softcap=3.0),
    "large rows": Case("wrt", Nq=90, Nk=300, d=16, bias="hqk", sink=(9e3, 3e4), dtype="bfloat16",
                       scale=1e4),
}


def gradients(x, **more):
    """The gradients of a case's inputs, by name."""
    out, lse = cf.attention(x.q, x.k, x.v, return_lse=True, **x.options)
    g = cf.attention_backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse, **x.options, **more)
    return {name: getattr(g, f"d{name}") for name in NAMES}


def plan_of(x, threads=8, **more):
    """The plan of the backward pass."""
    results = x.dout, x.q, x.k, x.v, x.dout, np.zeros_like(x.dlse)
    problem, _ = bind_backward(*results, Options(**x.options), **more)
    return make_plan("backward", problem, device.Device("cpu", threads))


def assert_parts(x, whole, names):
    """Of `whole` the gradients of the operands in `names`, to the bit, and no others."""
    for name, part in gradients(x, wrt=names).items():
        if name in names:
            assert_bit_equal(f"{name} of {names}", part, whole[name])
        else:
            assert part is None, (name, names)


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("label", CASES)
def test_what_is_wanted_has_the_same_bits(label, threads, monkeypatch):
    monkeypatch.setattr(device, "cpu", lambda: device.Device("cpu", threads))
    x = inputs(CASES[label])
    whole = gradients(x)
    for names in SUBSETS:
        assert_parts(x, whole, names)


@pytest.mark.parametrize("threads", [1, 8])
def test_sums_of_two_levels_have_the_same_bits(threads, monkeypatch):
    """More than `NEAR_TILES` tiles of rows a chunk, and more than `NEAR_KEYS` keys."""
    monkeypatch.setattr(device, "cpu", lambda: device.Device("cpu", threads))
    x = inputs(Case("wrt", Nq=4200, Nk=4400, d=4, Hq=1, Hk=1, causal=True))
    with tuned(Br=16):
        plans = [plan_of(x, threads, wrt=names) for names in (("k",), ("v",))]
        assert all(plan.launches[0].splits < 4200 / 16 / 256 for plan in plans)
        whole = gradients(x)
        for names in (("q",), ("k",), ("v",), ("q", "v"), ("v", "k")):
            assert_parts(x, whole, names)


def test_the_order_of_names_does_not_matter():
    x = inputs(CASES["a task per head"])
    assert_parts(x, gradients(x), ["bias", "v", "q"])
    assert_parts(x, gradients(x), NAMES)


def test_a_pullback_and_buffers():
    x = inputs(CASES["chunks"])
    whole, dk = gradients(x), np.empty_like(x.k)
    assert gradients(x, wrt=("k",), dk=dk)["k"] is dk
    assert_bit_equal("dk", dk, whole["k"])
    _, pullback = cf.attention_vjp(x.q, x.k, x.v, return_lse=True, wrt=("v", "bias"), **x.options)
    for _ in range(2):
        g = pullback(x.dout, x.dlse)
        assert g.dq is g.dk is None
        assert_bit_equal("dv", g.dv, whole["v"])
        assert_bit_equal("dbias", g.dbias, whole["bias"])


@pytest.mark.parametrize("label", CASES)
def test_what_is_not_wanted_is_not_planned(label):
    x = inputs(CASES[label])

    def planned(names):
        plan = plan_of(x, wrt=names)
        return {one.entry for one in plan.launches}, {
            buffer.name: buffer.nbytes for buffer in plan.workspace}

    launches, buffers = planned(None)
    assert planned(NAMES) == (launches, buffers)
    sums = {"reduce_chunks"} & launches
    for names in SUBSETS:
        found, sizes = planned(names)
        wanted = {"backward", *(f"d{name}" for name in ("bias", "sink") if name in names)}
        assert found == (wanted | sums if {"k", "v"} & {*names} else wanted), names
        assert ("normalisers" in sizes) == ("bias" in names)
        assert ("sink_terms" in sizes) == ("sink" in names)
        if not {"k", "v"} & {*names}:
            assert sizes.keys() <= {"slab", "normalisers", "sink_terms"}
        elif "partial" in sizes and not {"k", "v"} <= {*names}:
            assert sizes["partial"] < 0.8 * buffers["partial"]


def test_the_scratch_of_dq_is_not_planned():
    x = inputs(Case("wrt", Nq=300, Nk=5000, d=64, Hq=1, Hk=1))
    with_dq, without = (plan_of(x, 1, wrt=names).workspace_bytes for names in (("q", "v"), ("v",)))
    # The tile, far and rest.
    assert with_dq - without == 4 * (96 + SURPLUS_ROWS + 2 * 96) * (64 + 16)


@pytest.mark.parametrize("names", SUBSETS, ids=" ".join)
def test_what_is_not_wanted_is_not_allocated(names):
    x = inputs(CASES["chunks"])
    problem = plan_of(x, wrt=names).problem
    gradients = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias", "sink": "dsink"}
    assert {one.name for one in missing("backward", problem)} == {gradients[n] for n in names}


def test_explain_says_what_is_left_out():
    x = inputs(CASES["chunks"])
    forward, backward = cf.explain(x.q, x.k, x.v, wrt=("q", "k"), **x.options).split("\nbackward:")
    assert "no gradient of v bias sink" in backward and "no gradient" not in forward
    assert "no gradient" not in cf.explain(x.q, x.k, x.v, wrt=NAMES, **x.options)
    assert "dbias" not in backward and "dsink" not in backward


@pytest.mark.parametrize("wrt, error, words", [
    ("q", TypeError, 'expected a tuple of names (q, k, v, bias, sink): pass `("q",)`'),
    (("q", "dk"), ValueError, 'as in `wrt=("k",)`'),
    (("k", "bias"), ValueError, "pass `('k',)`"),
    (("q", "q"), ValueError, "pass `tuple(dict.fromkeys(wrt))`"),
    ((), ValueError, "leave it out"),
])
def test_every_function_refuses_it_alike(wrt, error, words):
    x = np.zeros((7, 8), np.float32)
    calls = (lambda: cf.attention_backward(x, x, x, x, x, x[:, 0], wrt=wrt),
             lambda: cf.attention_vjp(x, x, x, wrt=wrt), lambda: cf.explain(x, x, x, wrt=wrt))
    for call in calls:
        with pytest.raises(error, match=r"^`wrt` ") as raised:
            call()
        assert words in str(raised.value)


@pytest.mark.parametrize("wrt", [("q",), ("k",), ("v",), ("k", "v"), ("q", "bias"), ("bias",)])
def test_a_gpu_launches_nothing_for_the_rest(launches, wrt):
    x, lse = fake(np.zeros((2, 3, 5, 16), np.float16)), fake(np.zeros((2, 3, 5), np.float32))
    bias = fake(np.zeros((3, 5, 1), np.float16))
    g = cf.attention_backward(x, x, x, x, x, lse, wrt=wrt, bias=bias)
    assert [name for name in ("dq", "dk", "dv", "dbias") if getattr(g, name) is not None] == [
        f"d{name}" for name in wrt]
    names = " ".join(launches.names)
    assert ("postprocess" in names) == ("q" in wrt) and ("dbias_sum" in names) == ("bias" in wrt)
    assert "backward_sm80" in names and "dbias_wmma" not in names


def test_a_dbias_that_has_a_kernel_of_its_own_launches_no_other(launches):
    x, lse = fake(np.zeros((2, 3, 5, 16), np.float16)), fake(np.zeros((2, 3, 5), np.float32))
    cf.attention_backward(x, x, x, x, x, lse, wrt=("bias",), softcap=5.0,
                          bias=fake(np.zeros((3, 5, 1), np.float16)))
    names = " ".join(launches.names)
    assert "dbias_wmma" in names and "backward_sm80" not in names

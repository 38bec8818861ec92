"""merge: partial results over disjoint keys give the result over all of them."""

from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
import pytest
from answers import answers, answers_to, judge
from cases import DTYPES, SINK, Case, inputs
from numerics import assert_bit_equal

import cupy_flash as cf

INF = np.inf


def merge(backend, outs, lses):
    """`cf.merge` on the backend, the results as NumPy arrays."""
    out, lse = cf.merge([backend.asarray(x) for x in outs], [backend.asarray(x) for x in lses])
    return backend.asnumpy(out), backend.asnumpy(lse)


def single(value, lse, dtype=np.float64):
    """A partial result of one row and one column."""
    return np.array([[value]], dtype), np.array([lse], dtype)


@pytest.mark.parametrize("parts, want", [
    ([(0, -INF), (0, -INF)], (0, -INF)),
    ([(3, 1), (0, -INF)], (3, 1)),
    ([(0, -INF), (3, 1)], (3, 1)),
    ([(3, 1), (np.nan, -INF)], (3, 1)),
    ([(np.nan, -INF), (np.inf, -INF), (3, 1)], (3, 1)),
    ([(np.nan, -INF), (np.nan, -INF)], (0, -INF)),
    ([(np.nan, INF), (3, 1)], (3, 1)),
    ([(7, INF), (np.nan, INF)], (0, -INF)),
    ([(1, 0), (5, 1000)], (5, 1000)),
    ([(1, 1e4), (3, 1e4)], (2, 1e4 + np.log(2))),
    ([(1, -1000), (3, -1001)], (1.5378828427399904, -999.6867383124818)),
    ([(1, np.log(3)), (0, 0)], (0.75, np.log(4))),
    ([(1, 0)] * 5, (1, np.log(5))),
    ([(4, 2.5)], (4, 2.5)),
    ([(np.nan, -INF)], (0, -INF)),
])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_closed_forms(backend, parts, want, dtype):
    outs, lses = zip(*(single(*part, dtype) for part in parts), strict=True)
    out, lse = merge(backend, outs, lses)
    assert out.shape == (1, 1) and lse.shape == (1,)
    np.testing.assert_allclose(out[0, 0], want[0], rtol=4 * np.finfo(dtype).eps)
    np.testing.assert_allclose(lse[0], want[1], rtol=4 * np.finfo(dtype).eps)


def test_only_one_of_64_parts_has_keys(backend):
    rng = np.random.default_rng(0)
    out = rng.standard_normal((2, 5, 3)).astype(np.float32)
    lse = rng.standard_normal((2, 5)).astype(np.float32)
    empty = np.full_like(out, np.nan), np.full_like(lse, -INF)
    parts = [empty] * 63
    for at in (0, 31, 63):
        outs, lses = zip(*parts[:at], (out, lse), *parts[at:], strict=True)
        got, got_lse = merge(backend, outs, lses)
        assert_bit_equal("out", got, out)
        assert_bit_equal("lse", got_lse, lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", [(100,), (1, 2, 96, 96, 150), tuple(range(20, 203, 20))],
                         ids=["two", "uneven-and-empty", "eleven"])
def test_chunks_of_the_keys(backend, dtype, cuts):
    """Partial results in the accumulator dtype merge to the accuracy of one pass."""
    case = Case("merge", B=2, Hq=4, Hk=2, d=32, dtype=dtype, data="late")
    x = inputs(case)
    y = backend.move(x)
    accumulator = np.float64 if dtype == "float64" else np.float32
    edges = (0, *cuts, case.Nk)
    outs, lses = [], []
    for start, stop in pairwise(edges):
        out, lse = cf.attention(y.q, y.k[:, :, start:stop], y.v[:, :, start:stop],
                                return_lse=True, out_dtype=accumulator)
        outs.append(out)
        lses.append(lse)
    out, lse = (backend.asnumpy(a) for a in cf.merge(outs, lses))
    assert out.dtype == lse.dtype == accumulator
    want, plain = answers(case)
    judge(case.id, {"out": out, "lse": lse}, want, plain)


def test_causal_chunks_some_of_which_are_empty(backend):
    """Chunks wholly in the future of a query come back as (0, -inf) and change nothing."""
    case = Case("merge-causal", Nq=203, Nk=203, d=32, causal=True, dtype="float64")
    x = backend.move(inputs(case))
    outs, lses = [], []
    for start in range(0, 203, 50):
        chunk = slice(start, min(start + 50, 203))
        out, lse = cf.attention(x.q, x.k[:, :, chunk], x.v[:, :, chunk], causal=True,
                                q_offset=-start, return_lse=True)
        assert (backend.asnumpy(lse)[..., :start] == -INF).all()
        outs.append(out)
        lses.append(lse)
    want, plain = answers(case)
    for order in list(permutations(range(5)))[::17]:
        out, lse = cf.merge([outs[i] for i in order], [lses[i] for i in order])
        judge(case.id, {"out": backend.asnumpy(out), "lse": backend.asnumpy(lse)}, want, plain)


@pytest.mark.parametrize("owner", [0, 1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("label", ["sink-causal-gqa", "sink-mask-gqa", "sink-bias-holes-gqa",
                                   "sink-lens"])
def test_one_part_has_the_sink(backend, label, dtype, owner):
    """Forward and backward by parts, of which one sees no key: all get the whole's out and lse."""
    x = inputs(replace(next(case for case in SINK if case.label == label), dtype=dtype))
    y = backend.move(x)
    Nq, Nk = x.q.shape[2], x.k.shape[2]
    sink = y.options.pop("sink")
    calls = []
    for i, part in enumerate((slice(0, 60), slice(60, 61), slice(61, 61), slice(61, Nk))):
        options = dict(y.options)
        for name in {"mask", "bias"} & {*options}:
            options[name] = options[name][..., part]
        if options["causal"]:
            options["q_offset"] = Nk - Nq - part.start
        if "kv_lens" in options:
            options["kv_lens"] = (options["kv_lens"] - part.start).clip(0, part.stop - part.start)
        calls.append((y.k[:, :, part], y.v[:, :, part],
                      options | ({"sink": sink} if i == owner else {})))
    outs, lses = zip(*(cf.attention(y.q, k, v, return_lse=True, out_dtype=sink.dtype, **options)
                       for k, v, options in calls), strict=True)
    out, lse = cf.merge(outs, lses)
    # Sums of parts that are rounded to 16 bits each would be farther off than one result is.
    parts = [cf.attention_backward(y.dout, y.q, k, v, out, lse, dlse=y.dlse,
                                   grad_dtype=sink.dtype, **options) for k, v, options in calls]
    assert [g.dsink is not None for g in parts] == [i == owner for i in range(4)]
    got = {"out": out, "lse": lse, "dq": sum(g.dq for g in parts), "dsink": parts[owner].dsink}
    got |= {name: backend.xp.concatenate([getattr(g, name) for g in parts], axis)
            for name, axis in (("dk", 2), ("dv", 2), ("dbias", 3))
            if getattr(parts[0], name) is not None}
    got = {name: backend.asnumpy(array) for name, array in got.items()}
    judge(label, {name: array.astype(x.q.dtype) if name in ("out", "dq", "dk", "dv") else array
                  for name, array in got.items()}, *answers_to(x))


def test_the_sink_of_a_part_reaches_rows_that_see_their_keys_elsewhere(backend):
    """dsink has their D, though their dout is forgotten where only the sink is seen."""
    x = inputs(Case("elsewhere", Nq=40, Nk=50, d=16, sink=(1.0, 3.0), dtype="float64"))
    y = backend.move(x)
    out, lse = cf.attention(y.q, y.k, y.v, return_lse=True, **y.options)
    none = y.k[:, :, :0], y.v[:, :, :0]
    g = cf.attention_backward(y.dout, y.q, *none, out, lse, dlse=y.dlse, **y.options)
    judge("elsewhere", {"dsink": backend.asnumpy(g.dsink)}, *answers_to(x))


def test_shapes_with_2_to_4_axes_and_zero_rows(backend):
    for shape in ((5, 3), (2, 5, 3), (2, 2, 5, 3), (2, 0, 3), (0, 2, 5, 3)):
        out = np.ones(shape, np.float32)
        lse = np.zeros(shape[:-1], np.float32)
        got, got_lse = merge(backend, [out, out], [lse, lse])
        assert got.shape == shape and got_lse.shape == shape[:-1]
        assert (got == 1).all()
        np.testing.assert_allclose(got_lse, np.log(2), rtol=1e-6)


def test_inputs_are_only_read(backend):
    rng = np.random.default_rng(0)
    outs = [rng.standard_normal((4, 3)) for _ in range(3)]
    lses = [rng.standard_normal(4) for _ in range(3)]
    for array in outs + lses:
        array.flags.writeable = False
    out, _ = merge(backend, outs, lses)
    weights = np.exp(lses)
    want = (weights[..., None] * outs).sum(0) / weights.sum(0)[:, None]
    np.testing.assert_allclose(out, want, rtol=1e-14)


def test_nan_in_a_part_that_counts_propagates(backend):
    out, lse = merge(backend, *zip(single(np.nan, 0.0), single(1, 0.0), strict=True))
    assert np.isnan(out).all() and np.isfinite(lse).all()
    out, lse = merge(backend, *zip(single(2, np.nan), single(1, 0.0), strict=True))
    assert np.isnan(out).all() and np.isnan(lse).all()


OUT, LSE = np.ones((2, 5, 3), np.float32), np.zeros((2, 5), np.float32)


BAD = {
    "no-parts": ([], [], ValueError, "outs"),
    "fewer-outs": ([OUT], [LSE, LSE], ValueError, "(lses|outs)"),
    "shapes-differ": ([OUT, OUT[:, :4]], [LSE, LSE[:, :4]], ValueError, "outs"),
    "lse-broadcasts": ([OUT, OUT], [LSE, LSE[:1]], ValueError, "lses"),
    "lse-shape": ([OUT, OUT], [LSE, LSE[:, :4]], ValueError, "lses"),
    "integers": ([OUT, OUT.astype(np.int32)], [LSE, LSE], TypeError, "outs"),
    "integer-lse": ([OUT, OUT], [LSE, LSE.astype(np.int64)], TypeError, "lses"),
    "list": ([OUT, [[1.0]]], [LSE, LSE], TypeError, "outs"),
    "list-lse": ([OUT, OUT], [LSE, [0.0]], TypeError, "lses"),
}


@pytest.mark.parametrize("outs, lses, error, name", BAD.values(), ids=BAD)
def test_bad_input(outs, lses, error, name):
    with pytest.raises(error, match=rf"^`{name}"):
        cf.merge(outs, lses)

"""The docstrings of what is public: sections, arguments, and examples that run."""

import doctest
import inspect
import re

import numpy as np
import pytest

import cupy_flash as cf
from cupy_flash.bind import Options

PUBLIC = [getattr(cf, name) for name in cf.__all__ if not name.startswith("_")]
SECTIONS = ("Parameters", "Returns", "Raises", "Notes", "Examples")


@pytest.mark.parametrize("thing", PUBLIC, ids=lambda thing: thing.__name__)
def test_sections(thing):
    text = inspect.getdoc(thing)
    found = re.findall(r"^(\w+)\n-+$", text, re.MULTILINE)
    wanted = SECTIONS if inspect.isfunction(thing) else ("Attributes", "Notes", "Examples")
    assert found == [*wanted]


@pytest.mark.parametrize("thing", PUBLIC, ids=lambda thing: thing.__name__)
def test_examples_run(thing):
    results = doctest.DocTestRunner(verbose=False)
    for test in doctest.DocTestFinder(recurse=False).find(thing, thing.__name__, globs={}):
        results.run(test)
    assert results.tries >= 2 and results.failures == 0


@pytest.mark.parametrize("function", [f for f in PUBLIC if inspect.isfunction(f)],
                         ids=lambda f: f.__name__)
def test_every_argument_is_described(function):
    """And nothing else; behind ``**options`` are those of `Options`."""
    text = inspect.getdoc(function).partition("Parameters\n")[2].partition("\nReturns\n")[0]
    described = {name for line in re.findall(r"^(\S[^:\n]*?)(?: : .*)?$", text, re.MULTILINE)
                 for name in re.findall(r"\w+", line)} - {"Parameters"}
    parameters = {*inspect.signature(function).parameters}
    assert parameters <= described, parameters - described
    if "options" in parameters:
        listed = re.search(r"\*\*options\n((?:    .*\n?)+)", text)[1]
        assert {*Options._fields} <= {*re.findall(r"\w+", listed)}


def test_what_the_pullback_keeps_is_said_first():
    """Every array of its closure, before the parameters: a change of one would go unseen."""
    x = np.ones((3, 4), np.float32)
    _, pullback = cf.attention_vjp(x, x, x, bias=np.zeros(3))
    kept = inspect.getclosurevars(pullback).nonlocals
    names = {name for name, value in kept.items() if isinstance(value, np.ndarray)}
    assert names == {"q", "k", "v", "out", "lse"}
    first = inspect.getdoc(cf.attention_vjp).partition("Parameters\n")[0]
    for name in names | {"bias", "mask", "alibi_slopes", "sink", "q_lens", "kv_lens"}:
        assert re.search(rf"\b{name}\b", first), name
    assert "out += x" in first


def test_arrays_are_kept_and_not_copied():
    """What the docstring warns of, so that it stays true: a change is seen by the pullback."""
    x = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    for name in ("out", "bias", "q"):
        arrays = {"q": x.copy(), "bias": np.zeros(5, np.float32)}
        out, pullback = cf.attention_vjp(arrays["q"], x, x, bias=arrays["bias"])
        before = pullback(x)
        changed = (arrays | {"out": out})[name]
        changed += np.linspace(0, 1, changed.size, dtype=np.float32).reshape(changed.shape)
        after = pullback(x)
        assert not np.array_equal(before.dq, after.dq), name


def test_an_offset_without_effect():
    """Where nothing looks at positions, as the docstring says; where something does, it matters."""
    q, k = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    slopes = np.ones(1, np.float32)
    for options, effect in (({}, False), ({"mask": np.ones((5, 5), bool)}, False),
                            ({"causal": True}, True), ({"window": (0, 1)}, True),
                            ({"alibi_slopes": slopes}, True), ({"causal": False}, False)):
        same = (cf.attention(q, k, k, q_offset=-2, **options) == cf.attention(q, k, k, **options))
        assert same.all() != effect, options
    assert "without effect" in inspect.getdoc(cf.attention)


def test_causal_rows_of_a_padded_batch():
    """kv_lens alone aligns the last padded query to the last true key; with q_lens it is right."""
    x = np.random.default_rng(0).standard_normal((1, 1, 6, 8)).astype(np.float32)
    true = x[:, :, :4]
    want = cf.attention(true, true, true, causal=True)
    lens = np.int32([4])
    both = cf.attention(x, x, x, causal=True, q_lens=lens, kv_lens=lens)
    np.testing.assert_array_equal(both[:, :, :4], want)
    alone, lse = cf.attention(x, x, x, causal=True, kv_lens=lens, return_lse=True)
    assert (lse[0, 0, :2] == -np.inf).all() and (alone[0, 0, :2] == 0).all()
    assert "give both" in inspect.getdoc(cf.attention)

"""The judge itself: what it must not let pass, and what it must not call wrong."""

from itertools import islice

import numpy as np
import pytest
from answers import Answer, answers, answers_to, judge, moved
from cases import DTYPES, Case, inputs
from numerics import (
    DRAWS,
    FEW,
    FEW_ROWS,
    NEAREST,
    assert_as_accurate_as_baseline,
    assert_rows_as_accurate,
    draws_for,
    eps,
    largest_of_nearest,
)

import cupy_flash as cf

# Tall windows keep the rows of every result apart: a large row is no term of a small one's sum.
SPREAD = {"dq": Case("judge", Nq=400, Nk=400, d=16, window=(9, 9), data="spread"),
          "out": Case("judge", Nq=400, Nk=400, d=16, window=(9, 9), data="spread-values")}


def right(case):
    """What the CPU path returns, and both answers."""
    x = inputs(case)
    out, lse = cf.attention(x.q, x.k, x.v, return_lse=True, **x.options)
    g = cf.attention_backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse, **x.options)
    return {"out": out, "lse": lse, **g._asdict()}, *answers(case)


def rows_with_errors(dtype, n=1000, d=24, size=2.0**-11):
    """A reference whose rows spread over 2^16, and a baseline that errs by `size` in every row."""
    rng = np.random.default_rng(1)
    want = rng.standard_normal((2, n // 2, d)) * 2.0 ** -rng.uniform(0, 16, (2, n // 2, 1))
    plain = want * (1 + size * rng.standard_normal(want.shape))
    return want, plain, (want * (1 + size * rng.standard_normal(want.shape))).astype(dtype)


@pytest.mark.parametrize("broken, complaint", [
    ("one wrong entry", "exceeds"),
    ("nan", "NaN at different places"),
    ("inf", "-inf at different places"),
    ("shape", "shape"),
])
def test_the_rule_for_the_whole_array_can_fail(broken, complaint):
    rng = np.random.default_rng(0)
    want = rng.standard_normal((5, 7))
    draws = [(want, want.astype(np.float32).astype(np.float64))]
    got = want.astype(np.float32)
    assert_as_accurate_as_baseline("fine", got, want, draws)
    if broken == "shape":
        got = got[:4]
    else:
        got[2, 3] += {"one wrong entry": 1e-5, "nan": np.nan, "inf": -np.inf}[broken]
    with pytest.raises(AssertionError, match=complaint):
        assert_as_accurate_as_baseline("broken", got, want, draws)


@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_rows_beside_large_ones_are_not_wrong_unseen(name, dtype):
    """Five rows of 800, far smaller than the largest: the rule for the whole array lets them be."""
    case = Case(**{**SPREAD[name].__dict__, "dtype": dtype})
    got, want, plain = right(case)
    judge(case.id, got, want, plain)
    array, truth = got[name].copy(), getattr(want, name)
    norm = np.linalg.norm(truth.astype(np.float64), axis=-1).ravel()
    assert norm.max() > norm.min() * 2.0 ** (8 if dtype == "float16" else 16)
    rows = array.reshape(-1, array.shape[-1])
    at = np.argsort(norm)[:5]
    # In 16 bits a factor that rounding would not cause; in wide types what truncation would do.
    rows[at] = (rows[at].astype(np.float64) * (1 + 16 * eps(array.dtype))).astype(array.dtype)
    assert_as_accurate_as_baseline(name, array, truth, islice(plain.draws(name), 1))
    with pytest.raises(AssertionError, match="rows are beyond the rule for rows, 4 may be"):
        assert_rows_as_accurate(name, array, truth, islice(plain.draws(name), 1))
    with pytest.raises(AssertionError, match="rule for rows"):
        judge(case.id, {name: array}, want, plain)


@pytest.mark.parametrize("n, may", [(1000, 4), (4000, 8)])
def test_a_few_rows_may_be_beyond_and_no_more(n, may):
    want, plain, got = rows_with_errors(np.float32, n)
    assert_rows_as_accurate("fine", got, want, [(want, plain)])
    rows, at = got.reshape(-1, got.shape[-1]), np.random.default_rng(2).permutation(n)
    rows[at[:may]] *= 1.5
    assert_rows_as_accurate("a few", got, want, [(want, plain)])
    rows[at[may]] *= 1.5
    with pytest.raises(AssertionError, match=f"{may + 1} of {n} rows"):
        assert_rows_as_accurate("one more", got, want, [(want, plain)])


def test_a_baseline_that_errs_in_large_rows_does_not_excuse_small_ones():
    """Only the rows of nearest norm count."""
    want, plain, got = rows_with_errors(np.float32)
    order = np.argsort(np.linalg.norm(want, axis=-1).ravel())
    plain.reshape(-1, plain.shape[-1])[order[-300:]] *= 1.1
    got.reshape(-1, got.shape[-1])[order[-300:]] *= 1.1
    assert_rows_as_accurate("large", got, want, [(want, plain)])
    got.reshape(-1, got.shape[-1])[order[:5]] *= 1.1
    with pytest.raises(AssertionError, match="rule for rows"):
        assert_rows_as_accurate("small", got, want, [(want, plain)])


@pytest.mark.parametrize("n", [1, 5, NEAREST, NEAREST + 1, 1000])
def test_the_nearest_rows(n):
    x = np.random.default_rng(n).random(n)
    got = largest_of_nearest(x)
    for i in range(n):
        first = max(0, min(i - NEAREST // 2, n - NEAREST))
        assert got[i] == x[first : first + NEAREST].max()


def test_rows_that_are_rounding_errors_or_not_finite_are_left_to_the_whole_array():
    want, plain, got = rows_with_errors(np.float32)
    want[0, :9] *= 1e-14
    plain[0, :9], got[0, :9] = want[0, :9], 0
    want[1, :9, 3] = plain[1, :9, 3] = np.nan
    got[1, :9] = np.nan
    assert_rows_as_accurate("fine", got, want, [(want, plain)])


@pytest.mark.parametrize("size, queries, draws", [
    (FEW - 1, 100, DRAWS), (FEW, 100, 1), (10**5, FEW_ROWS, DRAWS), (10**5, FEW_ROWS + 1, 1),
])
def test_how_many_draws_of_the_baseline_count(size, queries, draws):
    """Settled by the sizes, whatever the result: a wrong one gets no draw more."""
    assert draws_for(size, queries) == draws
    taken = []

    class Counted:
        def draws(self, field):
            while True:
                taken.append(field)
                yield want.out, want.out

    fields = dict.fromkeys(Answer._fields)
    want = Answer(**fields | {"out": np.ones((size, 1)), "lse": np.ones(queries)})
    with pytest.raises(AssertionError, match="exceeds"):
        judge("wrong", {"out": np.full((size, 1), 1.1, np.float32)}, want, Counted())
    assert len(taken) == draws


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_draw_is_the_same_problem_with_other_roundings(dtype):
    x = inputs(Case("moved", Nq=9, Nk=20, dtype=dtype, mask="blocks", bias="1hqk", bias_holes=True,
                    kv_lens=(17,)))
    x.q[0, 0, 0, :3] = np.inf, 0, np.nan
    y = moved(x, 1)
    assert y.options.keys() == x.options.keys()
    pairs = [*zip(x[:-1], y[:-1], strict=True), (x.options["bias"], y.options["bias"])]
    for a, b in pairs:
        assert a.dtype == b.dtype
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        assert 0 < same.mean() < 1
        unit, a, b = eps(a.dtype), a[~same].astype(np.float64), b[~same].astype(np.float64)
        assert (np.abs(a - b) <= 2.5 * unit * np.abs(a)).all()
    for name in ("mask", "kv_lens"):
        assert x.options[name] is y.options[name]
    first, plain = answers_to(moved(x, 1))
    assert all((np.isfinite(a) == np.isfinite(b)).all()
               for a, b in [next(plain.draws("lse")), (first.lse, answers_to(x)[0].lse)])

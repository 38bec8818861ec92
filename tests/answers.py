"""The right answer and the baseline's answers to a case, each worked out once."""

from functools import cache
from itertools import count, islice
from typing import NamedTuple

import numpy as np
from cases import inputs
from numerics import (
    FEW_ROWS,
    assert_as_accurate_as_baseline,
    assert_rows_as_accurate,
    draws_for,
    eps,
)

from cupy_flash import reference

ROUNDING_OF_P = {"float16": 2.0**-12, "bfloat16": 2.0**-9, "tf32": 2.0**-12}


class Answer(NamedTuple):
    """What every path must return for a case, or what the baseline returns."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray | None
    dsink: np.ndarray | None = None


class Baseline:
    """What a baseline in the same dtype returns, for draw after draw of the data.

    The first draw are the `Inputs` themselves; in the others every number has moved by up to two
    units of its last place. That leaves the problem as it is, its scales, its masks, its terms
    that cancel, and draws all roundings anew.
    """

    def __init__(self, x, out_dtype):
        self._x, self._out_dtype = x, out_dtype
        self._known = [(_reference(x), _baseline(x, out_dtype))]
        self.reference = self._known[0][0]

    def draws(self, field):
        """Yield the reference's and the baseline's array of draw after draw, without end."""
        for step in count():
            if step == len(self._known):
                x = moved(self._x, step)
                self._known.append((_reference(x), _baseline(x, self._out_dtype)))
            yield tuple(getattr(answer, field) for answer in self._known[step])


@cache
def answers(case):
    """Return the reference's `Answer` to `case` and its `Baseline`."""
    return answers_to(inputs(case))


def answers_to(x, out_dtype=None):
    """Return the reference's `Answer` to the `Inputs` `x` and its `Baseline`.

    out_dtype: see `reference.baseline_backward`.
    """
    plain = Baseline(x, out_dtype)
    return plain.reference, plain


def moved(x, seed):
    """`Inputs` like `x`, every number moved towards 0 by up to two units of its last place."""
    rng = np.random.default_rng(seed)

    def move(array):
        if not isinstance(array, np.ndarray) or array.dtype.kind in "biu":
            return array
        wide = np.float64 if array.dtype != np.float64 else np.longdouble
        by = 1 - eps(array.dtype) * rng.uniform(0, 2, array.shape)
        return (array.astype(wide) * by).astype(array.dtype)

    return type(x)(*map(move, x[:-1]), {name: move(value) for name, value in x.options.items()})


def _reference(x):
    """The reference's `Answer`.

    It works in long double for float64 arrays: its own rounding would otherwise be as large as
    what it is to judge.
    """
    options = {name: value for name, value in x.options.items() if name != "precision"}
    options["compute_dtype"] = np.longdouble if x.q.dtype == np.float64 else np.float64
    return Answer(*reference.attention(x.q, x.k, x.v, **options),
                  *reference.attention_backward(x.dout, x.q, x.k, x.v, dlse=x.dlse, **options))


def _baseline(x, out_dtype):
    """The baseline's `Answer`."""
    return Answer(*reference.baseline(x.q, x.k, x.v, **x.options),
                  *reference.baseline_backward(x.dout, x.q, x.k, x.v, dlse=x.dlse,
                                               out_dtype=out_dtype, **x.options))


def floors(x):
    """What one unit in the last place of every score and of every dP may do to each result.

    For problems of a few entries or a few rows that outweigh all others: the largest of a few
    errors says little, and the baseline may be right by luck. A bound, not an estimate: it
    is some ten times what usually happens.
    """
    options = {name: value for name, value in x.options.items() if name != "precision"}
    f = reference._forward(x.q, x.k, x.v, np.dtype(np.float64), reference._unrounded, **options)
    unit = {"tf32": 2.0**-10}.get(x.options.get("precision"),
                                  2.0**-52 if x.q.dtype == np.float64 else 2.0**-23)
    if x.q.dtype.itemsize == 2:     # tensor cores cut off the sum of every eight products
        unit *= max(1, x.q.shape[-1] / 32)
    dout = np.where(f.visible.any(3)[..., None], _wide(x.dout).reshape(f.out.shape), 0)
    dlse = _largest(x.dlse)
    added = _largest(np.where(np.isfinite(bias := _wide(options.get("bias", 0))), bias, 0))
    added += _largest(options.get("alibi_slopes", 0)) * (2 * sum(f.visible.shape[2:]) + 300)
    added += _largest(np.where(np.isfinite(f.sinks), f.sinks, 0))
    S = unit * (abs(f.scale) * _largest(abs(f.q) @ abs(f.k).swapaxes(2, 3)) + added)
    dP = _largest(abs(dout) @ abs(f.v).swapaxes(2, 3))
    dA = 2 * unit * dP + (S + unit) * (2 * dP + dlse)
    if f.lse.size <= FEW_ROWS:
        # Roundings of a row's P add up in its delta, once per row: a few rows are a few samples.
        rounding = ROUNDING_OF_P.get(x.options.get("precision") or x.q.dtype.name, 0.0)
        dA += rounding * _largest(np.sqrt(np.square(f.P).sum(axis=3))) * dP
    column = _largest(f.P.sum(axis=2)) * (f.q.shape[1] if x.q.ndim > 2 else 1)
    bias = options.get("bias")
    return Answer(
        out=S * _largest(f.v), lse=S + unit,
        dq=abs(f.scale) * dA * _largest(f.k), dk=abs(f.scale) * dA * _largest(f.q) * column,
        dv=(S + unit) * _largest(dout) * column,
        dbias=None if bias is None else dA * _largest(reference._sum_to(f.P, bias.shape)),
        dsink=dA * _largest(f.P_sink.sum(axis=(0, 2, 3))),
    )


def judge(name, got, want, plain, floor=None, draws=None):
    """Hold every field of `got` that is not None (a dict) against the reference and the `Baseline`.

    floor: an `Answer`, see `floors`. draws: of the data, for the baseline; None: `draws_for` the
    size. Where problems are random, eight: among hundreds a draw that flatters the baseline is
    sure to come. The rule for rows is for arrays of vectors: an `lse` is a number for each row.
    """
    queries = want.lse.size
    for field, array in got.items():
        truth, least = getattr(want, field), 0.0 if floor is None else getattr(floor, field)
        if array is None:
            assert truth is None, f"{name}: {field} is None"
            continue
        n = draws_for(array.size, queries) if draws is None else draws
        assert_as_accurate_as_baseline(f"{name} {field}", array, truth,
                                       islice(plain.draws(field), n), least)
        if field != "lse":
            assert_rows_as_accurate(f"{name} {field}", array, truth,
                                    islice(plain.draws(field), n),
                                    least if queries <= FEW_ROWS else 0.0)


def _wide(x):
    return np.asarray(x).astype(np.float64)


def _largest(x):
    return float(np.abs(_wide(x)).max(initial=0.0))

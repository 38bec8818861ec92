"""The right answer and the plain program's answer to a case, each worked out once."""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
from cases import inputs
from numerics import assert_as_accurate_as_baseline

from cupy_flash import reference

FEW_ROWS = 32
ROUNDING_OF_P = {"float16": 2.0**-12, "bfloat16": 2.0**-9, "tf32": 2.0**-12}


class Answer(NamedTuple):
    """What every path must return for a case, or, from the plain program, how near it gets."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray | None


@cache
def answers(case):
    """Return the reference's and the baseline's `Answer` to `case`."""
    return answers_to(inputs(case))


def answers_to(x, out_dtype=None):
    """Return the reference's and the baseline's `Answer` to the `Inputs` `x`.

    The reference works in long double for float64 arrays: its own rounding would otherwise be
    as large as what it is to judge. out_dtype: see `reference.baseline_backward`.
    """
    options = {name: value for name, value in x.options.items() if name != "precision"}
    precision = x.options.get("precision")
    dtype = np.longdouble if x.q.dtype == np.float64 else np.float64
    want = (
        *reference.attention(x.q, x.k, x.v, compute_dtype=dtype, **options),
        *reference.attention_backward(x.dout, x.q, x.k, x.v, dlse=x.dlse, compute_dtype=dtype,
                                      **options),
    )
    plain = (
        *reference.baseline(x.q, x.k, x.v, precision=precision, **options),
        *reference.baseline_backward(x.dout, x.q, x.k, x.v, dlse=x.dlse, precision=precision,
                                     out_dtype=out_dtype, **options),
    )
    return Answer(*want), Answer(*plain)


def floors(x):
    """What one unit in the last place of every score and of every dP may do to each result.

    For problems of a few entries or a few rows that outweigh all others: the largest of a few
    errors says little, and the plain program may be right by luck. A bound, not an estimate: it
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
    )


def judge(name, got, want, plain, floor=None):
    """Hold every field of `got` that is not None (a dict) against the two answers."""
    for field, array in got.items():
        if array is None:
            assert getattr(want, field) is None, f"{name}: {field} is None"
        else:
            assert_as_accurate_as_baseline(f"{name} {field}", array, getattr(want, field),
                                           getattr(plain, field),
                                           0.0 if floor is None else getattr(floor, field))


def judge_case(case, got, floor=None):
    """`judge` for a case of the table, with a second look where its one draw may be to blame."""
    try:
        judge(case.id, got, *answers(case), floor)
    except AssertionError:
        judge(case.id, got, *answers(case), floor_of_draws(case, answers(case), floor))


def floor_of_draws(case, known, floor=None, out_dtype=None):
    """The floor, or twice the plain program's largest error over eight draws of the case's data.

    The largest error of one draw is a matter of luck, the plain program's as much as ours: among
    thousands of problems a handful of draws flatter it by more than the rule's factor of two.
    Errors are carried from draw to draw in units of the largest value. known: the `answers`.
    """
    largest = dict.fromkeys(Answer._fields, 0.0)
    for step in range(8):
        want, plain = answers_to(inputs(replace(case, seed=case.seed + step)), out_dtype)
        for name, a, b in zip(Answer._fields, want, plain, strict=True):
            if a is not None and np.isfinite(a).any():
                seen = np.isfinite(a)
                error = np.abs(b[seen] - a[seen]).max() / np.abs(a[seen]).max()
                largest[name] = max(largest[name], float(error))
    found = {}
    for name, a in known[0]._asdict().items():
        unit = 0.0 if a is None else _largest(a[np.isfinite(a)])
        found[name] = max(getattr(floor, name, None) or 0.0, 2 * largest[name] * unit)
    return Answer(**found)


def _wide(x):
    return np.asarray(x).astype(np.float64)


def _largest(x):
    return float(np.abs(_wide(x)).max(initial=0.0))

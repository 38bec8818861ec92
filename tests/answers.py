"""The right answer and the plain program's answer to a case, each worked out once."""

from functools import cache
from typing import NamedTuple

import numpy as np
from cases import inputs
from numerics import assert_as_accurate_as_baseline

from cupy_flash import reference


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


def answers_to(x):
    """Return the reference's and the baseline's `Answer` to the `Inputs` `x`.

    The reference works in long double for float64 arrays: its own rounding would otherwise be
    as large as what it is to judge.
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
                                     **options),
    )
    return Answer(*want), Answer(*plain)


def judge(name, got, want, plain):
    """Hold every field of `got` that is not None (a dict) against the two answers."""
    for field, array in got.items():
        if array is None:
            assert getattr(want, field) is None, f"{name}: {field} is None"
        else:
            assert_as_accurate_as_baseline(f"{name} {field}", array, getattr(want, field),
                                           getattr(plain, field))

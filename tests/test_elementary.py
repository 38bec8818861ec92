"""exp and tanh of the CPU path, beside long double: as exact as their file says."""

from itertools import pairwise

import numba
import numpy as np
import pytest

from cupy_flash.backends.cpu import elementary

LARGEST = {("exp", "float32"): 2e-7, ("exp", "float64"): 4e-16,
           ("tanh", "float32"): 4e-7, ("tanh", "float64"): 6e-16}


@pytest.mark.parametrize("name, dtype", LARGEST)
def test_relative_error(name, dtype):
    """At large arguments, too: x * log2(e), rounded, would be off by 30 units at x = -60."""
    function = getattr(elementary, name)

    @numba.njit(fastmath={"contract"}, error_model="numpy")
    def apply(x, y):
        for i in range(x.size):
            y[i] = function(x[i])

    ends = (-80, -40, -10, -1, 0, 1, 10, 40, 80) if name == "exp" else (-9, -1, 0, 0.6, 0.7, 9)
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(*pair, 20000) for pair in pairwise(ends)])
    x = x.astype(dtype)
    y, want = np.empty_like(x), getattr(np, name)(x.astype(np.longdouble))
    apply(x, y)
    assert np.abs(y / want - 1).max() < LARGEST[name, dtype]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_exp_of_what_is_no_number_or_far_below(dtype):
    @numba.njit(fastmath={"contract"}, error_model="numpy")
    def apply(x, y):
        for i in range(x.size):
            y[i] = elementary.exp(x[i])

    x = np.array([0, -0.0, -np.inf, np.nan, np.finfo(dtype).min, -760, -1e5], dtype)
    y = np.empty_like(x)
    apply(x, y)
    np.testing.assert_array_equal(y, np.array([1, 1, 0, np.nan, 0, 0, 0], dtype))

"""Problems without arrays, as the planner sees them."""

import numpy as np
from cases import DTYPES

from cupy_flash.arrays import Layout, Layouts
from cupy_flash.problem import Problem


def problem_of(*, has_mask=False, has_alibi=False, has_q_lens=False, has_kv_lens=False,
               bias_shape=None, dbias_dtype=None, layouts=(), unaligned=(), copied=(), **numbers):
    """A `Problem` with these numbers, and with dense layouts for the options that are named.

    `layouts` are tuples of name, shape, strides, name of the dtype and whether elements are
    aligned. `unaligned` and `copied` are what the problem says, whatever the layouts are.
    """
    p = Problem(**numbers)
    arrays = [Layout(name, shape, strides, DTYPES[dtype], aligned)
              for name, shape, strides, dtype, aligned in layouts]
    if has_mask:
        arrays.append(_dense("mask", p.scores, bool))
    if bias_shape is not None:
        arrays.append(_dense("bias", bias_shape, DTYPES[dbias_dtype or p.dtype]))
    if has_alibi:
        arrays.append(_dense("alibi_slopes", (p.heads_q,), np.float32))
    arrays += [_dense(name, (p.batch,), np.int32)
               for name, given in (("q_lens", has_q_lens), ("kv_lens", has_kv_lens)) if given]
    found = Problem(**numbers, layouts=Layouts(arrays))
    for name, value in (("unaligned", unaligned), ("copied", copied)):
        object.__setattr__(found, name, tuple(value))
    return found


def _dense(name, shape, dtype):
    """The layout of a dense array."""
    dtype = np.dtype(dtype)
    strides = [dtype.itemsize]
    for extent in shape[:0:-1]:
        strides.insert(0, strides[0] * extent)
    return Layout(name, tuple(shape), tuple(strides), dtype, True)

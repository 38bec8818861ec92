"""Problems without arrays, as the planner sees them."""

import numpy as np
from cases import DTYPES

from cupy_flash.arrays import Layout, Layouts
from cupy_flash.problem import Problem


def problem_of(*, has_mask=False, has_alibi=False, has_q_lens=False, has_kv_lens=False,
               bias_shape=None, bias_dtype=None, dbias_dtype=None, layouts=(), unaligned=(),
               copied=(), **numbers):
    """A `Problem` with these numbers, and with layouts for the arrays that are named.

    `layouts` are tuples of name, shape, strides, name of the dtype and whether elements are
    aligned; `unaligned` arrays, dense if they have none, lie at an address that is no multiple of
    16. Which are copied follows from their strides.
    """
    p = Problem(**numbers)
    arrays = [_dense("mask", p.scores, np.bool_)] if has_mask else []
    if bias_shape is not None:
        arrays.append(_dense("bias", bias_shape, DTYPES[bias_dtype or dbias_dtype or p.dtype]))
    if has_alibi:
        arrays.append(_dense("alibi_slopes", (p.heads_q,), np.float32))
    arrays += [_dense(name, (p.batch,), np.int32)
               for name, given in (("q_lens", has_q_lens), ("kv_lens", has_kv_lens)) if given]
    shapes = {"q": (p.batch, p.heads_q, p.Nq, p.d), "k": (p.batch, p.heads_k, p.Nk, p.d),
              "v": (p.batch, p.heads_k, p.Nk, p.d_v), "out": (p.batch, p.heads_q, p.Nq, p.d_v)}
    named = {entry[0] for entry in layouts}
    arrays += [_dense(name, shapes[name], DTYPES[p.dtype])._replace(offset=2)
               for name in unaligned if name not in named]
    arrays += [Layout(name, shape, strides, DTYPES[dtype], aligned, 2 * (name in unaligned))
               for name, shape, strides, dtype, aligned in layouts]
    found = Problem(**numbers, layouts=Layouts(arrays))
    assert {*copied} <= {*found.copied} and found.unaligned == tuple(unaligned)
    return found


def _dense(name, shape, dtype):
    """The layout of a dense array."""
    x = np.broadcast_to(np.zeros(1, dtype), shape)
    strides = tuple(x.itemsize * int(np.prod(shape[axis + 1:])) for axis in range(len(shape)))
    return Layout(name, tuple(shape), strides, x.dtype, True)

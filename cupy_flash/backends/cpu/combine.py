"""Merging the splits of the keys: the sums of `cupy_flash.merge`, in the order of the splits."""

import numpy as np
from numba import carray

from .elementary import exp
from .jit import as_pointer, kernel, next_task
from .mask import lengths
from .sink import join_sink
from .sums import joined, two_sum
from .team import enter, leave, stopped
from .tiles import store_row


@kernel
def combine(params, slab, shared, worker):
    """One worker: takes rows until none is left.

    With m = max m_s: l = sum exp(m_s - m) l_s, out = sum exp(m_s - m) l_s out_s / l. From m and l,
    not from lse_s = m_s + ln l_s: beside a large m_s there is no room for ln l_s. The sink
    joins these as it joins m and l of a row.
    """
    if not enter(shared, worker):
        return
    p = params[0]
    rows = p.batch * p.heads_q * p.Nq
    out_partial = carray(as_pointer(p.out_partial), (p.splits, rows, p.d_v), slab.dtype)
    sums_partial = carray(as_pointer(p.sums_partial), (p.splits, rows, 2), slab.dtype)
    total, rest = slab[: p.d_v], slab[p.d_v : 2 * p.d_v]
    zero, one = slab.dtype.type(0), slab.dtype.type(1)
    row = next_task(shared)
    while row < rows and not stopped(shared, worker):
        m = slab.dtype.type(-np.inf)
        for s in range(p.splits):
            m = np.maximum(m, sums_partial[s, row, 0])
        m_ref = m if m != -np.inf else zero
        l, l_rest = zero, zero
        total[:] = 0
        rest[:] = 0
        for s in range(p.splits):
            weight = exp(sums_partial[s, row, 0] - m_ref) * sums_partial[s, row, 1]
            l, lost = two_sum(l, weight)
            l_rest += lost
            for c in range(p.d_v):
                total[c], lost = two_sum(total[c], weight * out_partial[s, row, c])
                rest[c] += lost
        l = joined(l, l_rest)
        b, head, i = row // (p.heads_q * p.Nq), row // p.Nq % p.heads_q, row % p.Nq
        seen, alpha = l != 0, one
        if p.sink != 0 and i < lengths(p, b)[0]:
            m, l, alpha = join_sink(p, head, m, l, slab)
        for c in range(p.d_v):
            total[c] = joined(total[c], rest[c]) * alpha / l if seen else 0
        store_row(
            p.out, p.out.address + b * p.out.b + head * p.out.h + i * p.out.n, total, p.d_v, 1
        )
        if p.lse.address != 0:
            total[0] = m + np.log(l)
            lse = p.lse.address + b * p.lse.b + head * p.lse.h + i * p.lse.n
            store_row(p.lse, lse, total, 1, 1)
        row = next_task(shared)
    leave(shared, worker)

"""Merging the splits of the keys: the sums of `cupy_flash.merge`, in the order of the splits."""

import numpy as np
from numba import carray

from .elementary import exp
from .jit import as_pointer, kernel, next_task
from .team import enter, leave, stopped
from .tiles import store_row


@kernel
def combine(params, slab, shared, worker):
    """One worker: takes rows until none is left.

    lse = ln sum exp(lse_s), out = sum exp(lse_s - lse) out_s.
    """
    if not enter(shared, worker):
        return
    p = params[0]
    rows = p.batch * p.heads_q * p.Nq
    out_partial = carray(as_pointer(p.out_partial), (p.splits, rows, p.d_v), slab.dtype)
    lse_partial = carray(as_pointer(p.lse_partial), (p.splits, rows), slab.dtype)
    total = slab[: p.d_v]
    row = next_task(shared)
    while row < rows and not stopped(shared, worker):
        m = slab.dtype.type(-np.inf)
        for s in range(p.splits):
            m = np.maximum(m, lse_partial[s, row])
        m_ref = m if m != -np.inf else slab.dtype.type(0)
        l = slab.dtype.type(0)
        total[:] = 0
        for s in range(p.splits):
            weight = exp(lse_partial[s, row] - m_ref)
            l += weight
            for c in range(p.d_v):
                total[c] += weight * out_partial[s, row, c]
        b, head, i = row // (p.heads_q * p.Nq), row // p.Nq % p.heads_q, row % p.Nq
        for c in range(p.d_v):
            total[c] = total[c] / l if l != 0 else 0
        store_row(
            p.out, p.out.address + b * p.out.b + head * p.out.h + i * p.out.n, total, p.d_v, 1
        )
        if p.lse.address != 0:
            total[0] = m + np.log(l)
            lse = p.lse.address + b * p.lse.b + head * p.lse.h + i * p.lse.n
            store_row(p.lse, lse, total, 1, 1)
        row = next_task(shared)
    leave(shared, worker)

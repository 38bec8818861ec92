"""The CPU backend: NumPy arrays, Numba kernels, the same recurrence as on the GPU."""

import numpy as np

from ... import device
from ...arrays import empty_rows_like
from ...axes import as_given, four_axes
from ...plan import make_plan
from . import pool
from .backward import backward, reduce_chunks
from .combine import combine
from .dbias import dbias
from .forward import forward
from .params import Template

KERNELS = {kernel.__name__: kernel for kernel in (forward, combine, backward, reduce_chunks, dbias)}
_SLAB_ALIGNMENT = 64
_MOST_TEMPLATES = 4096
_templates = {}


def run(direction, problem, arrays):
    """Plan a call and run its launches.

    Returns the results that have no buffer among the arrays, by name.
    """
    plan = make_plan(direction, problem, device.cpu())
    operands = four_axes(problem, arrays)
    results = missing(plan, operands)
    operands = operands._replace(**results)
    buffers = {b.name: np.zeros(b.extent, b.dtype) for b in plan.workspace}
    if not plan.launches:
        return as_given(problem, results)
    template = _templates.get(plan) or _make_template(plan, operands, buffers)
    params = template.fill(operands, buffers)
    for launch in plan.launches:
        slabs = _slabs(buffers["slab"], launch.threads)
        pool.run(KERNELS[launch.entry], params, slabs, (operands, buffers))
    return as_given(problem, results)


def _make_template(plan, operands, buffers):
    """The struct of the plan's launches, from its first call."""
    if len(_templates) >= _MOST_TEMPLATES:
        _templates.clear()
    made = _templates[plan] = Template(plan, operands, buffers)
    return made


def missing(plan, operands):
    """Result arrays that the user did not give, by name; they keep the memory order of q, k, v."""
    p, results = plan.problem, {}
    if plan.direction == "forward":
        if p.returns_lse:
            results["lse"] = np.empty(operands.q.shape[:3], p.accumulator)
        if operands.out is None:
            results["out"] = empty_rows_like(operands.q, p.d_v, _dtype(p.out_dtype))
        return results
    for name in ("dq", "dk", "dv"):
        if getattr(operands, name) is None:
            like = getattr(operands, name[1])
            results[name] = empty_rows_like(like, like.shape[-1], _dtype(p.out_dtype))
    if p.bias_shape:
        results["dbias"] = np.zeros(p.bias_shape, _dtype(p.dbias_dtype))
    return results


def _dtype(name):
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def _slabs(slab, threads):
    """One aligned piece of the scratch memory per worker."""
    skip = -slab.__array_interface__["data"][0] % _SLAB_ALIGNMENT // slab.itemsize
    lanes = _SLAB_ALIGNMENT // slab.itemsize
    size = (slab.size - lanes) // threads // lanes * lanes
    return [slab[skip + i * size : skip + (i + 1) * size] for i in range(threads)]

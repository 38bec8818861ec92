"""The CUDA backend: CuPy arrays, kernels compiled at their first call.

Everything runs on the current stream of the arrays' device; nothing waits for the device, and
nothing is read back, so that calls can be captured into a CUDA graph once they are compiled.
"""

from functools import cache

import cupy
import numpy as np
from cupy.cuda.device import get_device_id

from ...arrays import memory_order
from ...axes import four_axes
from .compile import launches
from .params import Template

_MOST_TEMPLATES = 4096
_templates = {}


def run(plan, operands):
    """Run the launches of a plan; returns the operands with every result filled in."""
    number = plan.device.number
    if number == get_device_id():       # entering the device that is current costs a microsecond
        return _run(plan, operands)
    with cupy.cuda.Device(number):
        return _run(plan, operands)


def _run(plan, operands):
    operands = _with_results(plan, operands)
    if not plan.launches:
        return operands
    buffers = [cupy.empty(b.extent, _dtype(b.dtype)) for b in plan.workspace]
    addresses = {b.name: x.data.ptr for b, x in zip(plan.workspace, buffers, strict=True)}
    template = _template(plan, operands, addresses)
    words = template.fill(operands, addresses)
    struct = template.struct(words)
    for function, grid, block, smem_bytes, tasks in launches(plan):
        template.set_tasks(words, tasks)        # a launch has copied its struct when it returns
        function(grid, block, (struct,), smem_bytes)
    return operands


def _template(plan, operands, addresses):
    """The struct of the plan, from its first call."""
    found = _templates.get(plan)
    if found is None:
        if len(_templates) >= _MOST_TEMPLATES:
            _templates.clear()
        found = _templates[plan] = Template(plan, four_axes(plan.problem, operands), addresses)
    return found


def _with_results(plan, operands):
    """Result arrays that the user did not give; they keep the memory order of q, k, v."""
    p, o = plan.problem, operands
    if plan.direction == "forward":
        lse = cupy.empty(o.q.shape[:-1], _dtype(p.accumulator))
        out = o.out
        if out is None:
            out = _empty_rows_like(o.q, p.d_v, p.out_dtype)
        return o._replace(out=out, lse=lse)
    missing = {}
    for name in ("dq", "dk", "dv"):
        if getattr(o, name) is None:
            like = getattr(o, name[1])
            missing[name] = _empty_rows_like(like, like.shape[-1], p.out_dtype)
    if p.bias_shape:
        missing["dbias"] = cupy.empty(o.bias.shape, _dtype(p.dbias_dtype))
    return o._replace(**missing)


def _empty_rows_like(x, columns, dtype):
    """As `arrays.empty_rows_like`."""
    shape = x.shape
    order, back = memory_order(x.strides)
    if order == tuple(range(len(order))):
        return cupy.empty((*shape[:-1], columns), _dtype(dtype))
    dense = cupy.empty((*(shape[axis] for axis in order), columns), _dtype(dtype))
    return dense.transpose(*back, len(shape) - 1)


@cache
def _dtype(name):
    """The dtype of a name, bfloat16 among them."""
    if name == "bfloat16":
        import ml_dtypes
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)

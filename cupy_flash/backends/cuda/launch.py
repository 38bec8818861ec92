"""The CUDA backend: CuPy arrays, kernels compiled at their first call.

Everything runs on the current stream of the arrays' device; nothing waits for the device, and
nothing is read back, so that calls can be captured into a CUDA graph once they are compiled.
"""

import cupy
from cupy.cuda.device import get_device_id

from ...axes import four_axes
from .compile import launches
from .memory import Memory
from .params import Template

_MOST_KEPT = 4096
_kept = {}


def run(plan, operands):
    """Run the launches of a plan; returns the operands with every result filled in."""
    number = plan.device.number
    if number == get_device_id():       # entering the device that is current costs a microsecond
        return _run(plan, operands)
    with cupy.cuda.Device(number):
        return _run(plan, operands)


def _run(plan, operands):
    memory, template = _kept.get(plan) or _keep(plan, operands)
    operands, workspace = memory.allocate(operands)
    if template is None:
        return operands
    words = template.fill(operands, workspace.ptr if workspace else 0)
    if plan.unaligned and not template.aligned(words, operands):
        return _run(plan.unaligned, operands)
    struct = template.struct(words)
    for function, grid, block, smem_bytes, tasks in launches(plan):
        template.set_tasks(words, tasks)        # a launch has copied its struct when it returns
        function(grid, block, (struct,), smem_bytes)
    del workspace                               # only now: it must outlive the launches
    return operands


def _keep(plan, operands):
    """Allocations and struct of the plan, from its first call; no struct if nothing is launched."""
    if len(_kept) >= _MOST_KEPT:
        _kept.clear()
    memory, template = Memory(plan, operands), None
    if plan.launches:
        complete, _ = memory.allocate(operands)
        template = Template(plan, four_axes(plan.problem, complete), memory.offsets)
    _kept[plan] = memory, template
    return memory, template

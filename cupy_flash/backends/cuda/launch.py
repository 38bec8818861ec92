"""The CUDA backend: CuPy arrays, kernels compiled at their first call.

Everything runs on the current stream of the arrays' device; nothing waits for the device, and
nothing is read back, so that calls can be captured into a CUDA graph once they are compiled.
"""

from functools import cached_property

import cupy
from cupy.cuda.device import get_device_id
from cupy.cuda.function import CPointer

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
    kept = _kept.get(plan) or _keep(plan, operands)
    operands, workspace = kept.memory.allocate(operands)
    template = kept.template
    if template is None:
        return operands
    words = template.fill(operands, workspace.ptr if workspace else 0)
    if plan.unaligned and not template.aligned(words, operands):
        return _run(plan.unaligned, operands)
    arguments, place = (_Argument(words),), template.tasks
    for function, grid, block, smem_bytes, tasks in kept.launches:
        words[place] = tasks                    # a launch has copied its struct when it returns
        function(grid, block, arguments, smem_bytes)
    del workspace                               # only now: it must outlive the launches
    return operands


class _Argument(CPointer):
    """A struct as a launch takes it: by its address.

    A NumPy array of one element would do, but CuPy asks such an array for its address at each
    launch, and that takes it a microsecond.
    """

    __slots__ = ("words",)

    def __init__(self, words):
        super().__init__(words.buffer_info()[0])
        self.words = words


def _keep(plan, operands):
    if len(_kept) >= _MOST_KEPT:
        _kept.clear()
    kept = _kept[plan] = _Kept(plan, operands)
    return kept


class _Kept:
    """What the calls with a plan share, made from the first: allocations, struct, functions.

    There is no struct if nothing is launched.
    """

    def __init__(self, plan, operands):
        self._plan = plan
        self.memory, self.template = Memory(plan, operands), None
        if plan.launches:
            complete, _ = self.memory.allocate(operands)
            self.template = Template(plan, four_axes(plan.problem, complete), self.memory.offsets)

    @cached_property
    def launches(self):
        """Functions and grids, compiled when they are first asked for."""
        return launches(self._plan)

"""The CUDA backend: CuPy arrays, kernels compiled at their first call.

Everything runs on the current stream of the arrays' device; nothing waits for the device, and
nothing is read back, so that calls can be captured into a CUDA graph once they are compiled.
"""

import cupy
from cupy.cuda.device import get_device_id
from cupy.cuda.function import CPointer

from ... import device
from ...axes import four_axes
from ...plan import make_plan
from .compile import launches
from .memory import Memory
from .params import Template

_MOST_KEPT = 4096
_kept = {}


def run(direction, problem, arrays, addresses):
    """Plan a call, at its first time, and run its launches.

    Parameters
    ----------
    direction : {"forward", "backward"}
    problem : Problem
    arrays : dict of str to cupy.ndarray
    addresses : list of int
        Where the arrays lie, in their order.

    Returns
    -------
    dict of str to cupy.ndarray
        The results that have no buffer among the arrays.
    """
    calls = _kept.get(problem) or _keep(direction, problem)
    if problem.gpu == get_device_id():     # to enter the current device takes a microsecond
        return calls.run(arrays, addresses)
    with cupy.cuda.Device(problem.gpu):
        return calls.run(arrays, addresses)


def _keep(direction, problem):
    if len(_kept) >= _MOST_KEPT:
        _kept.clear()
    # A problem has one direction: its layouts name the arrays of one.
    calls = _kept[problem] = _Calls(make_plan(direction, problem, device.gpu(problem.gpu)))
    return calls


class _Calls:
    """The calls with a problem. What they share is made from the first."""

    def __init__(self, plan):
        self._plan, self._memory, self.template = plan, None, None

    def run(self, arrays, addresses):
        """One of them; see `run`."""
        if self._memory is None:
            self._prepare(arrays)
        results, block, apart = self._memory.allocate()
        template = self.template
        if template is None:                    # nothing to launch
            return results
        words = template.fill(addresses + apart, block.ptr if block else 0)
        argument = _Argument(words.buffer_info()[0])
        argument.words = words
        arguments, tasks_at = (argument,), template.tasks
        for function, grid, threads, smem_bytes, tasks in self._launches:
            words[tasks_at] = tasks             # a launch has copied its struct when it returns
            function(grid, threads, arguments, smem_bytes)
        del block                               # only now: it must outlive the launches
        return results

    def _prepare(self, arrays):
        """Compile, and pack the struct. Other threads may be at it, too: memory comes last."""
        plan = self._plan
        memory = Memory(plan, arrays)
        if plan.launches:
            self._launches = launches(plan)
            complete = four_axes(plan.problem, arrays | memory.allocate()[0])
            self.template = Template(plan, complete, (*arrays, *memory.apart), memory.offsets)
        self._memory = memory


class _Argument(CPointer):
    """A struct as a launch takes it: by its address.

    A NumPy array of one element would do, but CuPy asks such an array for its address at each
    launch, and that takes it a microsecond. `words` keeps the struct for who looks at it later.
    """

    __slots__ = ("words",)

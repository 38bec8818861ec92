"""The CUDA backend: CuPy arrays, kernels compiled at their first call.

Everything runs on the current stream of the arrays' device; nothing waits for the device, and
nothing is read back, so that calls can be captured into a CUDA graph once they are compiled.
"""

import cupy
from cupy.cuda.device import get_device_id
from cupy.cuda.function import CPointer

from ... import device
from ...axes import four_axes
from ...plan import cuda_settings
from ..prepared import Prepared
from .compile import launches
from .memory import Memory
from .params import Template


def run(direction, problem, arrays):
    """Plan a call, at its first time, and run its launches.

    Parameters
    ----------
    direction : {"forward", "backward"}
    problem : Problem
    arrays : Arrays

    Returns
    -------
    dict of str to cupy.ndarray
        The results that have no buffer among the arrays.
    """
    number = problem.gpu
    calls = prepared[direction, problem, device.gpu(number), cuda_settings()]
    if number == get_device_id():       # to enter the current device takes a microsecond
        return calls.run(arrays)
    with cupy.cuda.Device(number):
        return calls.run(arrays)


class _Calls:
    """The calls with a plan. What they share is made from the first."""

    def __init__(self, plan):
        self._plan, self._memory, self.template = plan, None, None

    def run(self, arrays):
        """One of them; see `run`."""
        if self._memory is None:
            self._prepare(arrays.named)
        results, block, apart = self._memory.allocate()
        template = self.template
        if template is None:                    # nothing to launch
            return results
        arrays.addresses.update(apart)
        words = template.fill(arrays.addresses, block.ptr if block else 0)
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
        memory = Memory(plan)
        if plan.launches:
            self._launches = launches(plan)
            complete = four_axes(plan.problem, arrays | memory.allocate()[0])
            self.template = Template(plan, complete, (*arrays, *memory.apart), memory.offsets)
        self._memory = memory


prepared = Prepared(_Calls)


class _Argument(CPointer):
    """A struct as a launch takes it: by its address.

    A NumPy array of one element would do, but CuPy asks such an array for its address at each
    launch, and that takes it a microsecond. `words` keeps the struct for who looks at it later.
    """

    __slots__ = ("words",)

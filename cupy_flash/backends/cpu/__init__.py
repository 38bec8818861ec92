"""The CPU backend: NumPy arrays, Numba kernels, the same recurrence as on the GPU."""

import numpy as np

from ... import device
from ...arrays import address_of
from ...axes import four_axes
from ...plan import cpu_settings
from ...results import missing, numpy_arrays
from ..prepared import Prepared
from . import pool
from .backward import backward, reduce_chunks
from .combine import combine
from .dbias import dbias
from .forward import forward
from .params import Template

KERNELS = {kernel.__name__: kernel for kernel in (forward, combine, backward, reduce_chunks, dbias)}
_SLAB_ALIGNMENT = 64


def run(direction, problem, arrays):
    """Plan a call, at its first time, and run its launches.

    Parameters
    ----------
    direction : {"forward", "backward"}
    problem : Problem
    arrays : Arrays

    Returns
    -------
    dict of str to ndarray
        The results that have no buffer among the arrays.
    """
    return prepared[direction, problem, device.cpu(), cpu_settings()].run(arrays)


class _Calls:
    """The calls with a plan. What they share is made from the first."""

    def __init__(self, plan):
        self._plan, self._template = plan, None
        self._results = missing(plan.direction, plan.problem)

    def run(self, arrays):
        """One of them; see `run`."""
        plan = self._plan
        if not plan.launches:
            return numpy_arrays(self._results, np.zeros)
        results = numpy_arrays(self._results)
        buffers = {b.name: np.zeros(b.extent, b.dtype) for b in plan.workspace}
        addresses = arrays.addresses.copy()
        for named in (results, buffers):
            for name, x in named.items():
                addresses[name] = address_of(x)
        template = self._template
        if template is None:
            operands = four_axes(plan.problem, arrays.named | results)
            template = self._template = Template(plan, operands, addresses)
        params = template.fill(addresses)
        for launch in plan.launches:
            slabs = _slabs(buffers["slab"], addresses["slab"], launch.threads)
            pool.run(KERNELS[launch.entry], params, slabs, (arrays, results, buffers))
        return results


prepared = Prepared(_Calls)


def _slabs(slab, address, threads):
    """One aligned piece of the scratch memory per worker."""
    skip = -address % _SLAB_ALIGNMENT // slab.itemsize
    lanes = _SLAB_ALIGNMENT // slab.itemsize
    size = (slab.size - lanes) // threads // lanes * lanes
    return [slab[skip + i * size : skip + (i + 1) * size] for i in range(threads)]

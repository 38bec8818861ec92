"""Writes the parameter structs of the CUDA kernels, as NumPy's structured scalars.

`structs` has their fields. A tensor is its address, its strides in bytes (batch, head, row, column)
and its element type; address 0 means that the operand is absent. Every number travels with its
exact type: a Python float passed to a kernel by itself would arrive as a double, whatever the
kernel expects.

`pack` makes the struct of one launch from scratch. A `Template` keeps it for the calls that follow.
"""

from array import array
from math import ceil

import numpy as np

from ...arrays import address_of
from ...options import ARRAYS
from ...plan import long_sums
from ...plan.cuda import kernel_of
from .structs import structs
from .tensor_maps import TensorMaps

KINDS = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}
WIDEST_LOAD = 16

_ABSENT = (0, 0, 0, 0, 0, 0)
# Operands that the kernels read row by row, by loads of `vector_bytes`.
_LOADED = {"forward": ("q", "k", "v"), "backward": ("q", "k", "v", "dout", "out")}


def pack(plan, launch, operands, addresses):
    """The struct of one launch.

    Parameters
    ----------
    plan : Plan
    launch : Launch
    operands : Operands
        Arrays with the axes of `axes.four_axes`, results included.
    addresses : dict of str to int
        Where the plan's workspace lies, by the buffers' names.

    Returns
    -------
    numpy.ndarray
        Of size one, of the largest struct of the plan's kernels, of which the others read the
        first part; without the maps.
    """
    p, mask = plan.problem, plan.problem.mask
    kernels = [kernel_of(x.entry) for x in plan.launches]
    dtype = max((structs()[kernel.params] for kernel in kernels), key=lambda one: one.itemsize)
    tensors = [name for name in dtype.names if dtype[name] == structs()["Tensor"]]
    values = {
        **{name: _tensor(getattr(operands, name)) for name in tensors},
        **{option.kernel: address(getattr(operands, option.kernel))
           for option in ARRAYS.values() if option.dense},
        "batch": p.batch, "heads_q": p.heads_q, "heads_k": p.heads_k, "group": p.group,
        "Nq": p.Nq, "Nk": p.Nk, "d": p.d, "d_v": p.d_v,
        "aligned": mask.q_offset is None, "q_offset": mask.q_offset or 0,
        "left": mask.left, "right": mask.right, "tasks": launch.tasks,
        "scale": p.scale, "softcap": p.softcap, "lazy": launch.config.lazy,
        "vector_bytes": vector_bytes(
            *(getattr(operands, name) for name in _LOADED[plan.direction])),
    }
    if plan.direction == "forward":
        # Whole tiles a split, so that splitting moves no tile.
        Bc = plan.launches[0].config.Bc
        keys = ceil(p.Nk / launch.splits / Bc) * Bc
        values |= {"splits": launch.splits, "split_keys": keys}
    else:
        extents = p.bias_shape or (0, 0, 0, 0)
        names = ("batch_bias", "heads_bias", "Nbias_q", "Nbias_k")
        values |= dict(zip(names, extents, strict=True))
        values["state_rows"] = next((x.config.Br for x in plan.launches
                                    if x.entry == "backward_preprocess"), 1)
        splits = next((x.splits for x in plan.launches if kernel_of(x.entry).direction), 1)
        values |= {"row_splits": splits,
                   "split_rows": long_sums.split_rows(p.group * p.Nq, splits)}
    for kernel, x in zip(kernels, plan.launches, strict=True):
        values |= kernel.parameters(p, x)
    packed = np.zeros(1, dtype)
    for name, value in (values | addresses).items():
        packed[name] = value
    return packed


class Template:
    """The struct of a plan's launches, of which a call changes nothing but addresses and tasks.

    It is made from the first call's arrays: calls with the same plan have the same layouts.
    `names` says whose addresses a call brings, `offsets` what lies where in its block. `tasks` is
    the place of the one word in which the launches of a plan differ.
    """

    def __init__(self, plan, operands, names, offsets):
        packed = pack(plan, plan.launches[0], operands, {})
        fields = packed.dtype.fields
        self._words = array("Q", packed.tobytes())      # Python sets its items faster than NumPy's
        self._places = [(name, fields[ARRAYS[name].kernel if name in ARRAYS else name][1] // 8)
                        for name in names]
        self._parts = [(fields[name][1] // 8, offset) for name, offset in offsets.items()]
        self.tasks = fields["tasks"][1] // 8
        self._maps = None
        if any(kernel_of(x.entry).maps for x in plan.launches):
            self._maps = TensorMaps(plan, operands)
            self._mapped = [fields[name][1] // 8 for name in self._maps.names]
            self._maps_from = fields[f"{self._maps.names[0]}_map"][1] // 8

    def fill(self, addresses, block):
        """The struct of a call as words: addresses by name, and that of the block."""
        words = self._words[:]
        for name, place in self._places:
            words[place] = addresses[name]
        for place, offset in self._parts:
            words[place] = block + offset
        if self._maps:
            words[self._maps_from:] = self._maps(*[words[place] for place in self._mapped])
        return words


def vector_bytes(*arrays):
    """The widest load that is aligned in, and never leaves, any row of the arrays.

    The largest power of two up to 16 that divides every address, every stride before the last axis
    and the bytes of every row.
    """
    bits = WIDEST_LOAD
    for x in arrays:
        b, h, n, _ = x.strides
        bits |= address(x) | b | h | n | x.shape[3] * x.itemsize
    return bits & -bits


def _tensor(x):
    """The six fields of an array, of its first axes if it has fewer than four."""
    if x is None:
        return _ABSENT
    return (address(x), *(*x.strides, 0, 0, 0)[:4], KINDS.get(x.dtype.name, 0))


def address(x):
    """Where an array starts, 0 if it is absent; NumPy's when the kernels run on a CPU."""
    return 0 if x is None else address_of(x)

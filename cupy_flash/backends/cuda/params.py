"""The parameter structs of the CUDA kernels, as NumPy's structured scalars.

They repeat ``cuda_src/params.cuh`` field for field: a tensor is its address, its strides in bytes
(batch, head, row, column) and its element type; address 0 means that the operand is absent. Every
field has 8 bytes, so there is no padding, and every number travels with its exact type: a Python
float passed to a kernel by itself would arrive as a double, whatever the kernel expects.

`pack` makes the struct of one launch from scratch. A `Template` keeps it for the calls that follow.
"""

from array import array
from math import ceil

import numpy as np

from ...plan.cuda import kernel_of
from .tensor_maps import TensorMaps

KINDS = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}
WIDEST_LOAD = 16

Tensor = np.dtype([("address", "u8"), *((name, "i8") for name in ("b", "h", "n", "c", "kind"))])

_TENSORS = ("q", "k", "v", "out", "lse", "mask", "bias", "slopes")
_GRADIENTS = ("dout", "dlse", "dq", "dk", "dv", "dbias")
_INTEGERS = ("batch", "heads_q", "heads_k", "group", "Nq", "Nk", "d", "d_v", "aligned", "q_offset",
             "left", "right", "vector_bytes", "tasks")

_COMMON = [
    *((name, Tensor) for name in _TENSORS),
    ("q_lens", "u8"), ("kv_lens", "u8"),            # addresses of int32 [batch]
    *((name, "i8") for name in _INTEGERS),
    *((name, "f8") for name in ("scale", "softcap", "lazy")),       # softcap 0: off
]
# out_partial, lse_partial: addresses of [splits, batch, heads_q, Nq, (d_v)].
ForwardParams = np.dtype([
    *_COMMON, ("splits", "i8"), ("split_keys", "i8"), ("out_partial", "u8"), ("lse_partial", "u8"),
])
# delta: address of [batch, heads_q, Nq] in the accumulator type; state, dq_sums: addresses of what
# the fused kernel works with, by tiles of rows; the last four: extents of dbias.
BackwardParams = np.dtype([
    *_COMMON, *((name, Tensor) for name in _GRADIENTS),
    ("delta", "u8"), ("state", "u8"), ("dq_sums", "u8"),
    *((name, "i8") for name in ("Nbias_q", "Nbias_k", "batch_bias", "heads_bias")),
])
# The maps lie on borders of 64 bytes.
_EXTRAS = {"pack": ("i4", 0), "section": ("i4", 4), "unit": ("f4", 8), "lazy_2": ("f4", 12),
           "qk_scale": ("f4", 16), "cap": ("f4", 20), "per_cap": ("f4", 24), "most": ("f4", 28),
           "q_map": ("V128", 72), "k_map": ("V128", 200), "v_map": ("V128", 328),
           "out_map": ("V128", 456)}
HopperForwardParams = np.dtype({
    "names": [*ForwardParams.names, *_EXTRAS],
    "formats": [*(field for field, _ in ForwardParams.fields.values()),
                *(kind for kind, _ in _EXTRAS.values())],
    "offsets": [*(start for _, start in ForwardParams.fields.values()),
                *(ForwardParams.itemsize + start for _, start in _EXTRAS.values())],
    "itemsize": 1152,
})
_MAPS = ("q_map", "k_map", "v_map", "dout_map")
HopperBackwardParams = np.dtype({
    "names": [*BackwardParams.names, *_MAPS],
    "formats": [*(field for field, _ in BackwardParams.fields.values()), *["V128"] * 4],
    "offsets": [*(start for _, start in BackwardParams.fields.values()),
                *range(896, 1408, 128)],
    "itemsize": 1408,
})
PARAMS = {"ForwardParams": ForwardParams, "BackwardParams": BackwardParams,
          "HopperForwardParams": HopperForwardParams, "HopperBackwardParams": HopperBackwardParams}

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
        Of size one, of a dtype of `PARAMS`, without the maps.
    """
    p, mask = plan.problem, plan.problem.mask
    values = {
        **{name: _tensor(getattr(operands, name)) for name in _TENSORS},
        "q_lens": address(operands.q_lens), "kv_lens": address(operands.kv_lens),
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
        values |= {name: addresses.get(name, 0) for name in ("out_partial", "lse_partial")}
    else:
        values |= {name: _tensor(getattr(operands, name)) for name in _GRADIENTS}
        extents = p.bias_shape or (0, 0, 0, 0)
        names = ("batch_bias", "heads_bias", "Nbias_q", "Nbias_k")
        values |= {name: addresses.get(name, 0) for name in ("delta", "state", "dq_sums")}
        values |= dict(zip(names, extents, strict=True))
    kernels = [kernel_of(x.entry) for x in plan.launches]
    for kernel, x in zip(kernels, plan.launches, strict=True):
        values |= kernel.parameters(p, x.config)
    # The largest struct of the plan's kernels: the others read its first part.
    packed = np.zeros(1, max((PARAMS[kernel.params] for kernel in kernels),
                             key=lambda dtype: dtype.itemsize))
    for name, value in values.items():
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
        self._places = [fields[name][1] // 8 for name in names]
        self._parts = [(fields[name][1] // 8, offset) for name, offset in offsets.items()]
        self.tasks = fields["tasks"][1] // 8
        self._maps = None
        if any(kernel_of(x.entry).maps for x in plan.launches):
            self._maps = TensorMaps(plan, operands)
            self._mapped = [fields[name][1] // 8 for name in self._maps.names]
            self._maps_from = fields[f"{self._maps.names[0]}_map"][1] // 8

    def fill(self, addresses, block):
        """The struct of a call as words: addresses in the order of `names`, and of the block."""
        words = self._words[:]
        for place, address in zip(self._places, addresses, strict=True):
            words[place] = address
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
    return (address(x), *(*x.strides, 0, 0)[:4], KINDS.get(x.dtype.name, 0))


def address(x):
    """Where an array starts: a CuPy array, or a NumPy array when the kernels run on a CPU."""
    if x is None:
        return 0
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr

"""The parameter structs of the CUDA kernels, one NumPy structured scalar a launch.

They repeat ``cuda_src/params.cuh`` field for field: a tensor is its address, its strides in bytes
(batch, head, row, column) and its element type; address 0 means that the operand is absent. Every
field has 8 bytes, so there is no padding, and every number travels with its exact type: a Python
float passed to a kernel by itself would arrive as a double, whatever the kernel expects.

A launch's constants are packed once (`template`); what differs from call to call, addresses and
strides, is written over a copy (`fill`).
"""

from functools import lru_cache
from math import ceil
from struct import Struct

import numpy as np

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
# delta: address of [batch, heads_q, Nq] in the accumulator type; the last four: extents of dbias.
BackwardParams = np.dtype([
    *_COMMON, *((name, Tensor) for name in _GRADIENTS), ("delta", "u8"),
    *((name, "i8") for name in ("Nbias_q", "Nbias_k", "batch_bias", "heads_bias")),
])
PARAMS = {"forward": ForwardParams, "backward": BackwardParams}

_ABSENT = (0, 0, 0, 0, 0, 0)
_FIRST = Struct(f"={len(_TENSORS) * 'Q5q'}QQ")
_VECTOR, _VECTOR_AT = Struct("=q"), ForwardParams.fields["vector_bytes"][1]
_SECOND = {"forward": Struct("=QQ"), "backward": Struct(f"={len(_GRADIENTS) * 'Q5q'}Q")}
_SECOND_AT = {"forward": ForwardParams.fields["out_partial"][1],
              "backward": BackwardParams.fields["dout"][1]}


def pack(plan, launch, operands, addresses):
    """The struct of one launch.

    Parameters
    ----------
    plan : Plan
    launch : Launch
    operands : Operands
        Arrays with four axes (batch, head, row, column), results included.
    addresses : dict of str to int
        Where the plan's workspace lies, by the buffers' names.

    Returns
    -------
    numpy.ndarray
        Of size one, of dtype `ForwardParams` or `BackwardParams`.
    """
    return fill(template(plan, launch), varying(plan.direction, operands, addresses))


@lru_cache(maxsize=4096)
def template(plan, launch):
    """The bytes of a launch's struct with all that is the same in every call."""
    p, mask, config = plan.problem, plan.problem.mask, launch.config
    values = {
        "batch": p.batch, "heads_q": p.heads_q, "heads_k": p.heads_k, "group": p.group,
        "Nq": p.Nq, "Nk": p.Nk, "d": p.d, "d_v": p.d_v,
        "aligned": mask.q_offset is None, "q_offset": mask.q_offset or 0,
        "left": mask.left, "right": mask.right, "tasks": launch.tasks,
        "scale": p.scale, "softcap": p.softcap, "lazy": config.lazy,
    }
    if plan.direction == "forward":
        # Whole tiles a split, so that splitting moves no tile.
        tiles = ceil(p.Nk / launch.splits / config.Bc)
        values |= {"splits": launch.splits, "split_keys": tiles * config.Bc}
    else:
        names = ("batch_bias", "heads_bias", "Nbias_q", "Nbias_k")
        values |= dict(zip(names, p.bias_shape or (0, 0, 0, 0), strict=True))
    packed = np.zeros(1, PARAMS[plan.direction])
    for name, value in values.items():
        packed[name] = value
    return packed.view(np.uint8)


def varying(direction, operands, addresses):
    """What differs from call to call, ready for `fill`: three runs of fields of the struct."""
    o = operands
    first = (*tensor(o.q), *tensor(o.k), *tensor(o.v), *tensor(o.out), *tensor(o.lse),
             *tensor(o.mask), *tensor(o.bias), *tensor(o.slopes),
             address(o.q_lens), address(o.kv_lens))
    if direction == "forward":
        return direction, first, vector_bytes(o.q, o.k, o.v), (
            addresses.get("out_partial", 0), addresses.get("lse_partial", 0))
    return direction, first, vector_bytes(o.q, o.k, o.v, o.dout, o.out), (
        *tensor(o.dout), *tensor(o.dlse), *tensor(o.dq), *tensor(o.dk), *tensor(o.dv),
        *tensor(o.dbias), addresses.get("delta", 0))


def fill(bytes_of_template, varied):
    """A copy of the template with the varying fields written in."""
    direction, first, width, second = varied
    packed = bytes_of_template.copy()
    _FIRST.pack_into(packed, 0, *first)
    _VECTOR.pack_into(packed, _VECTOR_AT, width)
    _SECOND[direction].pack_into(packed, _SECOND_AT[direction], *second)
    return packed.view(PARAMS[direction])


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


def tensor(x):
    """The six fields of an array, of its first axes if it has fewer than four."""
    if x is None:
        return _ABSENT
    strides = x.strides
    if len(strides) == 4:
        b, h, n, c = strides
    else:
        b, h, n, c = (*strides, 0, 0)[:4]
    return (address(x), b, h, n, c, KINDS.get(x.dtype.name, 0))


def address(x):
    """Where an array starts: a CuPy array, or a NumPy array when the kernels run on a CPU."""
    if x is None:
        return 0
    data = x.data
    return data.ptr if hasattr(data, "ptr") else x.ctypes.data

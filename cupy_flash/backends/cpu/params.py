"""The parameter structs of the CPU kernels, one NumPy structured array of size one a call.

A tensor is its address, its strides in bytes (batch, head, row, column) and its element type; the
kernels so take any layout without being compiled anew. The rows of a mask or bias are queries, its
columns keys, and a stride of 0 is a broadcast axis. Address 0: the operand is absent.

All launches of a plan have the same tiles and cut their sums alike, so they share one struct.
`pack` makes it from scratch. A `Template` keeps it for the calls that follow.
"""

import numpy as np

from ...arrays import address_of
from ...options import ARRAYS, GRADIENTS
from .dtypes import BFLOAT16, FLOAT16, KINDS, ROUND_NOT, ROUND_TF32

Tensor = np.dtype([(name, "i8") for name in ("address", "b", "h", "n", "c", "kind")], align=True)

# What both passes must know of the problem, in one place so that they cannot differ.
_COMMON = [
    *((name, Tensor) for name in ("q", "k", "v", "out", "lse")),
    *((option.kernel, "i8" if option.dense else Tensor) for option in ARRAYS.values()),
    *((name, "i8") for name in ("batch", "heads_q", "heads_k", "group", "Nq", "Nk", "d", "d_v")),
    *((name, "i8") for name in ("aligned", "q_offset", "left", "right")),
    *((name, "i8") for name in ("Br", "Bc", "in_place", "round_inputs", "round_P")),
    *((name, "f8") for name in ("scale", "softcap", "lazy")),  # softcap 0: off
]

# out_partial, sums_partial: addresses of [splits, batch, heads_q, Nq, (d_v, or m and l)].
ForwardParams = np.dtype(
    [*_COMMON, *((name, "i8") for name in ("splits", "split_keys", "out_partial", "sums_partial"))],
    align=True,
)
# partial: address of [batch, heads_k, chunks, dk and dv tiles]; normalisers: see normalise.py;
# turns: address of [batch, heads_k, query tiles], see turns.py; *_bias: extents of dbias.
BackwardParams = np.dtype(
    [
        *_COMMON,
        *((name, Tensor) for name in ("dout", "dlse", "dq", "dk", "dv", *GRADIENTS)),
        *(
            (name, "i8")
            for name in (
                *("chunks", "partial", "normalisers"),
                *("Nbias_q", "Nbias_k", "batch_bias", "heads_bias"),
            )
        ),
        *((name, "i8") for name in ("by_tiles", "turns")),
    ],
    align=True,
)


def pack(plan, operands, addresses):
    """The struct of a plan's launches as an array of size one; `addresses`: of its workspace."""
    forward, launch = plan.direction == "forward", plan.launches[0]
    dtype = ForwardParams if forward else BackwardParams
    values = {name: _tensor(getattr(operands, name)) for name in dtype.names
              if dtype[name] == Tensor}
    values |= {option.kernel: _address(getattr(operands, option.kernel))
               for option in ARRAYS.values() if option.dense}
    values |= _common(plan.problem, launch.config)
    values |= (_forward if forward else _backward)(plan.problem, launch, addresses)
    if set(values) != set(dtype.names):
        raise KeyError(f"parameters and struct differ: {set(values) ^ set(dtype.names)}")
    return np.array([tuple(values[name] for name in dtype.names)], dtype)


class Template:
    """The struct of a plan, of which a call changes nothing but addresses.

    It is made from the first call's arrays: calls with the same plan have the same layouts.
    """

    def __init__(self, plan, operands, addresses):
        packed = pack(plan, operands, addresses)
        fields = packed.dtype.fields
        self._dtype = packed.dtype
        self._words = packed.view(np.int64)         # every field has 8 bytes
        places = {name: ARRAYS[name].kernel if name in ARRAYS else name for name in addresses}
        self._places = [(name, fields[field][1] // 8) for name, field in places.items()
                        if field in fields]

    def fill(self, addresses):
        """The struct of a call; addresses of arrays, results and workspace, by their names."""
        words = self._words.copy()
        for name, place in self._places:
            words[place] = addresses[name]
        return words.view(self._dtype)


def _common(problem, config):
    p, mask = problem, problem.mask
    return {
        "batch": p.batch,
        "heads_q": p.heads_q,
        "heads_k": p.heads_k,
        "group": p.group,
        "Nq": p.Nq,
        "Nk": p.Nk,
        "d": p.d,
        "d_v": p.d_v,
        "aligned": mask.q_offset is None,
        "q_offset": mask.q_offset or 0,
        "left": mask.left,
        "right": mask.right,
        "Br": config.Br,
        "Bc": config.Bc,
        "in_place": config.in_place,
        "round_inputs": ROUND_TF32 if p.precision == "tf32" else ROUND_NOT,
        "round_P": _round_P(p, config),
        "scale": p.scale,
        "softcap": p.softcap,
        "lazy": config.lazy,
    }


def _forward(problem, launch, addresses):
    splits = launch.splits
    return {
        "splits": splits,
        "split_keys": -(-problem.Nk // splits),
        "out_partial": addresses.get("out_partial", 0),
        "sums_partial": addresses.get("sums_partial", 0),
    }


def _backward(problem, launch, addresses):
    b, h, n, c = problem.bias_shape or (0, 0, 0, 0)
    return {
        "chunks": launch.splits,
        "partial": addresses.get("partial", 0),
        "normalisers": addresses.get("normalisers", 0),
        "batch_bias": b,
        "heads_bias": h,
        "Nbias_q": n,
        "Nbias_k": c,
        "by_tiles": "turns" in addresses,
        "turns": addresses.get("turns", 0),
    }


def _round_P(problem, config):
    if problem.precision == "tf32":
        return ROUND_TF32
    modes = {"float16": FLOAT16, "bfloat16": BFLOAT16}
    return modes.get(problem.dtype, ROUND_NOT) if config.round_P else ROUND_NOT


def _tensor(array):
    """The Tensor fields of an array of up to four axes (batch, head, row, column)."""
    if array is None:
        return (0, 0, 0, 0, 0, 0)
    strides = (*array.strides, 0, 0)[:4]
    return (_address(array), *strides, KINDS.get(array.dtype.name, 0))


def _address(array):
    return 0 if array is None else address_of(array)

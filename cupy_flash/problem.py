"""What is asked, without the arrays: a frozen, hashable description that plans are made from."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

UNLIMITED = 2**40       # a window side without a bound; also the largest |q_offset|


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees by its position; arrays of masks and lengths come on top.

    Query ``i`` sees key ``j`` iff ``-left <= j - (i + q_offset) <= right``.

    Attributes
    ----------
    left, right : int
        Keys visible before and after the query's own position, up to `UNLIMITED`. Causal attention
        is ``right = 0``.
    q_offset : int or None
        Position of query 0 among the keys; None aligns the last query with the last key.
    """

    left: int = UNLIMITED
    right: int = UNLIMITED
    q_offset: int | None = None


# Made once for calls that are alike, so compared and hashed as an object: a key at every call.
@dataclass(frozen=True, eq=False)
class Problem:
    """One call of the library, arrays apart.

    Attributes
    ----------
    batch, heads_q, heads_k, Nq, Nk, d, d_v : int
        Extents of q ``(batch, heads_q, Nq, d)``, k ``(batch, heads_k, Nk, d)`` and v
        ``(batch, heads_k, Nk, d_v)``.
    dtype, out_dtype : str
        Names of the element types of the inputs and of the output (or of the gradients).
    precision : str or None
        ``"tf32x3"`` or ``"tf32"`` for float32, None for the other types.
    scale, softcap : float
        Factor of the scores; bound of the scores, 0 for none.
    mask : Mask
        Visibility by position.
    bias_shape : tuple of int or None
        Shape of the bias as four axes, 1 where it is broadcast.
    dbias_dtype : str or None
        Name of the element type of dbias.
    has_mask, has_alibi, has_q_lens, has_kv_lens, has_dlse : bool
        Which optional arrays are given.
    returns_lse : bool
        Forward: whether the log-sum-exp is a result.
    deterministic : bool
        Backward: the same bits in every run.
    copied : tuple of str
        Inputs whose last axis had no unit stride: the kernels read a copy of them.
    buffers : tuple of str
        Results for which the caller gave the memory.
    unaligned : tuple of str
        Arrays on a GPU that do not begin on a border of 16 bytes.
    gpu : int or None
        The GPU on which the arrays are; None if they are in CPU memory.
    layouts : tuple
        Name and fields of the `Layout` of each array of the call: calls with the same problem
        differ in nothing but elements and addresses, and in these by multiples of 16.
    """

    batch: int
    heads_q: int
    heads_k: int
    Nq: int
    Nk: int
    d: int
    d_v: int
    dtype: str
    out_dtype: str
    precision: str | None
    scale: float
    softcap: float
    mask: Mask
    bias_shape: tuple[int, int, int, int] | None = None
    dbias_dtype: str | None = None
    has_mask: bool = False
    has_alibi: bool = False
    has_q_lens: bool = False
    has_kv_lens: bool = False
    has_dlse: bool = False
    returns_lse: bool = True
    deterministic: bool = False
    copied: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    unaligned: tuple[str, ...] = ()
    gpu: int | None = None
    layouts: tuple = ()

    @cached_property
    def axes(self):
        """How many axes each array of the call has, by its name."""
        return {name: len(shape) for name, shape, *_ in self.layouts}

    @property
    def group(self):
        """Query heads that share a key head."""
        return self.heads_q // self.heads_k if self.heads_k else 1

    @property
    def has_features(self):
        """Whether scores are more than scale * q.k, beside the range of visible keys."""
        return self.has_mask or self.has_alibi or bool(self.bias_shape) or self.softcap != 0

    @property
    def accumulator(self):
        """Name of the type of statistics, sums and `lse`."""
        return accumulator_of(self.dtype)

    def __str__(self):
        heads = f"{self.heads_q}" if self.group == 1 else f"{self.heads_q}:{self.heads_k}"
        width = f"{self.d}" if self.d == self.d_v else f"{self.d}, d_v {self.d_v}"
        text = (f"batch {self.batch}, heads {heads}, Nq {self.Nq}, Nk {self.Nk}, d {width}, "
                f"{self.dtype}")
        if self.precision:
            text += f" ({self.precision})"
        names = ("has_mask", "has_alibi", "has_q_lens", "has_kv_lens", "has_dlse")
        options = [name[4:] for name in names if getattr(self, name)]
        options += ["bias"] if self.bias_shape else []
        options += [f"softcap {self.softcap:g}"] if self.softcap else []
        options += [f"left {self.mask.left}"] if self.mask.left < UNLIMITED else []
        options += [f"right {self.mask.right}"] if self.mask.right < UNLIMITED else []
        return text + (f", {', '.join(options)}" if options else "")


class Operands(NamedTuple):
    """The arrays of a call with the axes that kernels know, None where absent.

    They have four axes ``(batch, head, row, column)``, `lse` and `dlse` three, `slopes` two:
    ``(batch, heads_q)``, lengths one: ``(batch,)``.
    """

    q: Any
    k: Any
    v: Any
    mask: Any = None
    bias: Any = None
    slopes: Any = None
    q_lens: Any = None
    kv_lens: Any = None
    out: Any = None
    lse: Any = None
    dout: Any = None
    dlse: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None


def accumulator_of(dtype):
    """Name of the type in which sums over elements of `dtype` are kept."""
    return "float64" if dtype == "float64" else "float32"

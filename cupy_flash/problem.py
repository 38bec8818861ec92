"""What is asked, without the arrays: a frozen, hashable description that plans are made from."""

from collections import namedtuple
from dataclasses import dataclass, field

from .arrays import Layouts
from .options import ARRAYS, GRADIENTS, NUMBERS, OPTIONS, Option

# Every gradient, by what it is called in `wrt`.
GRADIENT_OF = {"q": "dq", "k": "dk", "v": "dv",
               **{option.name: name for name, option in GRADIENTS.items()}}
WRT = tuple(GRADIENT_OF.values())
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
    grad_dtype : str or None
        Name of the element type of all gradients; None: each has that of its operand.
    returns_lse : bool
        Forward: whether the log-sum-exp is a result.
    deterministic : bool
        Backward: the same bits in every run.
    wrt : tuple of str
        Backward: the gradients that are asked for, as the kernels name them.
    layouts : Layouts
        Of each array of the call, by the names of the public functions: calls with the same problem
        differ in nothing but elements and addresses, and in these by multiples of 16.

    What follows from the layouts alone is found when a problem is made:

    gpu : int or None
        The GPU on which the arrays are; None if they are in CPU memory.
    copied : tuple of str
        Inputs that kernels read as dense and that are not: they read a copy.
    buffers : tuple of str
        Results for which the caller gave the memory.
    unaligned : tuple of str
        Arrays on a GPU whose address is no multiple of 16 bytes.
    lengths : tuple of Option
        Those of the options that are lengths.
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
    grad_dtype: str | None = None
    returns_lse: bool = True
    deterministic: bool = False
    wrt: tuple[str, ...] = WRT
    layouts: Layouts = field(default_factory=Layouts)
    gpu: int | None = field(init=False)
    copied: tuple[str, ...] = field(init=False)
    buffers: tuple[str, ...] = field(init=False)
    unaligned: tuple[str, ...] = field(init=False)
    lengths: tuple[Option, ...] = field(init=False)

    def __post_init__(self):
        x = self.layouts
        backward = "dout" in x
        options = [option for name, option in ARRAYS.items() if name in x]
        dense = ["q", "k", "v", *(("dout", "out") if backward else ()),
                 *(option.name for option in options if option.dense)]
        results = ("dq", "dk", "dv") if backward else ("out",)
        for name, value in {
            "gpu": x["q"].gpu if "q" in x else None,
            "copied": tuple(name for name in dense if name in x and not x[name].dense),
            "buffers": tuple(name for name in results if name in x),
            "unaligned": tuple(one.name for one in x if one.offset),
            "lengths": tuple(option for option in options if option.counts),
        }.items():
            object.__setattr__(self, name, value)       # frozen for everyone else

    @property
    def scores(self):
        """Extents of the matrices of scores: batch, query heads, queries, keys."""
        return self.batch, self.heads_q, self.Nq, self.Nk

    @property
    def group(self):
        """Query heads that share a key head."""
        return self.heads_q // self.heads_k if self.heads_k else 1

    @property
    def has_mask(self):
        """Whether an array says which keys may be seen."""
        return "mask" in self.layouts

    @property
    def has_alibi(self):
        """Whether scores fall with the distance."""
        return "alibi_slopes" in self.layouts

    @property
    def bias_shape(self):
        """Shape of the bias as four axes, 1 where it is broadcast; None without one."""
        if "bias" not in self.layouts:
            return None
        shape = self.layouts["bias"].shape
        return (1,) * (4 - len(shape)) + shape

    @property
    def wants_dbias(self):
        """Whether a gradient of the bias is asked for that has elements."""
        return "dbias" in self.wrt and bool(self.bias_shape) and 0 not in self.bias_shape

    @property
    def has_sink(self):
        """Whether a logit of each head joins the denominator of its rows."""
        return "sink" in self.layouts

    @property
    def wants_dsink(self):
        """Whether a gradient of the sinks is asked for that has elements."""
        return "dsink" in self.wrt and self.has_sink and self.heads_q > 0

    @property
    def dbias_dtype(self):
        """Name of the element type of dbias; None without a bias."""
        return self.gradient_dtype("dbias") if "bias" in self.layouts else None

    @property
    def has_features(self):
        """Whether scores are more than scale * q.k, beside the range of visible keys."""
        return (any(ARRAYS[x.name].changes_scores for x in self.layouts if x.name in ARRAYS)
                or any(getattr(self, name) for name in _SCORES))

    def compiled(self, direction, scores):
        """Names of the options that CUDA kernels of a pass are compiled for.

        Those that change scores, for kernels that compute scores, or those that do not.
        """
        return tuple(option.text for option in OPTIONS
                     if direction in option.compiled and option.changes_scores == scores
                     and (option.name in self.layouts if option.axes
                          else getattr(self, option.name)))

    @property
    def accumulator(self):
        """Name of the type of statistics, sums and `lse`."""
        return accumulator_of(self.dtype)

    def gradient_dtype(self, name):
        """Name of the element type of a gradient, which is named as the kernels do."""
        if name in GRADIENTS:
            option = GRADIENTS[name]
            wanted = None if option.accumulator else self.grad_dtype
            return wanted or self.layouts[option.name].dtype.name
        return self.out_dtype

    def __str__(self):
        heads = f"{self.heads_q}" if self.group == 1 else f"{self.heads_q}:{self.heads_k}"
        width = f"{self.d}" if self.d == self.d_v else f"{self.d}, d_v {self.d_v}"
        text = (f"batch {self.batch}, heads {heads}, Nq {self.Nq}, Nk {self.Nk}, d {width}, "
                f"{self.dtype}")
        if self.precision:
            text += f" ({self.precision})"
        options = [option.text for name, option in ARRAYS.items() if name in self.layouts]
        options += ["dlse"] if "dlse" in self.layouts else []
        options += [f"{NUMBERS[name].text} {getattr(self, name):g}" for name in _SCORES
                    if getattr(self, name)]
        options += [f"left {self.mask.left}"] if self.mask.left < UNLIMITED else []
        options += [f"right {self.mask.right}"] if self.mask.right < UNLIMITED else []
        left_out = [name for name, gradient in GRADIENT_OF.items()
                    if name in self.layouts and gradient not in self.wrt]
        options += [f"no gradient of {' '.join(left_out)}"] if left_out else []
        return text + (f", {', '.join(options)}" if options else "")


# Numbers that change scores; 0 is off.
_SCORES = tuple(name for name, option in NUMBERS.items() if option.changes_scores)

Operands = namedtuple(
    "Operands",
    ["q", "k", "v", *(option.kernel for option in ARRAYS.values()), "out", "lse", "dout", "dlse",
     "dq", "dk", "dv", *GRADIENTS],
    defaults=[None] * (len(ARRAYS) + 7 + len(GRADIENTS)))
Operands.__doc__ = """The arrays of a call with the axes that kernels know, None where absent.

They have four axes ``(batch, head, row, column)``, `lse` and `dlse` three, arrays of options and
their gradients those of the table in `options`.
"""


def accumulator_of(dtype):
    """Name of the type in which sums over elements of `dtype` are kept."""
    return "float64" if dtype == "float64" else "float32"

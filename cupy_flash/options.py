"""The options of attention: the one table from which all that treats them alike is read.

An array option is a line here, what the kernels do with its elements, and the rules that it alone
has. The line gives it its word in `attention`, its checks of dtype and shape, its place in
`Problem`, `Operands` and the kernels' structs, its gradient, and its random arrays in tests.
"""

from typing import Any, NamedTuple

DTYPES = ("float16", "bfloat16", "float32", "float64")


class Option(NamedTuple):
    """What there is to know of an option without its value.

    Attributes
    ----------
    name : str
        The word of the public functions.
    default : object
        What leaves it out.
    kernel : str
        What the kernels call its array.
    axes : str
        The axes of that array: b batch, h query heads, q queries, k keys. Empty: it is no array.
    forms : tuple of str
        The axes that the user's array may have. Empty: whatever broadcasts to `axes`.
    dtypes : tuple of str
        The names of those that it may have.
    each : str
        What its entries belong to, in words.
    step : str
        What to pass in the place of an array of another form.
    counts : str
        Of lengths, the axis whose entries they count.
    gradient : str
        What the kernels call the gradient with respect to it; empty: it has none.
    changes_scores : bool
        Whether scores are more than ``scale * q.k`` with it.
    compiled : tuple of str
        The passes whose CUDA kernels are compiled for it, `text` in capitals being its name there.
    text : str
        What `explain` calls it; empty: it does not name it.
    """

    name: str
    default: Any = None
    kernel: str = ""
    axes: str = ""
    forms: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    each: str = ""
    step: str = ""
    counts: str = ""
    gradient: str = ""
    changes_scores: bool = False
    compiled: tuple[str, ...] = ()
    text: str = ""

    @property
    def dense(self):
        """Whether it has one axis, lies dense in memory, and kernels get its address alone."""
        return len(self.axes) == 1


_BOTH = "forward", "backward"
_LENGTHS = {"axes": "b", "forms": ("b",), "dtypes": ("int32",), "each": "one per batch entry",
            "step": "pass `np.int32([...])`"}

# Arrays first: `Options` is cut behind them.
OPTIONS = (
    Option("mask", kernel="mask", axes="bhqk", dtypes=("bool",), changes_scores=True,
           compiled=_BOTH, text="mask"),
    Option("bias", kernel="bias", axes="bhqk", dtypes=DTYPES, gradient="dbias",
           changes_scores=True, compiled=_BOTH, text="bias"),
    Option("alibi_slopes", kernel="slopes", axes="bh", forms=("h", "bh"),
           dtypes=("float32", "float64"),
           each="one per query head, or per batch entry and head",
           step="one slope for all heads is `np.full(Hq, slope, np.float32)`",
           changes_scores=True, compiled=_BOTH, text="alibi"),
    Option("q_lens", kernel="q_lens", counts="q", text="q_lens", **_LENGTHS),
    Option("kv_lens", kernel="kv_lens", counts="k", text="kv_lens", **_LENGTHS),
    Option("scale"),
    Option("causal", default=False),
    Option("q_offset"),
    Option("window"),
    Option("softcap", changes_scores=True, compiled=_BOTH, text="softcap"),
    Option("precision"),
)

ARRAYS = {option.name: option for option in OPTIONS if option.axes}
NUMBERS = {option.name: option for option in OPTIONS if not option.axes}
GRADIENTS = {option.gradient: option for option in ARRAYS.values() if option.gradient}


def shape_of(axes, scores):
    """The extents of these axes, where `scores` has those of (batch, heads, queries, keys)."""
    extents = dict(zip("bhqk", scores, strict=True))
    return tuple(extents[axis] for axis in axes)

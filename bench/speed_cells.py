"""The cells of the speed benchmark: which problem, which pass, how much work."""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from flops import backward_flops, forward_flops

TOKENS, HIDDEN = 16384, 2048
LENGTHS = (1024, 2048, 4096, 8192, 16384)
SIXTEEN_BIT = ("bfloat16", "float16")
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Cell:
    """One pass over q (B, Hq, Nq, d), k (B, Hk, Nk, d) and v (B, Hk, Nk, d_v).

    `window` is how many keys a query sees, its own included; None: no bound.
    """

    family: str
    direction: str
    dtype: str
    B: int
    Hq: int
    Hk: int
    Nq: int
    Nk: int
    d: int
    d_v: int
    causal: bool = False
    window: int | None = None
    precision: str | None = None

    @property
    def kind(self):
        """What is computed with: the precision of float32, otherwise the dtype."""
        return self.precision or self.dtype

    @property
    def mask(self):
        """The mask in a word."""
        if self.window:
            return f"window{self.window}"
        return "causal" if self.causal else "full"

    @property
    def length(self):
        """Queries and keys; one number where they are the same."""
        return f"{self.Nq}" if self.Nq == self.Nk else f"{self.Nq}x{self.Nk}"

    @property
    def width(self):
        """Head dims of keys and values, one number where they are the same."""
        return f"{self.d}" if self.d == self.d_v else f"{self.d}v{self.d_v}"

    @property
    def heads(self):
        """Heads of queries and keys, one number where they are the same."""
        return f"{self.Hq}" if self.Hq == self.Hk else f"{self.Hq}kv{self.Hk}"

    @property
    def name(self):
        """Unique, and what `--only` is matched with."""
        return (f"{self.direction}-{self.mask}-n{self.length}-d{self.width}-b{self.B}"
                f"-h{self.heads}-{self.kind}{'-portable' if self.portable else ''}")

    @property
    def portable(self):
        """Whether ours may use only what every GPU has."""
        return self.family == "portable"

    @property
    def shapes(self):
        """Of q, k, v."""
        return ((self.B, self.Hq, self.Nq, self.d), (self.B, self.Hk, self.Nk, self.d),
                (self.B, self.Hk, self.Nk, self.d_v))

    @property
    def problem(self):
        """The cell without what does not change its inputs and answers."""
        return replace(self, family="", direction="", precision=None)

    @property
    def unit(self):
        """Of rates: few queries are a matter of reading the keys, many of arithmetic."""
        return "GB/s" if self.family == "decode" else "TFLOP/s"

    @property
    def work(self):
        """Flops, or for GB/s the bytes of q, k, v and the output."""
        if self.unit == "GB/s":
            widths = self.B * (self.Hq * self.Nq + self.Hk * self.Nk) * (self.d + self.d_v)
            return widths * {"float32": 4, "float64": 8}.get(self.dtype, 2)
        count = forward_flops if self.direction == "forward" else backward_flops
        flops = count(self.B, self.Hq, self.Nq, self.Nk, self.d, self.d_v, self.causal)
        if self.window:
            W = min(self.window, self.Nk)
            # The first rows see fewer keys than the window holds.
            share = (W * self.Nq - W * (W - 1) / 2) / (self.Nq * self.Nk)
            flops *= share * (2 if self.causal else 1)
        return flops


def _square(family, dtype, heads, N, d, d_v=None, Hk=None, **options):
    """Both passes, as many sequences as make up the tokens."""
    for direction in DIRECTIONS:
        yield Cell(family, direction, dtype, max(1, TOKENS // N), heads, Hk or heads, N, N, d,
                   d_v or d, **options)


def sixteen_bit():
    """What transformers compute."""
    for dtype in SIXTEEN_BIT:
        for d in (64, 128, 256):
            for causal in (False, True):
                for N in LENGTHS:
                    yield from _square("16-bit", dtype, HIDDEN // d, N, d, causal=causal)


def portable():
    """The same by the kernels that every GPU runs, whatever this one could do."""
    for cell in sixteen_bit():
        yield replace(cell, family="portable")


def features():
    """Grouped heads, values narrower than keys, a window."""
    for N in (4096, 16384):
        yield from _square("features", "bfloat16", 16, N, 128, Hk=2, causal=True)
        yield from _square("features", "bfloat16", 16, N, 192, 128, causal=True)
    yield from _square("features", "bfloat16", 16, 16384, 128, causal=True, window=1024)


def science():
    """One sequence in the types of science."""
    for dtype, precisions in (("float32", ("tf32x3", "tf32")), ("float64", (None,))):
        for d in (64, 128):
            for N in (1024, 4096, 16384):
                for precision in precisions:
                    for direction in DIRECTIONS:
                        yield Cell("science", direction, dtype, 1, 8, 8, N, N, d, d,
                                   precision=precision)


def decode():
    """One query on many keys."""
    for B, Hq, Hk, Nk in ((16, 32, 8, 32768), (1, 32, 8, 131072), (64, 32, 32, 4096)):
        yield Cell("decode", "forward", "bfloat16", B, Hq, Hk, 1, Nk, 128, 128)


FAMILIES = {"16-bit": sixteen_bit, "portable": portable, "features": features, "science": science,
            "decode": decode}


def select(families=(), only=(), lengths=()):
    """Cells of the families whose name holds one of the patterns and whose Nk is one of `lengths`.

    Nothing given: all.
    """
    cells = [cell for family in families or FAMILIES for cell in FAMILIES[family]()]
    if lengths:
        cells = [cell for cell in cells if cell.Nk in lengths]
    if only:
        cells = [cell for cell in cells
                 if any(fnmatchcase(cell.name, f"*{pattern}*") for pattern in only)]
    return cells

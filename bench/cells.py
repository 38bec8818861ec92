"""The cells of the benchmarks: which problem, which pass, how much work."""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

TOKENS, HIDDEN = 16384, 2048
LENGTHS = (1024, 2048, 4096, 8192, 16384)
SIXTEEN_BIT = ("bfloat16", "float16")
KINDS = {"bfloat16": ("bfloat16", None), "float16": ("float16", None),
         "tf32x3": ("float32", "tf32x3"), "tf32": ("float32", "tf32"),
         "float64": ("float64", None)}
DIRECTIONS = ("forward", "backward")
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Cell:
    """One pass over q (B, Hq, Nq, d), k (B, Hk, Nk, d) and v (B, Hk, Nk, d_v).

    `window` is how many keys a query sees, its own included; None: no bound. `arrays` has names of
    array options and the axes that each keeps, for example ``("bias", "1hqk")``. Rows of dout
    differ by factors up to 2^spread.
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
    softcap: int | None = None
    arrays: tuple = ()
    spread: int = 0

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
        """Queries and keys; like the next two one number where they are the same."""
        return _one_or_both(self.Nq, "x", self.Nk)

    @property
    def width(self):
        """Head dims of keys and values."""
        return _one_or_both(self.d, "v", self.d_v)

    @property
    def heads(self):
        """Heads of queries and keys."""
        return _one_or_both(self.Hq, "kv", self.Hk)

    @property
    def option(self):
        """What changes scores beside the mask, in a word or two."""
        softcap = [f"softcap{self.softcap}"] if self.softcap else []
        return "-".join([*softcap, *(f"{name}_{axes}" for name, axes in self.arrays)])

    @property
    def name(self):
        """Unique, and what `--only` is matched with."""
        family = "" if self.family in UNNAMED else self.family
        words = (self.direction, self.mask, f"n{self.length}", f"d{self.width}", f"b{self.B}",
                 f"h{self.heads}", self.kind, self.option, family)
        return "-".join(filter(None, words))

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
        return "GB/s" if self.Nq == 1 else "TFLOP/s"

    def shape_of(self, axes):
        """The extents of these axes of the scores; "1" is a broadcast one."""
        sizes = {"b": self.B, "h": self.Hq, "q": self.Nq, "k": self.Nk, "1": 1}
        return tuple(sizes[axis] for axis in axes)

    @property
    def kv_lens(self):
        """True lengths of the keys of every batch entry, if the cell has some."""
        if "kv_lens" in dict(self.arrays):
            return [min(self.Nk, self.Nk // 4 + 37 * b) for b in range(self.B)]
        return None

    @property
    def work(self):
        """Flops, or for GB/s the bytes of q, k, v and the output."""
        if self.unit == "GB/s":
            widths = self.B * (self.Hq * self.Nq + self.Hk * self.Nk) * (self.d + self.d_v)
            return widths * ITEMSIZE[self.dtype]
        return self.flops

    @property
    def flops(self):
        """Of the products: Q K^T and P V; backward Q K^T, dO V^T, P^T dO, dS^T Q and dS K."""
        widths = (self.d + self.d_v if self.direction == "forward" else 3 * self.d + 2 * self.d_v)
        return 2 * self.B * self.Hq * self.Nq * self.Nk * widths * self._share

    @property
    def _share(self):
        """Of all scores, those that the mask leaves."""
        if self.window:
            W = min(self.window, self.Nk)       # the first rows see fewer keys than the window
            return (W * self.Nq - W * (W - 1) / 2) / (self.Nq * self.Nk)
        share = 0.5 if self.causal else 1
        return share * (sum(self.kv_lens) / (self.B * self.Nk) if self.kv_lens else 1)


def _one_or_both(a, word, b):
    return f"{a}" if a == b else f"{a}{word}{b}"


def both(family, dtype, B, Hq, N, d, d_v=None, Hk=None, **options):
    """Both passes of as many queries as keys."""
    for direction in DIRECTIONS:
        yield Cell(family, direction, dtype, B, Hq, Hk or Hq, N, N, d, d_v or d, **options)


def sixteen_bit():
    """What transformers compute: as many sequences as make up the tokens."""
    for dtype in SIXTEEN_BIT:
        for d in (64, 128, 256):
            for causal in (False, True):
                for N in LENGTHS:
                    yield from both("16-bit", dtype, TOKENS // N, HIDDEN // d, N, d, causal=causal)


def portable():
    """The same by the kernels that every GPU runs, whatever this one could do."""
    for cell in sixteen_bit():
        yield replace(cell, family="portable")


def features():
    """Grouped heads, values narrower than keys, a window."""
    for N in (4096, 16384):
        yield from both("features", "bfloat16", TOKENS // N, 16, N, 128, Hk=2, causal=True)
        yield from both("features", "bfloat16", TOKENS // N, 16, N, 192, 128, causal=True)
    yield from both("features", "bfloat16", 1, 16, 16384, 128, causal=True, window=1024)


def science():
    """One sequence in the types of science."""
    for dtype, precisions in (("float32", ("tf32x3", "tf32")), ("float64", (None,))):
        for d in (64, 128):
            for N in (1024, 4096, 16384):
                for precision in precisions:
                    yield from both("science", dtype, 1, 8, N, d, precision=precision)


def decode():
    """One query on many keys."""
    for B, Hq, Hk, Nk in ((16, 32, 8, 32768), (1, 32, 8, 131072), (64, 32, 32, 4096)):
        yield Cell("decode", "forward", "bfloat16", B, Hq, Hk, 1, Nk, 128, 128)


def options():
    """Every option on its own, in every kind."""
    for kind, (dtype, precision) in KINDS.items():
        B, d = (4, 128) if kind in SIXTEEN_BIT else (1, 64)
        yield from with_options("options", dtype, B, 4096, d, precision)


def with_options(family, dtype, B, N, d, precision=None):
    """The options of one kind, 8 heads."""
    biases = ("bhqk", "1hqk", "11qk", "b11k", "1hq1")[B == 1:]      # the first two are then one
    changes = [{}, {"causal": True}, *({"arrays": (("bias", axes),)} for axes in biases),
               {"arrays": (("mask", "b11k"),)}, {"arrays": (("mask", "11qk"),)}, {"softcap": 20},
               {"arrays": (("alibi_slopes", "h"),), "causal": True},
               {"causal": True, "window": 512}, {"causal": True, "Hk": 2},
               {"arrays": (("kv_lens", "b"),)}, {"arrays": (("sink", "h"),)}]
    for change in changes:
        yield from both(family, dtype, B, 8, N, d, precision=precision, **change)


SHAPES = (              # B, Hq, Hk, Nq, Nk, d, d_v, causal
    (1, 1, 1, 2**19, 64, 64, 64, False), (1, 1, 1, 64, 2**19, 64, 64, False),
    (1, 1, 1, 4096, 4096, 64, 64, False), (1, 1, 1, 16384, 16384, 128, 128, False),
    (512, 8, 8, 64, 64, 64, 64, False), (128, 8, 8, 200, 200, 32, 32, False),
    (16, 16, 16, 577, 577, 80, 80, False), (4, 8, 8, 2048, 2048, 40, 40, False),
    (1, 1, 1, 32768, 32768, 3, 1, False), (4, 16, 16, 2048, 2048, 96, 96, True),
    (2, 8, 8, 2048, 2048, 192, 192, False), (2, 8, 8, 2048, 2048, 256, 256, False),
    (256, 16, 16, 128, 128, 64, 64, True))


def shapes():
    """Off the beaten path: few keys, few queries, short sequences, odd head dims."""
    for dtype in ("bfloat16", "float32", "float64"):
        for *sizes, causal in SHAPES:
            for direction in DIRECTIONS:
                yield Cell("shapes", direction, dtype, *sizes, causal=causal)
    yield from both("shapes", "bfloat16", 8, 64, 1024, 128, Hk=8, causal=True)


def small_d():
    """Kernel regression in a few dimensions."""
    for dtype in ("float32", "float64"):
        for d, d_v in ((3, 1), (3, 3), (8, 8)):
            for N in (32768, 131072):
                yield Cell("small-d", "forward", dtype, 1, 1, 1, N, N, d, d_v)


def rows():
    """Rows of the gradients that differ in scale, to be judged one by one."""
    for kind in ("bfloat16", "float16", "tf32x3", "float64"):
        dtype, precision = KINDS[kind]
        changes = [{"d": d, "causal": causal, "spread": 8 if kind == "float16" else 16}
                   for d in (64, 128, 256) for causal in (False, True)]
        changes += [{"d": 128, "causal": True, "Hq": 8, "Hk": 2, "spread": 8},
                    {"d": 64, "causal": True, "window": 101, "spread": 8},
                    {"d": 64, "arrays": (("bias", "bhqk"),), "spread": 8}]
        for change in changes:
            yield from both("rows", dtype, 1, N=1500, precision=precision, **{"Hq": 4} | change)
    yield from both("rows", "float32", 1, 4, 1500, 128, causal=True, precision="tf32", spread=16)


def cpu():
    """What is timed on a CPU beside torch."""
    for dtype in ("float32", "float64"):
        for d in (64, 128):
            for N in (512, 2048, 8192):
                for causal in (False, True):
                    yield from both("cpu", dtype, 1, 8, N, d, causal=causal)
            yield Cell("cpu", "forward", dtype, 1, 8, 8, 1, 16384, d, d)


def cpu_options():
    """The options on a CPU."""
    for dtype in ("float32", "float64"):
        yield from with_options("cpu-options", dtype, 2, 1024, 64)


FAMILIES = {"16-bit": sixteen_bit, "portable": portable, "features": features, "science": science,
            "decode": decode, "options": options, "shapes": shapes, "small-d": small_d,
            "rows": rows, "cpu": cpu, "cpu-options": cpu_options}
UNNAMED = ("16-bit", "features", "science", "decode")       # their cells' names are without it
GROUPS = {"speed": ("16-bit", "features", "science")}


def select(families=(), only=(), lengths=()):
    """Cells of the families whose name holds one of the patterns and whose Nk is one of `lengths`.

    A name of `GROUPS` stands for its families. Nothing given: all.
    """
    names = [name for family in families or FAMILIES for name in GROUPS.get(family, (family,))]
    cells = [cell for name in dict.fromkeys(names) for cell in FAMILIES[name]()]
    if lengths:
        cells = [cell for cell in cells if cell.Nk in lengths]
    if only:
        cells = [cell for cell in cells
                 if any(fnmatchcase(cell.name, f"*{pattern}*") for pattern in only)]
    return cells


def arguments(parser, minutes, rounds, milliseconds):
    """Of command lines that time cells: which, and how long."""
    parser.add_argument("--cells", nargs="+", default=(), choices=[*GROUPS, *FAMILIES],
                        metavar="CELLS", help=f"any of {', '.join([*GROUPS, *FAMILIES])}")
    parser.add_argument("--only", nargs="+", default=(), metavar="PATTERN",
                        help="cells whose name holds one of the patterns (* matches anything)")
    parser.add_argument("--lengths", nargs="+", type=int, default=(), metavar="N",
                        help="cells with one of these numbers of keys")
    parser.add_argument("--minutes", type=float, default=minutes,
                        help="from the start; when they are over, what is there is printed")
    parser.add_argument("--rounds", type=int, default=rounds, help="of all sides")
    parser.add_argument("--milliseconds", type=float, default=milliseconds,
                        help="of a side's calls each time")

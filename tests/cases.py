"""One table of named cases and the generator of their inputs.

Tests, compile tests and the bench read the same table, so this file knows no test framework and
no backend: it makes NumPy arrays. A case is named after what is special about it, its sizes and
its dtype, for example `gqa-causal-113x203-d64-bfloat16`.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cupy_flash.options import ARRAYS
from cupy_flash.problem import accumulator_of

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
# What is computed with, as (dtype, precision).
KINDS = {
    "float16": ("float16", None),
    "bfloat16": ("bfloat16", None),
    "tf32": ("float32", "tf32"),
    "tf32x3": ("float32", "tf32x3"),
    "float64": ("float64", None),
}


@dataclass(frozen=True)
class Case:
    """One call of attention and of its backward, without the arrays.

    `mask` names a shape of `MASKS`; `bias` spells the axes it keeps, `1` for a broadcast one
    (`"1h1k"` is (1, Hq, 1, Nk), `"qk"` is (Nq, Nk)); `alibi` likewise is `"h"` or `"bh"`. `sink`
    has logits, one head after the other, from the first again where there are more heads.
    `arrays` has random arrays of options, each the name of one and the axes that it keeps.
    `data` names a generator of `inputs`. Everything else has the meaning and the default of the
    public option of that name.
    """

    label: str
    Nq: int = 113
    Nk: int = 203
    d: int = 64
    d_v: int | None = None
    B: int = 1
    Hq: int = 2
    Hk: int = 2
    ndim: int = 4
    dtype: str = "float32"
    scale: float | None = None
    causal: bool = False
    q_offset: int | None = None
    window: tuple | None = None
    mask: str | None = None
    bias: str | None = None
    bias_dtype: str | None = None
    bias_holes: bool = False
    softcap: float | None = None
    alibi: str | None = None
    sink: tuple | None = None
    q_lens: tuple | None = None
    kv_lens: tuple | None = None
    precision: str | None = None
    arrays: tuple = ()
    data: str = "normal"
    seed: int = 0

    @property
    def id(self):
        """The readable name, unique in `CASES`."""
        head_dim = f"d{self.d}" if self.d_v is None else f"d{self.d}v{self.d_v}"
        parts = (self.label, f"{self.Nq}x{self.Nk}", head_dim, self.dtype, self.precision)
        return "-".join(filter(None, parts))

    def shapes(self):
        """The shapes of q, k and v."""
        d_v = self.d if self.d_v is None else self.d_v
        query, key = ((self.B, self.Hq, self.Nq), (self.B, self.Hk, self.Nk))
        return tuple((*lead[4 - self.ndim :], n) for lead, n in
                     ((query, self.d), (key, self.d), (key, d_v)))


class Inputs(NamedTuple):
    """The arrays of a case; `options` are the keyword arguments of every public function."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray
    options: dict[str, Any]


def inputs(case):
    """Make the arrays of `case`: the same every time."""
    rng = np.random.default_rng([case.seed, *case.id.encode()])
    dtype = DTYPES[case.dtype]
    q, k, v = (rng.standard_normal(shape) for shape in case.shapes())
    dout = rng.standard_normal((*q.shape[:-1], v.shape[-1]))
    q, k, v, dout = DATA[case.data](rng, case, q, k, v, dout)
    dlse = rng.standard_normal(q.shape[:-1])
    if case.data == "spread":       # else dlse alone would make the rows of dq whose dout is small
        dlse *= np.abs(dout).max(axis=-1)
    q, k, v, dout = (x.astype(dtype) for x in (q, k, v, dout))
    return Inputs(q, k, v, dout, dlse.astype(accumulator_of(case.dtype)), _options(case, rng))


def _options(case, rng):
    """The keyword arguments of `case`; an option that is off is not among them."""
    options = {name: getattr(case, name) for name in
               ("scale", "causal", "q_offset", "window", "softcap", "precision")}
    if case.mask is not None:
        options["mask"] = MASKS[case.mask](rng, case)
    if case.bias is not None:
        bias = rng.standard_normal(_kept(case, case.bias))
        if case.bias_holes:
            bias[rng.random(bias.shape) < 0.3] = -np.inf
        options["bias"] = bias.astype(DTYPES[case.bias_dtype or case.dtype])
    if case.alibi is not None:
        slopes = 2.0 ** -rng.uniform(1, 8, _kept(case, case.alibi))
        options["alibi_slopes"] = slopes.astype(np.float32)
    if case.sink is not None:
        options["sink"] = np.resize(case.sink, case.Hq).astype(accumulator_of(case.dtype))
    for name in ("q_lens", "kv_lens"):
        if getattr(case, name) is not None:
            options[name] = np.array(getattr(case, name), np.int32)
    options |= {name: random_array(ARRAYS[name], axes, rng, case) for name, axes in case.arrays}
    return {name: value for name, value in options.items() if value is not None}


def random_array(option, axes, rng, case):
    """An array for an option that keeps these axes, of any density, size and dtype.

    It is no wider than q where the option allows that: wide gradients of narrow inputs have tests
    of their own, with a wide `out`.
    """
    shape = _kept(case, axes)
    if option.counts:
        return rng.integers(0, {"q": case.Nq, "k": case.Nk}[option.counts] + 1, shape, np.int32)
    if option.dtypes == ("bool",):
        return rng.random(shape) < rng.choice((0.05, 0.5, 0.95))
    dtypes = [DTYPES[name] for name in option.allowed(accumulator_of(case.dtype))]
    narrow = [dtype for dtype in dtypes if dtype.itemsize <= DTYPES[case.dtype].itemsize]
    x = rng.standard_normal(shape)
    if option.name == "alibi_slopes":       # they are multiplied by distances
        x = 2.0 ** -rng.uniform(1, 8, shape)
    if option.name in ("bias", "sink") and rng.random() < 0.5:
        x[rng.random(shape) < 0.3] = -np.inf
    return x.astype((narrow or dtypes)[rng.integers(len(narrow or dtypes))])


def forms(option, ndim):
    """Axes that an array for an option may keep beside arrays of `ndim` axes."""
    if option.forms:
        return option.forms
    full = option.axes[4 - ndim:]
    return tuple("".join(axes) for first in range(len(full))
                 for axes in product(*((axis, "1") for axis in full[first:])))


def _kept(case, axes):
    """The shape that `axes` spells, for example "1h1k" or "bh"."""
    size = {"b": case.B, "h": case.Hq, "q": case.Nq, "k": case.Nk, "1": 1}
    return tuple(size[axis] for axis in axes)


def _normal(rng, case, q, k, v, dout):
    return q, k, v, dout


def _mean_one(rng, case, q, k, v, dout):
    """Zero-mean data hides an accumulator that is too short: here every sum grows."""
    return q + 1, k + 1, v + 1, dout + 1


def _late_maxima(rng, case, q, k, v, dout):
    """The row maximum keeps moving, and five queries find by far their largest score at the end."""
    Nq, Nk = q.shape[-2], k.shape[-2]
    k = k * np.linspace(0.5, 2, Nk)[:, None]
    rows, keys = rng.integers(Nq, size=min(5, Nk)), np.arange(Nk - min(5, Nk), Nk)
    readers = q if q.ndim == 2 else q[..., :: q.shape[-3] // k.shape[-3], :, :]
    k[..., keys, :] = 3 * readers[..., rows, :]
    return q, k, v, dout


def _mixed_scales(rng, case, q, k, v, dout):
    """Neighbouring rows differ by factors up to 2^12 in q and 2^8 in dout."""
    i = np.arange(q.shape[-2])[:, None]
    return q * 2.0 ** (i * 7 % 13 - 6), k, v, dout * 2.0 ** (i * 5 % 9 - 4)


def _spread(rng, case, N):
    """A factor for each of N rows: it falls by 2^16 (2^8 in float16) along them, and neighbours
    differ by up to 2^4 (2^2), so that the rows of one tile do."""
    exponent = np.linspace(0, 1, N) + 0.25 * rng.random(N)
    return 2.0 ** -(exponent * (8 if case.dtype == "float16" else 16))[:, None]


def _spread_rows(rng, case, q, k, v, dout):
    """Rows of dout, so of dq, differ by factors up to 2^16; with a window, keys' gradients too."""
    return q, k, v, dout * _spread(rng, case, dout.shape[-2])


def _spread_values(rng, case, q, k, v, dout):
    """Rows of v, so with a window those of out, differ by factors up to 2^16."""
    return q, k, v * _spread(rng, case, v.shape[-2]), dout


DATA = {"normal": _normal, "mean1": _mean_one, "late": _late_maxima, "scales": _mixed_scales,
        "spread": _spread_rows, "spread-values": _spread_values}


def _dense(rng, case):
    """A mask of its own for every (batch, head), three rows of it empty, one key never seen."""
    mask = rng.random((case.B, case.Hq, case.Nq, case.Nk)) < 0.6
    mask[..., rng.integers(case.Nq, size=3), :] = False
    mask[..., rng.integers(case.Nk)] = False
    return mask


def _blocks(rng, case):
    """Whole tiles hidden, the first one of every row among them."""
    mask = np.ones((case.Nq, case.Nk), bool)
    mask[:, : case.Nk // 2] = False
    mask[case.Nq // 2 :, : case.Nk * 3 // 4] = False
    return mask


MASKS = {
    "dense": _dense,
    "blocks": _blocks,
    "padding": lambda rng, case: rng.random((case.B, 1, 1, case.Nk)) < 0.7,
    "per-query": lambda rng, case: rng.random((case.Hq, case.Nq, 1)) < 0.7,
    "nothing": lambda rng, case: np.zeros((1, case.Nk), bool),
}

GQA = {"B": 2, "Hq": 4, "Hk": 2, "d": 32}

FEATURES = (
    Case("plain"),
    Case("square", Nq=192, Nk=192),
    Case("2d", ndim=2, Hq=1, Hk=1),
    Case("3d-gqa", ndim=3, Hq=3, Hk=1),
    Case("batch-gqa", **GQA),
    Case("mqa-causal", B=2, Hq=4, Hk=1, d=32, causal=True),
    Case("decode", Nq=1, Nk=203, Hq=8, Hk=2),
    Case("decode-causal-two", Nq=2, Nk=130, Hq=8, Hk=2, causal=True),
    Case("decode-long", Nq=1, Nk=4200, d=32, d_v=16, Hq=4, Hk=1),
    Case("decode-long-ragged", B=3, Nq=3, Nk=2600, d=16, Hq=2, Hk=1, causal=True, bias="b11k",
         kv_lens=(2600, 700, 0), q_lens=(3, 2, 3)),
    Case("one-key", Nq=130, Nk=1),
    Case("one-one", Nq=1, Nk=1),
    Case("three", Nq=3, Nk=3, causal=True),
    Case("causal", causal=True),
    Case("causal-square", Nq=200, Nk=200, causal=True),
    Case("causal-tall", Nq=203, Nk=113, causal=True),
    Case("causal-top-left", causal=True, q_offset=0),
    Case("causal-offset-negative", causal=True, q_offset=-20),
    Case("causal-offset-beyond", causal=True, q_offset=500),
    Case("window", window=(17, 5)),
    Case("window-few-rows", Nq=3, Nk=203, Hq=2, Hk=1, window=(60, 0)),
    Case("window-left", window=(40, None)),
    Case("window-right", Nq=203, Nk=113, window=(None, 3)),
    Case("window-diagonal", Nq=150, Nk=150, window=(0, 0)),
    Case("window-causal-gqa", causal=True, window=(65, 2), **GQA),
    Case("window-offset", window=(30, 10), q_offset=7),
    Case("scale-negative", scale=-0.3),
    Case("scale-zero", scale=0.0),
    Case("softcap", softcap=1.5),
    Case("softcap-causal-gqa", softcap=20.0, causal=True, **GQA),
    Case("alibi", alibi="h"),
    Case("alibi-batch-causal-gqa", alibi="bh", causal=True, **GQA),
    Case("mask-dense-gqa", mask="dense", **GQA),
    Case("mask-blocks", mask="blocks"),
    Case("mask-padding", B=2, mask="padding"),
    Case("mask-per-query-causal", mask="per-query", causal=True),
    Case("mask-nothing", Nq=30, Nk=100, mask="nothing"),
    Case("bias-pair-gqa", bias="bhqk", **GQA),
    Case("bias-shared", B=2, bias="11qk"),
    Case("bias-key", B=2, bias="b11k"),
    Case("bias-head-key-causal", bias="1h1k", causal=True),
    Case("bias-query", bias="hq1"),
    Case("bias-2d-float32", bias="qk", bias_dtype="float32", softcap=5.0),
    Case("bias-2d-float64", Nq=60, bias="qk", bias_dtype="float64"),
    Case("bias-holes-gqa", bias="1hqk", bias_holes=True, **GQA),
    Case("lens", B=3, q_lens=(113, 50, 0), kv_lens=(203, 97, 40)),
    Case("lens-causal-gqa", B=3, Hq=2, Hk=1, causal=True, q_lens=(113, 96, 30),
         kv_lens=(100, 0, 203)),
    Case("kv-lens-window", B=2, kv_lens=(190, 33), window=(20, 4)),
    Case("late-maxima", data="late"),
    Case("late-maxima-causal-gqa", data="late", causal=True, **GQA),
    Case("mean-one", data="mean1"),
    Case("mean-one-causal", Nq=203, data="mean1", causal=True),
    Case("mixed-scales", data="scales"),
    Case("mixed-scales-softcap", data="scales", softcap=10.0),
    Case("d1", d=1),
    Case("d7v3", Nq=70, d=7, d_v=3),
    Case("d20", Nq=70, d=20, causal=True),
    Case("d46v72", Nq=70, d=46, d_v=72),
    Case("d80", Nq=70, d=80),
    Case("d96v128-causal", Nq=70, d=96, d_v=128, causal=True),
    Case("d128", d=128),
    Case("d192v128-gqa", Nq=70, d=192, d_v=128, Hq=2, Hk=1, causal=True),
    Case("d256", Nq=70, d=256),
    Case("d1v256", Nq=70, d=1, d_v=256),
    Case("all-but-lens", causal=True, window=(90, 7), mask="dense", bias="11qk", softcap=8.0,
         alibi="h", scale=0.2, data="mean1", **GQA),
    Case("all-options", q_offset=60, causal=True, window=(120, 20), mask="padding", bias="1hq1",
         softcap=3.0, alibi="bh", q_lens=(113, 70), kv_lens=(150, 203), data="late", **GQA),
)

# Of usual size, none at all, far above every score and far below.
SINKS = (0.5, -np.inf, 1e4, -1e4)
SINK = (
    Case("sink", sink=(2.0, -1.0)),
    Case("sink-2d", Nq=70, ndim=2, Hq=1, Hk=1, sink=(6.0,), data="mean1"),
    Case("sink-causal-gqa", causal=True, sink=SINKS, **GQA),
    Case("sink-causal-tall", Nq=203, Nk=113, causal=True, alibi="h", softcap=5.0, sink=(3.0, 0.0)),
    Case("sink-window-few-rows", Nq=3, Nk=203, Hq=2, Hk=1, window=(60, 0), sink=(1.0, -np.inf)),
    Case("sink-lens", B=3, q_lens=(113, 50, 0), kv_lens=(203, 0, 40), sink=(1.0, -0.5)),
    Case("sink-mask-gqa", mask="dense", sink=SINKS, **GQA),
    Case("sink-mask-nothing", Nq=50, Nk=100, mask="nothing", sink=(1.5, -np.inf)),
    Case("sink-bias-holes-gqa", bias="1hqk", bias_holes=True, sink=(1.0, 30.0, -2.0), **GQA),
    Case("sink-bias-query", bias="hq1", sink=(0.0, 1e9), data="scales"),
    Case("sink-decode-long", B=2, Nq=3, Nk=4200, d=32, d_v=16, Hq=4, Hk=1, q_lens=(3, 1),
         kv_lens=(4200, 0), sink=(1.0, -np.inf, 9.0, 0.0)),
    Case("sink-all-options", q_offset=60, causal=True, window=(120, 20), mask="padding",
         bias="1hq1", softcap=3.0, alibi="bh", sink=(0.3, 4.0), q_lens=(113, 70),
         kv_lens=(150, 203), data="late", **GQA),
)

# Rows of one array that differ by factors up to 2^16: for the rule for rows.
SPREAD = (
    Case("spread-rows", data="spread"),
    Case("spread-rows-causal-gqa", data="spread", causal=True, **GQA),
    Case("spread-rows-window", Nq=203, data="spread", window=(17, 5)),
    Case("spread-values-window", Nq=203, data="spread-values", window=(17, 5)),
)

PRECISIONS = tuple(
    replace(feature, precision=precision)
    for feature in (*FEATURES, *SINK, *SPREAD)
    if feature.label in ("plain", "causal", "mean-one", "mean-one-causal", "late-maxima",
                         "bias-pair-gqa", "all-but-lens", "d256", "sink-mask-gqa",
                         "spread-rows-window")
    for precision in ("tf32", "tf32x3")
)

CASES = (
    *(replace(f, dtype=dtype) for f in (*FEATURES, *SINK, *SPREAD) for dtype in DTYPES),
    *PRECISIONS)


def in_turns(features):
    """(feature, kind) for a test that compiles kernels: plain features with every kind.

    Those with options have kernels of their own; each has two kinds, which take turns.
    """
    names, chosen = [*KINDS], []
    with_options = 0
    for feature in features:
        kinds = names
        if feature.mask or feature.bias or feature.softcap or feature.alibi or feature.sink:
            kinds = [names[(with_options + i) % len(names)] for i in (0, 2)]
            with_options += 1
        chosen += product([feature], kinds)
    return chosen

"""The CUDA kernels, executed by a C++ compiler's program on fibers, against the CPU path.

Both paths have the same recurrence and the same roundings, so they agree far better than either
agrees with the reference: a fault is seen long before it reaches the error of the dtype.
"""

import mmap
from dataclasses import replace

import numpy as np
import pytest
from cases import FEATURES, KINDS, SINK, Case, in_turns, inputs
from cuda_on_cpu.harness import COMPILER, Fibers
from numerics import NAN_BYTE, assert_bit_equal, assert_same_nonfinite, fenced
from numpy.lib.stride_tricks import as_strided

import cupy_flash as cf
from cupy_flash import plan
from cupy_flash.plan import tuned

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler on Linux")

# Root mean square of the difference, in units of that of the result. In the narrow types it is a
# few roundings of P and dS that fall to the other side: 5 to 16 times less than a unit of the type;
# in 3xTF32 what tensor cores drop of long sums.
LIMIT = {"float16": 2e-4, "bfloat16": 5e-4, "tf32": 2e-4, "tf32x3": 1e-5, "float64": 2e-14}
NAMES = ("out", "lse", "dq", "dk", "dv", "dbias", "dsink")


def small(feature, kind="float32"):
    """A case of the table with short sequences and with head dims that fill no fragment."""
    share = 5 if feature.Nk < 1000 else 50

    def part(values):
        return values and tuple(x and -(-x // share) for x in values)
    dtype, precision = KINDS.get(kind, (kind, None))
    return replace(
        feature, Nq=-(-feature.Nq // share), Nk=-(-feature.Nk // share), d=20, d_v=36, dtype=dtype,
        precision=precision, window=part(feature.window), q_lens=part(feature.q_lens),
        kv_lens=part(feature.kv_lens), q_offset=feature.q_offset and feature.q_offset // share)


def wide(x):
    """The accumulators' dtype of the inputs."""
    return np.float64 if x.q.dtype == np.float64 else np.float32


def without_window(x):
    """The options with a mask in the window's place: the CPU's key tiles then start at 0."""
    options = dict(x.options)
    left, right = options.pop("window", None) or (None, None)
    if left is None and right is None:
        return options
    B, Nq, Nk = x.q.shape[0], x.q.shape[-2], x.k.shape[-2]
    offset = options.get("kv_lens", np.full(B, Nk)) - options.get("q_lens", np.full(B, Nq))
    offset = np.full(B, options["q_offset"]) if "q_offset" in options else offset
    distance = np.arange(Nk) - np.arange(Nq)[:, None] - offset[:, None, None, None]
    mask = options.get("mask", True) & (distance <= (Nk if right is None else right))
    options["mask"] = mask & (distance >= -(2 * Nk + Nq if left is None else left))
    return options


def on_cpu(x, Br=16, Bc=16):
    """Forward and backward on the CPU path with the GPU's roundings, in the accumulators' dtype."""
    options = without_window(x)
    with plan.tuned(Br=Br, Bc=Bc, round_P=True):
        out, lse = cf.attention(x.q, x.k, x.v, return_lse=True, out_dtype=wide(x), **options)
        return out, lse, *cf.attention_backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse,
                                                grad_dtype=wide(x), **options)


def on_fibers(x, fibers, out, lse):
    """The same on fibers; backward from the `out` and `lse` given."""
    mine = fibers.forward(x.q, x.k, x.v, out_dtype=wide(x), **x.options)
    return *mine, *fibers.backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse,
                                   grad_dtype=wide(x), **x.options)


def assert_same(label, kind, got, want, factor=1):
    for name, a, b in zip(NAMES[:len(want)], got, want, strict=True):
        if b is None or not b.size:
            assert a is None or a.shape == b.shape
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        assert_same_nonfinite(f"{label} {name}", a, b)
        a, b = (np.where(np.isfinite(b), x, 0) for x in (a, b))
        error, size = (np.sqrt(np.square(x).mean()) for x in (a - b, b))
        assert error <= factor * LIMIT[kind] * size, f"{label} {name}: {error / size:.2e}"


TABLE = [feature for feature in (*FEATURES, *SINK) if not feature.label[1:2].isdigit()]


@pytest.mark.parametrize("feature, kind", in_turns(TABLE), ids=lambda x: getattr(x, "label", x))
def test_table(feature, kind):
    x = inputs(small(feature, kind))
    want = on_cpu(x)
    assert_same(feature.label, kind, on_fibers(x, Fibers(), *want[:2]), want)


@pytest.mark.parametrize("kind, Br, Bc, warps, d, d_v", [
    ("bfloat16", 64, 64, 4, 64, 64),
    ("bfloat16", 32, 32, 8, 256, 250),
    ("float16", 64, 32, 4, 7, 80),
    ("tf32", 32, 16, 4, 40, 16),
    ("tf32x3", 16, 16, 4, 250, 1),
    ("float64", 16, 8, 4, 17, 16),
    ("float64", 8, 8, 8, 256, 250),
])
def test_tiles(kind, Br, Bc, warps, d, d_v):
    """More warps than fragments and fewer, more threads than scores, columns of nothing."""
    dtype, precision = KINDS[kind]
    x = inputs(Case("tile", Nq=37, Nk=70, Hq=2, Hk=1, d=d, d_v=d_v, causal=True, dtype=dtype,
                    precision=precision, data="mean1"))
    want = on_cpu(x, Br, Bc)
    assert_same("tile", kind, on_fibers(x, Fibers(Br, Bc, warps), *want[:2]), want)


def placed(x, offset, spare):
    """The array `offset` elements into a buffer of NaN, with `spare` elements behind each row."""
    width = x.shape[-1] + spare
    buffer = np.full(offset + x[..., 0].size * width, NAN_BYTE, x.dtype)
    buffer.view(np.uint8)[:] = NAN_BYTE
    inside = buffer[offset:].reshape(*x.shape[:-1], width)[..., :x.shape[-1]]
    inside[...] = x
    return inside


LAYOUTS = {
    "8 elements apart": lambda x: placed(x, 8, 8),
    "4 elements apart": lambda x: placed(x, 4, 4),
    "2 elements apart": lambda x: placed(x, 2, 2),
    "1 element apart": lambda x: placed(x, 1, 1),
    "heads inside rows": lambda x: placed(x.swapaxes(1, 2), 8, 0).swapaxes(1, 2),
    "rows reversed": lambda x: np.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :],
    "fenced": fenced,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(kind, layout):
    """The same bits for any strides and alignment; rows of whole 16-byte loads, and of none."""
    dtype, precision = KINDS[kind]
    for d, d_v in ((24, 40), (21, 35)):
        x = inputs(Case("layout", Nq=21, Nk=37, B=2, Hq=4, Hk=2, d=d, d_v=d_v, dtype=dtype,
                        precision=precision))
        out, lse = Fibers().forward(x.q, x.k, x.v, **x.options)
        want = out, lse, *Fibers().backward(x.dout, x.q, x.k, x.v, out, lse, **x.options)
        q, k, v, dout, out = (LAYOUTS[layout](a) for a in (x.q, x.k, x.v, x.dout, out))
        got = *Fibers().forward(q, k, v, **x.options), *Fibers().backward(
            dout, q, k, v, out, lse, **x.options)
        for name, a, b in zip(NAMES[:5], got, want, strict=False):
            assert_bit_equal(f"{layout} {name}", a, b)


def test_broadcast_operands():
    """A stride of 0, as of the gradient of a sum."""
    x = inputs(Case("stride-0", Nq=21, Nk=37, Hq=2, Hk=2, d=24, d_v=40, dtype="bfloat16"))
    k, dout = (np.broadcast_to(a[:, :1, :1], a.shape) for a in (x.k, x.dout))
    out, lse = Fibers().forward(x.q, k, x.v)
    got = Fibers().backward(dout, x.q, k, x.v, out, lse)
    want = Fibers().backward(dout.copy(), x.q, k.copy(), x.v, out, lse)
    for name, a, b in zip(NAMES[2:5], got, want, strict=False):
        assert_bit_equal(name, a, b)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_wide_gradients_come_in(dtype):
    """dout and out in float32 that hold 16-bit numbers are those numbers."""
    x = inputs(Case("wide", Nq=21, Nk=37, Hq=2, Hk=1, d=21, d_v=35, dtype=dtype))
    out, lse = Fibers().forward(x.q, x.k, x.v)
    want = Fibers().backward(x.dout, x.q, x.k, x.v, out, lse)
    got = Fibers().backward(x.dout.astype(np.float32), x.q, x.k, x.v, out.astype(np.float32), lse)
    for name, a, b in zip(NAMES[2:5], got, want, strict=False):
        assert_bit_equal(name, a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_results_in_the_dtype_of_the_inputs(kind):
    x = inputs(small(Case("narrow", bias="1hqk", Hq=2, Hk=1), kind))
    out, lse = Fibers().forward(x.q, x.k, x.v, **x.options)
    got = out, lse, *Fibers().backward(x.dout, x.q, x.k, x.v, out, lse, **x.options)
    with plan.tuned(Br=16, Bc=16, round_P=True):
        want = cf.attention(x.q, x.k, x.v, return_lse=True, **x.options)
        want += tuple(cf.attention_backward(x.dout, x.q, x.k, x.v, out, lse, **x.options))
    assert got[-1] is want[-1] is None                   # there is no sink
    for name, a, b in zip(NAMES[:-1], got[:-1], want[:-1], strict=True):
        assert a.dtype == b.dtype, name
        a, b = a.astype(np.float64), b.astype(np.float64)
        assert np.abs(a - b).max() <= 20 * LIMIT[kind] * np.abs(b).max(), name


# What is hidden must not matter, whatever it holds.

HIDDEN = {
    "lens": {"q_lens": (13, 21), "kv_lens": (30, 5)},
    "lens-causal": {"q_lens": (13, 21), "kv_lens": (30, 5), "causal": True},
    "window": {"window": (6, 2), "q_offset": 12},
    "padding": {"mask": "padding"},
    "padding-softcap": {"mask": "padding", "softcap": 5.0},
    "rows": {"mask": "per-query"},
    "bias": {"bias": "b11k"},
}


def hidden_places(x, how):
    """Where an array of q and one of k may hold anything; -inf into a bias where it has to hide."""
    keys, rows = (np.zeros((*a.shape[:-1], 1), bool) for a in (x.k, x.q))
    Nq, Nk = x.q.shape[-2], x.k.shape[-2]
    for b in range(len(x.q)):
        if "lens" in how:
            keys[b, :, x.options["kv_lens"][b]:] = rows[b, :, x.options["q_lens"][b]:] = True
        elif how == "window":
            left, right, offset = *x.options["window"], x.options["q_offset"]
            keys[b, :, :offset - left] = keys[b, :, offset + Nq + right:] = True
            rows[b, :, Nk - offset + left:] = True
        elif how == "rows":
            rows[b] = ~x.options["mask"]
        elif "padding" in how:
            keys[b, 0, :, 0] = ~x.options["mask"][b, 0, 0]
        else:
            x.options["bias"][b, ..., 5:20] = -np.inf
            keys[b, :, 5:20] = True
    return keys, rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HIDDEN)
def test_hidden_values_do_not_matter(kind, how):
    dtype, precision = KINDS[kind]
    x = inputs(Case("hidden", Nq=21, Nk=37, B=2, Hq=2, Hk=1, d=20, d_v=36, dtype=dtype,
                    precision=precision, **HIDDEN[how]))
    keys, rows = hidden_places(x, how)
    where = {"q": rows, "k": keys, "v": keys, "dout": rows}

    def with_hidden(value):
        """The inputs with `value` in everything that is hidden."""
        value = x.q.dtype.type(value)
        return x._replace(**{name: np.where(w, value, getattr(x, name)).astype(x.q.dtype)
                             for name, w in where.items()})

    clean = with_hidden(0)
    want = on_fibers(clean, Fibers(), *Fibers().forward(clean.q, clean.k, clean.v, **x.options))
    for value in (np.nan, np.inf, float(np.finfo(np.float32).max)):
        with np.errstate(over="ignore"):
            bad = with_hidden(value)
        got = on_fibers(bad, Fibers(), *Fibers().forward(bad.q, bad.k, bad.v, **x.options))
        for name, a, b in zip(NAMES, got, want, strict=True):
            if b is not None:
                assert_bit_equal(f"{value} {name}", a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_values_behind_a_mask_of_each_row(kind):
    """Finite values stay finite in every rounding, so that a probability of 0 wipes them out."""
    x = inputs(small(Case("largest", mask="dense", Hq=2, Hk=1), kind))
    mask = x.options["mask"]
    mask[..., 3] = False
    mask[..., 7, 3] = True                          # one row sees the key with the largest value
    v = x.v.copy()
    v[..., 3, :] = float(np.finfo(np.float32).max) if x.q.dtype == np.float32 else 6e4
    want = Fibers().forward(x.q, x.k, x.v, **x.options)
    got = Fibers().forward(x.q, x.k, v, **x.options)
    others = np.arange(x.q.shape[-2]) != 7
    assert_bit_equal("lse", got[1], want[1])
    assert_bit_equal("out", got[0][..., others, :], want[0][..., others, :])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_see_nothing_beside_nan(kind):
    """A NaN that others of their tile see leaves them at zero."""
    x = inputs(small(Case("beside", mask="dense", Hq=2, Hk=1), kind))
    x.options["mask"][...] = True
    x.options["mask"][..., 5, :] = False
    x.k[..., 9, :] = x.v[..., 9, :] = np.nan
    out, lse = Fibers().forward(x.q, x.k, x.v, **x.options)
    dq = Fibers().backward(x.dout, x.q, x.k, x.v, out, lse, **x.options)[0]
    assert np.isnan(out[..., 4, :].astype(np.float32)).all() and np.isnan(lse[..., 4]).all()
    assert (out[..., 5, :] == 0).all() and (lse[..., 5] == -np.inf).all()
    assert (dq[..., 5, :] == 0).all()


@pytest.mark.parametrize("sizes", [
    {"Nk": 0}, {"Nq": 0}, {"B": 0}, {"Hq": 0, "Hk": 2}, {"Nq": 1, "Nk": 1}, {"kv_lens": (0,)},
], ids=str)
def test_nothing_to_see(sizes):
    x = inputs(Case("empty", **{"Nq": 5, "Nk": 7, "Hq": 2, "d": 20, "d_v": 36} | sizes))
    want = on_cpu(x)
    assert_same("empty", "tf32x3", on_fibers(x, Fibers(), *want[:2]), want)


@pytest.mark.parametrize("kind", ["bfloat16", "tf32x3", "float64"])
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"kv_lens": (100, 40)}, {"kv_lens": (133, 0)},
], ids=str)
def test_splits(kind, options):
    dtype, precision = KINDS[kind]
    x = inputs(Case("splits", Nq=3, Nk=133, B=2, Hq=2, Hk=1, d=20, d_v=36, dtype=dtype,
                    precision=precision, **options))
    fibers = Fibers(sms=64)
    with tuned(split_keys=32):
        got = fibers.forward(x.q, x.k, x.v, out_dtype=wide(x), **x.options)
    assert "combine" in fibers.barriers
    # A split's rows have a reference of their own, so that in bfloat16 all of P is rounded anew.
    assert_same("splits", kind, got, on_cpu(x)[:2], 10 if kind == "bfloat16" else 1)


@pytest.mark.parametrize("kind", ["float16", "float64"])
def test_neither_order_nor_grid_changes_a_bit(kind):
    x = inputs(small(Case("order", B=2, Hq=4, Hk=2, bias="1h1k", causal=True), kind))
    first = Fibers()
    out, lse = first.forward(x.q, x.k, x.v, **x.options)
    want = on_fibers(x, first, out, lse)
    for seed, grid in ((2, 1), (3, 2), (4, 1000), (5, 7)):
        got = on_fibers(x, Fibers(seed=seed, grid=grid), out, lse)
        for name, a, b in zip(NAMES[:-1], got[:-1], want[:-1], strict=True):
            assert_bit_equal(f"seed {seed}, grid {grid}, {name}", a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (7, 3)}], ids=str)
def test_a_mask_is_as_good_as_a_range(kind, options):
    """The same bits: hidden keys add zeros, and tiles start at the same keys and rows."""
    x = inputs(small(Case("said-twice", Hq=2, Hk=1, Nq=203, **options), kind))
    out, lse = Fibers().forward(x.q, x.k, x.v, **x.options)
    want = on_fibers(x, Fibers(), out, lse)
    if x.options["causal"]:
        x = x._replace(options=x.options | {"window": (None, 0)})
        x.options.pop("causal")
    got = on_fibers(x._replace(options=without_window(x)), Fibers(), out, lse)
    for name, a, b in zip(NAMES[:5], got, want, strict=False):
        assert_bit_equal(name, a, b)


def test_offsets_beyond_32_bits():
    """Rows 128 MiB apart, heads 5 GiB: only a few pages of that memory ever exist."""
    x = inputs(Case("far", Nq=21, Nk=37, Hq=2, Hk=2, d=24, d_v=40, dtype="bfloat16"))
    out, lse = Fibers().forward(x.q, x.k, x.v)
    want = out, lse, *Fibers().backward(x.dout, x.q, x.k, x.v, out, lse)
    q, k, v, dout = (far_apart(a) for a in (x.q, x.k, x.v, x.dout))
    got = *Fibers().forward(q, k, v), *Fibers().backward(dout, q, k, v, out, lse)
    for name, a, b in zip(NAMES[:5], got, want, strict=False):
        assert_bit_equal(name, a, b)


def far_apart(x, row=2**27, head=5 * 2**30):
    """A copy of `x` with its rows and heads so many bytes apart."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000         # MAP_NORESERVE of Linux
    memory = np.frombuffer(mmap.mmap(-1, x.shape[1] * head, flags), x.dtype)
    view = as_strided(memory, x.shape, (x.shape[1] * head, head, row, x.itemsize))
    view[...] = x
    return view

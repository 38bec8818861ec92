"""The kernels without tensor cores on fibers, against the CPU path."""

from dataclasses import replace

import numpy as np
import pytest
from cases import FEATURES, SINK, Case, inputs
from cuda_on_cpu.harness import COMPILER, Fibers, KernelError
from numerics import assert_bit_equal
from test_cuda_on_cpu import (
    HIDDEN,
    LAYOUTS,
    assert_same,
    far_apart,
    hidden_places,
    on_cpu,
    small,
    wide,
    without_window,
)

import cupy_flash as cf
from cupy_flash.plan import cuda_simt
from cupy_flash.plan.cuda_simt import Tile

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler on Linux")

KINDS = {"tf32x3": ("float32", "tf32x3"), "float64": ("float64", None)}
NAMES = ("out", "lse", "dq", "dk", "dv", "dbias", "dsink")
# Two rows or keys of each thread of one warp, several chunks in a tile.
SMALL = Tile(2, 1, 32, 8, 2, 16, 2, "of a test")
TABLE = [x for x in (*FEATURES, *SINK) if not x.label[1:2].isdigit()]
# A unit less than the products of tensor cores lose.
FACTOR = {"tf32x3": 0.1, "float64": 1}


def fibers(tile=SMALL, **options):
    return Fibers(simt=tile, **options)


def case(label, kind, **changes):
    """A case with narrow heads."""
    dtype, precision = KINDS[kind]
    usual = {"Nq": 41, "Nk": 57, "B": 2, "Hq": 2, "Hk": 1, "d": 3, "d_v": 1}
    return inputs(Case(label, dtype=dtype, precision=precision, **usual | changes))


def run(x, gpu=None, out=None, lse=None, **options):
    """All results, by these kernels alone; backward from its own out and lse if none are given."""
    gpu = gpu or fibers(**options)
    mine = gpu.forward(x.q, x.k, x.v, out_dtype=wide(x), **x.options)
    out, lse = mine if out is None else (out, lse)
    got = *mine, *gpu.backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse, grad_dtype=wide(x),
                               **x.options)
    assert not any("wmma" in entry or "sm80" in entry for entry in gpu.barriers)
    return got


def check(label, kind, x, **options):
    want = on_cpu(x)
    assert_same(label, kind, run(x, None, *want[:2], **options), want, FACTOR[kind])


def in_turns(features):
    """(feature, kind): both kinds, or one where kernels are compiled for options."""
    plain = [f for f in features if not (f.mask or f.bias or f.softcap or f.alibi or f.sink)]
    rest = [f for f in features if f not in plain]
    return [*((f, kind) for f in plain for kind in KINDS),
            *((f, [*KINDS][i % 2]) for i, f in enumerate(rest))]


@pytest.mark.parametrize("feature, kind", in_turns(TABLE), ids=lambda x: getattr(x, "label", x))
def test_table(feature, kind):
    check(feature.label, kind, inputs(replace(small(feature, kind), d=3, d_v=1)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d, d_v", [(1, 1), (2, 7), (5, 4), (8, 8)])
def test_head_dims(kind, d, d_v):
    check("dims", kind, case("dims", kind, d=d, d_v=d_v, causal=True, data="mean1"))


def rows_of_tables():
    """(kernel, kind, row) of each row of the planner's tables."""
    names = {"float32": "tf32x3", "float64": "float64"}
    return [(table, names[dtype], row)
            for table in ("ROW_TILES", "DQ_TILES", "KEY_TILES", "DBIAS_TILES")
            for dtype, rows in getattr(cuda_simt, table).items() for row in rows]


@pytest.mark.parametrize("table, kind, row", rows_of_tables(), ids=str)
def test_each_row_of_the_planners_tables(table, kind, row):
    """Widest heads, and with options where it serves them."""
    rows = {"ROW_TILES": ("forward_simt", "normalise_simt"), "DQ_TILES": ("dq_simt",),
            "KEY_TILES": ("dkdv_simt",), "DBIAS_TILES": ("dbias_simt",)}[table]
    features = {} if row.plain else {"bias": "1hqk", "softcap": 9.0}
    x = case("tile", kind, Nq=141, Nk=170, B=1, d=row.columns // 2, d_v=row.columns // 2,
             causal=True, data="mean1", **features)
    gpu = fibers()
    gpu.kernels = tuple(
        replace(kernel, rows=dict.fromkeys(("float32", "float64"), (row,)))
        if kernel.entry in rows else kernel for kernel in gpu.kernels)
    want = on_cpu(x)
    assert_same("tile", kind, run(x, gpu, *want[:2]), want, FACTOR[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(kind, layout):
    """The same bits for any strides and alignment."""
    x = case("layout", kind, Hq=4, Hk=2)
    want = run(x)
    out, lse = want[:2]
    q, k, v, dout, out = (LAYOUTS[layout](a) for a in (x.q, x.k, x.v, x.dout, out))
    got = run(x._replace(q=q, k=k, v=v, dout=dout), None, out, lse)
    for name, a, b in zip(NAMES[:5], got, want, strict=False):
        assert_bit_equal(f"{layout} {name}", a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HIDDEN)
def test_hidden_values_do_not_matter(kind, how):
    x = case("hidden", kind, Nq=21, Nk=37, **HIDDEN[how])
    keys, rows = hidden_places(x, how)
    where = {"q": rows, "k": keys, "v": keys, "dout": rows}

    def call(value):
        """The results with `value` in everything that is hidden."""
        bad = x.q.dtype.type(value)
        return run(x._replace(**{name: np.where(w, bad, getattr(x, name))
                                 for name, w in where.items()}))

    want = call(0)
    for value in (np.nan, np.inf, float(np.finfo(np.float32).max)):
        for name, a, b in zip(NAMES, call(value), want, strict=True):
            if b is not None:
                assert_bit_equal(f"{value} {name}", a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (7, 3)}], ids=str)
def test_a_mask_is_as_good_as_a_range(kind, options):
    """The same bits: hidden keys add zeros, and chunks start at the same keys and rows. With a
    softcap, so that scores are scaled in both."""
    x = case("said-twice", kind, Nq=141, softcap=30.0, **options)
    want = run(x)
    if x.options.get("causal"):
        x.options["window"] = (None, 0)
        x.options.pop("causal")
    got = run(x._replace(options=without_window(x)), None, *want[:2])
    for name, a, b in zip(NAMES[:5], got, want, strict=False):
        assert_bit_equal(name, a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_reaches_only_those_that_see_it(kind):
    """Rows of queries before a key, causal; and keys behind a row of queries."""
    x = case("nan", kind, Nq=57, causal=True)
    x.k[..., 20, 1] = np.nan
    out, lse, dq, dk, dv, *_ = run(x)
    for a in (out, dq, lse[..., None]):
        assert np.isfinite(a[..., :20, :]).all() and np.isnan(a[..., 20:, :]).all()
    assert np.isnan(dk).all() and np.isnan(dv).all()        # all are seen by the last row
    x = case("nan", kind, Nq=57, causal=True)
    x.dout[..., 20, 0] = np.nan
    *_, dq, dk, dv, _, _ = run(x)
    assert np.isnan(dk[..., :21, :]).all() and np.isfinite(dk[..., 21:, :]).all()
    assert np.isnan(dv[..., :21, :]).all() and np.isfinite(dv[..., 21:, :]).all()
    assert np.isnan(dq[..., 20, :]).all() and np.isfinite(np.delete(dq, 20, axis=-2)).all()
    x = case("nan", kind, q_lens=(41, 20))      # nor the rows behind q_lens, which are in its tile
    x.v[..., 9, 0] = np.nan
    out, _, dq, *_ = run(x)
    assert (out[1, :, 20:] == 0).all() and (dq[1, :, 20:] == 0).all()
    assert np.isnan(out[0]).all() and np.isnan(out[1, :, :20]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_infinite_biases(kind):
    """-inf hides, in a whole row too; +inf and NaN spoil their row and nothing else of out."""
    x = case("infinite", kind, bias="hqk")
    bias = x.options["bias"]
    bias[:, 3, :] = -np.inf
    bias[:, 5, 7] = np.inf
    bias[:, 9, 50] = np.nan
    out, lse, dq, *_ = run(x)
    assert (out[..., 3, :] == 0).all() and (lse[..., 3] == -np.inf).all()
    assert (dq[..., 3, :] == 0).all()
    for row in (5, 9):
        assert np.isnan(out[..., row, :]).all() and not np.isfinite(lse[..., row]).any()
    assert np.isfinite(np.delete(out, (5, 9), axis=-2)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_infinite_values(kind):
    """An infinity that is seen stays one: what its rounding cut off would be NaN."""
    x = case("infinite", kind, d_v=2)
    x.v[..., 9, 0] = np.inf
    out, lse, *_ = run(x)
    assert (out[..., 0] == np.inf).all()
    assert np.isfinite(out[..., 1]).all() and np.isfinite(lse).all()


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0**70, 2.0**-70])
def test_scales_that_scores_are_multiplied_by_first(scale):
    x = case("scale", "tf32x3", scale=scale)
    check("scale", "tf32x3", x._replace(q=x.q / np.float32(2.0**70) if scale > 1 else x.q))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [
    {"Nk": 0}, {"Nq": 0}, {"B": 0}, {"Hq": 0, "Hk": 2}, {"Nq": 1, "Nk": 1}, {"kv_lens": (0,)},
], ids=str)
def test_nothing_to_see(sizes, kind):
    check("empty", kind, case("empty", kind, **{"Nq": 5, "Nk": 7, "B": 1, "Hk": 2} | sizes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axes", ["bhqk", "1hqk", "b1qk", "bhq1", "11qk", "1", "b11k"])
@pytest.mark.parametrize("options", [
    {"causal": True, "q_offset": -40}, {"window": (9, 4), "mask": "dense"},
    {"q_lens": (70, 13), "kv_lens": (20, 66), "Hq": 4, "softcap": 9.0},
], ids=str)
def test_dbias(kind, axes, options):
    """Written where each score has an element, in rows and keys that see nothing too; or summed."""
    x = case("dbias", kind, Nq=75, Nk=69, bias=axes, **options)
    want = on_cpu(x)
    gpu = fibers()
    assert_same("dbias", kind, run(x, gpu, *want[:2]), want, FACTOR[kind])
    assert ("dbias_simt" in gpu.barriers) == (axes != "bhqk")


@pytest.mark.parametrize("kind, bias", [
    ("tf32x3", "float16"), ("tf32x3", "bfloat16"), ("tf32x3", "float64"), ("float64", "float16"),
    ("float64", "float32")])
def test_bias_and_dbias_of_another_dtype(kind, bias):
    x = case("bias", kind, bias="bhqk", bias_dtype=bias)
    out, lse, *want = on_cpu(x)
    exact = run(x, None, out, lse)
    assert_same("bias", kind, exact[:5], (out, lse, *want[:3]), FACTOR[kind])
    got = fibers().backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse, **x.options)[3]
    assert_bit_equal("dbias", got, exact[5].astype(bias))


@pytest.mark.parametrize("options", [{}, {"bias": "1hqk"}, {"bias": "bhqk"}], ids=str)
def test_wrt_changes_no_bit_of_what_is_asked_for(options):
    x = case("wrt", "tf32x3", causal=True, **options)
    out, lse = cf.attention(x.q, x.k, x.v, return_lse=True, **x.options)

    def gradients(wrt):
        return fibers().backward(x.dout, x.q, x.k, x.v, out, lse, wrt=wrt, **x.options)

    want = gradients(None)
    for wrt in (("q",), ("k",), ("v",), ("k", "q"), *((("bias",),) if options else ())):
        for name, one, other in zip(("q", "k", "v", "bias"), gradients(wrt), want, strict=False):
            assert (one is None) == (name not in wrt)
            if one is not None:
                assert_bit_equal(f"d{name} of {wrt}", one, other)


def test_offsets_beyond_32_bits():
    """Rows 128 MiB apart, heads 5 GiB: only a few pages of that memory ever exist."""
    x = case("far", "tf32x3", Nq=21, Nk=37, B=1, Hk=2)
    want = run(x)
    q, k, v, dout = (far_apart(a) for a in (x.q, x.k, x.v, x.dout))
    got = run(x._replace(q=q, k=k, v=v, dout=dout), None, *want[:2])
    for name, a, b in zip(NAMES[:5], got, want, strict=False):
        assert_bit_equal(name, a, b)


# Barriers left out.

def results(kind, **options):
    """What the kernels write, or None if one did not come to its end; the names of their waits."""
    x = case("waits", kind, Nq=75, Nk=69, bias="1hq1", kv_lens=(69, 30))
    x.options["bias"][:, :, 5] = -1e9           # an lse that cannot hold ln l
    gpu = fibers(grid=1, **options)
    out, lse = cf.attention(x.q, x.k, x.v, return_lse=True, **x.options)
    try:
        got = run(x, gpu, out, lse)
    except KernelError:
        return None, ()
    return [a.tobytes() for a in got if a is not None], {
        (entry, name) for entry in gpu.barriers for name in gpu.barriers[entry]}


@pytest.mark.parametrize("kind", KINDS)
def test_every_barrier_is_needed(kind):
    want, left = results(kind)
    assert {name for _, name in left} == {"tile_read", "tile_loaded", "some_large", "rows_read",
                                          "rows_loaded", "sums_written", "sums_read"}
    names = {name for _, name in left}
    for name in sorted(names):
        assert any(results(kind, seed=seed, skip=name)[0] != want for seed in range(1, 9)), name

"""The kernels without tensor cores on fibers, against the CPU path."""

from dataclasses import replace

import numpy as np
import pytest
from answers import answers_to, floors, judge
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
    on_fibers,
    small,
    wide,
    without_window,
)

import cupy_flash as cf
from cupy_flash.plan import cuda_simt, tuned
from cupy_flash.plan.cuda_simt import Tile
from cupy_flash.plan.kernel import SPLIT_KEYS

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler on Linux")

KINDS = {"tf32x3": ("float32", "tf32x3"), "float64": ("float64", None)}
NAMES = ("out", "lse", "dq", "dk", "dv", "dbias", "dsink")
# Two rows or keys of each thread of one warp, several chunks in a tile.
SMALL = Tile(2, 1, 32, 8, 2, 16, 2, "of a test")
LOWEST = float(np.finfo(np.float32).min)
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
def test_one_key_has_a_weight_of_one_however_large_its_score(kind):
    """Scores are those of forward to the bit, whichever kernel makes them."""
    for size in (1, 30, 133120.0, 133120.0 * 2**17):
        for sign in (1, -1):
            x = case("one", kind, Nq=57, window=(0, 0), d=8, d_v=2)
            q, k = (np.full_like(a, value) for a, value in ((x.q, sign * size), (x.k, size)))
            y = x._replace(q=q, k=k, dlse=np.zeros_like(x.dlse))
            out, lse, dq, dk, dv, *_ = run(y)
            v = np.broadcast_to(x.v, out.shape)
            assert out.tobytes() == v.tobytes(), (size, sign)
            np.testing.assert_allclose(lse, sign * 8**0.5 * size**2, rtol=2e-7)
            assert_bit_equal("dv", dv[:, 0], x.dout[:, 0] + x.dout[:, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_large_scores_of_either_sign_in_later_keys(kind):
    """References that move in every chunk, with empty and usual rows beside them."""
    rng = np.random.default_rng(3)
    signs = np.sign(rng.standard_normal((1, 1, 70, 8)))
    growth = np.geomspace(0.1, 4000, 90)[:, None]
    x = case("large", kind, Nq=70, Nk=90, B=1, Hq=1, d=8, d_v=2, causal=True)
    signs[..., ::5, :] = 0                  # scores of 0
    signs[..., 1::5, :] *= 2.0**-6
    for direction in (1, -1):
        k = (np.round(rng.standard_normal((1, 1, 90, 8)) * 4) / 4 * growth)[:, :, ::direction]
        y = x._replace(q=signs.astype(x.q.dtype), k=k.astype(x.k.dtype),
                       options=x.options | {"q_offset": -9})
        got, want = run(y), on_cpu(y)
        assert_same("large", kind, got[:2], want[:2], 4)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_far_below_the_largest_have_no_weight(kind):
    """Before the largest and behind it: alpha and P are 0, not what the exponent's bits wrap to."""
    below = [2000, 1e5, 2.0**32, 2.0**44, 4.6e15, 5e15, 6e15, 7e15, 9.3e15, 1e16, 1e19, 1e30]
    below += [1e100, 1e300] if kind == "float64" else []
    dtype, precision = KINDS[kind]
    for falling in (True, False):
        scores = -np.array([0, *below] if falling else [*below[::-1], 0])
        q, k, v = (np.zeros((1, 1, n, 8), dtype) for n in (20, len(scores), len(scores)))
        q[..., 0], k[..., 0], v[...] = 1, scores, 2.0**30
        v[:, :, 0 if falling else -1] = 1
        out, lse = fibers().forward(q, k, v, scale=1.0, precision=precision)
        assert (out == 1).all() and (lse == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axes", ["hqk", "11qk"])
def test_rows_beside_the_lowest_bias(kind, axes):
    """All keys of a row: their mean, an lse without room for ln l, and P of 1 / n all the same."""
    x = case("lowest", kind, Nq=40, Nk=50, bias=axes, bias_dtype=KINDS[kind][0])
    x.options["bias"][..., [0, 17, 39], :] = LOWEST
    x.options["bias"][..., 17, 30:] = -np.inf
    got = run(x)
    assert (got[1][..., 0] == LOWEST).all()
    want, _ = answers_to(x)
    assert_same(axes, kind, got, want, factor=2 * FACTOR[kind])


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


def split(monkeypatch):
    """Splits of a few keys and rows."""
    monkeypatch.setattr(cuda_simt, "PIECE", 64)
    monkeypatch.setattr(cuda_simt, "SPLIT_KEYS", 32)
    return tuned(split_keys=32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window": (90, 70), "q_lens": (5, 4), "kv_lens": (90, 41)},
    {"bias": "bhqk", "causal": True, "q_offset": -60}, {"q_lens": (0, 5)},
    {"bias": "1h1k", "softcap": 9.0, "mask": "dense"}, {"Hq": 4, "sink": (1.0, -2.0)},
], ids=str)
def test_splits_of_keys_and_of_rows(kind, options, monkeypatch):
    """Few rows or keys, which many blocks share: merged, and added up in order."""
    for Nq, Nk in ((250, 90), (5, 333)):
        x = case("splits", kind, Nq=Nq, Nk=Nk, **options)
        if "window" in options and Nq == 250:
            x.options["q_lens"][:] = 230, 77
        want = on_cpu(x)
        gpu = fibers(sms=64)
        with split(monkeypatch):
            got = run(x, gpu, *want[:2])
        assert {"combine", "dq_sum", "backward_sum"} <= {*gpu.barriers} or Nq == 5
        assert_same("splits", kind, got, want, 2 * FACTOR[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_neither_order_nor_grid_changes_a_bit(kind, monkeypatch):
    x = case("order", kind, Nq=150, Nk=170, Hq=4, Hk=2, causal=True)
    for sms in (1, 64):
        with split(monkeypatch):
            want = run(x, sms=sms)
            for seed, grid in ((2, 1), (3, 2), (4, 1000), (5, 7)):
                got = run(x, None, *want[:2], sms=sms, seed=seed, grid=grid)
                for name, a, b in zip(NAMES[:5], got, want, strict=False):
                    assert_bit_equal(f"seed {seed}, grid {grid}, {name}", a, b)


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


# As exact as the rule asks.

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d, d_v", [(3, 1), (8, 8)])
@pytest.mark.parametrize("changes", [
    {"Nq": 203, "Nk": 513}, {"Nq": 203, "Nk": 513, "data": "mean1"},
    {"Nq": 113, "Nk": 203, "data": "late", "causal": True}, {"Nq": 203, "data": "spread"},
    {"Nq": 203, "data": "spread-values", "window": (17, 5)}, {"Nq": 40, "Nk": 4001},
    {"Nq": 113, "Nk": 203, "softcap": 2.0, "alibi": "h", "bias": "hqk", "mask": "dense"},
], ids=str)
def test_the_rule_of_exactness(kind, d, d_v, changes):
    x = case("exact", kind, B=1, d=d, d_v=d_v, **changes)
    got = dict(zip(NAMES, run(x), strict=True))
    judge("exact", got, *answers_to(x), floors(x))


@pytest.mark.parametrize("kind, keys", [("tf32x3", 2**17), ("float64", 2**15)])
def test_long_sums(kind, keys):
    """Of one sign, so that what is lost shows, or all alike, so that all roundings go one way."""
    rng = np.random.default_rng(1)
    dtype = KINDS[kind][0]
    for alike in (False, True):
        x = case("long", kind, Nq=3, Nk=keys, B=1, Hq=1, d=2, d_v=1)
        k = np.full_like(x.k, 0.3) if alike else 0.3 * x.k
        v = np.full_like(x.v, 1.1) if alike else rng.uniform(1, 2, x.v.shape).astype(dtype)
        out, lse = fibers().forward(x.q, k, v)
        want, plain = answers_to(x._replace(k=k, v=v))
        judge("long", {"out": out, "lse": lse}, want, plain)


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


def test_the_pieces_of_a_split_are_whole_tiles():
    for rows in cuda_simt.KEY_TILES.values():
        for row in rows:
            assert cuda_simt.PIECE % row.walked == 0 and SPLIT_KEYS % row.walked == 0

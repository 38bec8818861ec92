"""The fused backward kernel on fibers, against the CPU path."""

import numpy as np
import pytest
from cases import FEATURES, KINDS, SINK, Case, in_turns, inputs
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
)

from cupy_flash.plan.cuda_backward_sm80 import TILES
from cupy_flash.plan.cuda_forward_sm80 import Row

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler on Linux")

NAMES = ("dq", "dk", "dv")
# Br, Bc, warps, roles, parts, stages: small tiles in which every way through the kernel occurs.
SMALL = {
    "bfloat16": (32, 32, 4, 2, 1, 2),
    "float16": (32, 32, 4, 1, 2, 2),
    "tf32": (32, 32, 2, 1, 1, 2),
    "tf32x3": (16, 32, 4, 2, 1, 1),
    "float64": (32, 32, 4, 1, 2, 1),
}
# Waits and barriers of the kernel in all its forms without features.
WAITS = {"keys_opened", "keys_copied", "rows_copied", "first_rows_ready", "rows_ready", "P_shared",
         "P_written", "P_read", "dS_written", "Q_read", "rows_read", "tiles_read",
         "gradient_staged", "memory_free"}
# Everything at once.
FEATURED = {"mask": "dense", "bias": "1hqk", "softcap": 20.0, "alibi": "h"}
TABLE = [x for x in (*FEATURES, *SINK) if not x.label[1:2].isdigit() and x.bias_dtype != "float64"]


def run(x, tile, out, lse, **options):
    """dq, dk, dv of the fused kernel in the accumulators' dtype."""
    return run_all(x, tile, out, lse, **options)[:3]


def run_all(x, tile, out, lse, **options):
    """The same and dbias, or None."""
    gpu = Fibers(fused=tile, **options)
    got = gpu.backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse, grad_dtype=wide(x),
                       **x.options)
    assert not x.k.size or "backward_sm80" in gpu.barriers
    return got


def small_tile(x, kind):
    """Of `SMALL`; roles serve no features."""
    Br, Bc, warps, roles, parts, stages = SMALL[kind]
    if {"mask", "bias", "softcap", "alibi_slopes"} & {*x.options}:
        return Br, Bc, warps // roles, 1, parts, stages
    return SMALL[kind]


def check(label, kind, x, tile, **options):
    out, lse, *want = on_cpu(x)
    assert_same(label, kind, (out, lse, *run_all(x, tile, out, lse, **options)), (out, lse, *want))


@pytest.mark.parametrize("feature, kind", in_turns(TABLE), ids=lambda x: getattr(x, "label", x))
def test_table(feature, kind):
    x = inputs(small(feature, kind))
    check(feature.label, kind, x, small_tile(x, kind))


@pytest.mark.parametrize("features", [{}, FEATURED], ids=["plain", "features"])
@pytest.mark.parametrize("kind, tile", [(kind, tile) for kind in TILES for tile in TILES[kind]],
                         ids=str)
def test_each_row_of_the_planners_table(kind, tile, features):
    if features and tile.roles > 1:
        pytest.skip("serves no problem with features")
    dtype, precision = KINDS["float16" if kind == "16-bit" else kind]
    d, d_v = (tile.d, tile.d - 24) if tile.d < 256 else (200, 256)
    x = inputs(Case("tile", Nq=141, Nk=170, Hq=1, Hk=1, d=d, d_v=d_v, causal=True, dtype=dtype,
                    precision=precision, data="mean1", **features))
    form = *tile[1:7], tile.split_late
    # Of the general kernels around it, wide heads need more warps than the usual two.
    check("tile", "float16" if kind == "16-bit" else kind, x, form, warps=2 if tile.d < 192 else 8)


@pytest.mark.parametrize("kind, tile, d, d_v", [
    ("bfloat16", (64, 64, 8, 2, 2, 1), 150, 70),
    ("float16", (32, 64, 4, 1, 2, 1), 33, 120),
    ("bfloat16", (64, 32, 4, 1, 4, 2), 64, 7),
    ("tf32", (32, 64, 8, 2, 1, 2), 72, 96),
    ("float64", (64, 32, 8, 1, 4, 1), 70, 20),
    ("float64", (32, 16, 4, 2, 2, 1), 70, 20),
    ("float64", (16, 32, 8, 2, 2, 1), 20, 100),
    ("float64", (16, 16, 4, 2, 2, 1), 33, 30),
    ("float64", (16, 32, 8, 1, 4, 1), 70, 130),
    ("tf32", (32, 32, 4, 2, 2, 1), 70, 33),
    ("tf32", (32, 32, 4, 1, 2, 2), 64, 40),
    ("tf32", (16, 16, 4, 2, 2, 1), 33, 70),
    ("tf32x3", (32, 32, 4, 2, 2, 1), 70, 33),
    ("tf32x3", (32, 32, 4, 1, 2, 1), 64, 64),
    ("tf32x3", (16, 16, 4, 2, 2, 1, True), 33, 70),
    ("tf32x3", (32, 64, 4, 1, 1, 2, True), 64, 64),
    ("float16", (16, 32, 4, 2, 2, 2), 33, 70),
], ids=str)
def test_tiles(kind, tile, d, d_v):
    """Head dims of any width, grouped heads, more parts than the planner uses."""
    dtype, precision = KINDS[kind]
    x = inputs(Case("tile", Nq=61, Nk=90, Hq=6, Hk=2, d=d, d_v=d_v, causal=True, dtype=dtype,
                    precision=precision))
    check("tile", kind, x, tile)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(kind, layout):
    """The same bits for any strides and alignment; rows of whole 16-byte loads, and of none."""
    dtype, precision = KINDS[kind]
    for d, d_v in ((24, 40), (21, 35)):
        x = inputs(Case("layout", Nq=45, Nk=37, B=2, Hq=4, Hk=2, d=d, d_v=d_v, dtype=dtype,
                        precision=precision))
        out, lse = Fibers().forward(x.q, x.k, x.v, **x.options)
        want = run(x, SMALL[kind], out, lse)
        q, k, v, dout, out = (LAYOUTS[layout](a) for a in (x.q, x.k, x.v, x.dout, out))
        got = run(x._replace(q=q, k=k, v=v, dout=dout), SMALL[kind], out, lse)
        for name, a, b in zip(NAMES, got, want, strict=True):
            assert_bit_equal(f"{layout} {name}", a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [20, 64])
def test_scores_are_those_of_forward(kind, d):
    """Whichever kernels make them: P of a row's only key is 1 to the last bit, and dv is dout."""
    dtype, precision = KINDS[kind]
    x = inputs(Case("one-key", Nq=40, Nk=40, Hq=1, Hk=1, d=d, d_v=16, dtype=dtype,
                    precision=precision, window=(0, 0)))
    x = x._replace(q=3 * x.q)
    general = {"Br": 32, "Bc": 32, "warps": 4}
    rounding = {"tf32": 2.0**-11, "tf32x3": 2.0**-21}.get(kind, 0.0)
    for forward in (Fibers(registers=Row(32, 16, 2, 256, "of a test")), Fibers(**general)):
        out, lse = forward.forward(x.q, x.k, x.v, **x.options)
        for backward in (Fibers(fused=SMALL[kind]), Fibers(**general)):
            dv = backward.backward(x.dout, x.q, x.k, x.v, out, lse, **x.options)[2]
            difference = dv.astype(np.float64) - x.dout.astype(np.float64)
            assert np.abs(difference).max() <= rounding * np.abs(x.dout.astype(np.float64)).max()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_wide_gradients_come_in(dtype):
    """dout and out in float32 that hold 16-bit numbers are those numbers."""
    x = inputs(Case("wide", Nq=21, Nk=37, Hq=2, Hk=1, d=24, d_v=40, dtype=dtype))
    out, lse = Fibers().forward(x.q, x.k, x.v)
    want = run(x, SMALL[dtype], out, lse)
    got = run(x._replace(dout=x.dout.astype(np.float32)), SMALL[dtype], out.astype(np.float32), lse)
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert_bit_equal(name, a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_results_in_the_dtype_of_the_inputs(kind):
    x = inputs(small(Case("narrow", Hq=2, Hk=1), kind))
    out, lse = Fibers().forward(x.q, x.k, x.v, **x.options)
    want = run(x, SMALL[kind], out, lse)
    got = Fibers(fused=SMALL[kind]).backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse,
                                             **x.options)[:3]
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert_bit_equal(name, a, b.astype(x.q.dtype))


# What is hidden must not matter, whatever it holds.

def check_hidden(run, how, dtype, precision=None, d=20):
    """The gradients of run(inputs, out, lse) are the same, whatever hidden keys and rows hold."""
    x = inputs(Case("hidden", Nq=41, Nk=37, B=2, Hq=2, Hk=1, d=d, d_v=36, dtype=dtype,
                    precision=precision, **HIDDEN[how]))
    keys, rows = hidden_places(x, how)
    where = {"q": rows, "k": keys, "v": keys, "dout": rows}

    def call(value):
        """The gradients with `value` in everything that is hidden."""
        with np.errstate(over="ignore"):
            bad = np.array(value).astype(x.q.dtype)
        y = x._replace(**{name: np.where(w, bad, getattr(x, name)) for name, w in where.items()})
        return run(y, *Fibers().forward(y.q, y.k, y.v, **x.options))

    want = call(0)
    for value in (np.nan, np.inf, float(np.finfo(np.float32).max)):
        for name, a, b in zip(NAMES, call(value), want, strict=True):
            assert_bit_equal(f"{value} {name}", a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HIDDEN)
def test_hidden_values_do_not_matter(kind, how):
    check_hidden(lambda x, out, lse: run(x, small_tile(x, kind), out, lse), how, *KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_reaches_no_tile_of_rows_that_do_not_see_it(kind):
    """Causal: a NaN in a key leaves the rows before its tile alone, and shows in those after it."""
    x = inputs(small(Case("nan", causal=True, Hq=1, Hk=1, Nq=500, Nk=500), kind))
    x.k[..., 70, 3] = np.nan
    out, lse = Fibers().forward(x.q, x.k, x.v, **x.options)
    dq, dk, dv = run(x, SMALL[kind], out, lse)
    assert np.isfinite(dq[..., :64, :]).all() and np.isnan(dq[..., 70:, :]).all()
    assert np.isnan(dk[..., 70, :]).all() and np.isnan(dv[..., 70, :]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_see_nothing_beside_nan(kind):
    """A NaN that others of their tile see leaves them at zero."""
    x = inputs(small(Case("beside", causal=True, q_offset=-50, Hq=2, Hk=1, Nq=100, Nk=100), kind))
    x.k[..., 0, :] = x.v[..., 0, :] = np.nan
    out, lse = Fibers().forward(x.q, x.k, x.v, **x.options)
    dq = run(x, SMALL[kind], out, lse)[0]
    assert (dq[..., :10, :] == 0).all() and np.isnan(dq[..., 10:, :]).all()


@pytest.mark.parametrize("kind, size", [
    (kind, size) for kind in KINDS for size in (500.0, 60000.0, 133120.0 * 2**17)
    if kind != "float16" or size <= 60000])
def test_a_key_that_is_all_there_is(kind, size):
    """Its probability is 1 to the last bit, however large the score."""
    x = inputs(small(Case("dominant", Hq=2, Hk=1, Nq=200, Nk=200), kind))
    x.q[...] = 1
    x.k[..., 9, :] = size
    out, lse = Fibers().forward(x.q, x.k, x.v, **x.options)
    dv = run(x, SMALL[kind], out, lse)[2]
    others = np.arange(x.k.shape[-2]) != 9
    assert (dv[..., others, :] == 0).all()
    want = x.dout.astype(np.float64).sum((1, 2))
    assert np.abs(dv[:, 0, 9] - want).max() <= 1e-3 * np.abs(want).max()


@pytest.mark.parametrize("kind", ["bfloat16", "float64"])
@pytest.mark.parametrize("sizes", [
    {"Nk": 0}, {"Nq": 0}, {"B": 0}, {"Hq": 0, "Hk": 2}, {"Nq": 1, "Nk": 1}, {"kv_lens": (0,)},
], ids=str)
def test_nothing_to_see(sizes, kind):
    case = Case("empty", **{"Nq": 5, "Nk": 7, "Hq": 2, "d": 20, "d_v": 36, "dtype": kind} | sizes)
    check("empty", kind, inputs(case), SMALL[kind])


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float64"])
def test_neither_order_nor_grid_changes_a_bit(kind):
    """But dq with the grid, which is the order of its additions."""
    x = inputs(small(Case("order", B=2, Hq=4, Hk=2, causal=True), kind))
    out, lse = Fibers().forward(x.q, x.k, x.v, **x.options)
    want = run(x, SMALL[kind], out, lse)
    for seed, grid in ((2, 3), (3, 2), (4, 1000), (5, 7)):
        got = run(x, SMALL[kind], out, lse, seed=seed, grid=grid)
        for name, a, b in zip(NAMES, got, want, strict=True):
            if name != "dq" or grid == 3:
                assert_bit_equal(f"seed {seed}, grid {grid}, {name}", a, b)
        assert_same("grid", kind, (out, lse, *got), (out, lse, *want))


def test_offsets_beyond_32_bits():
    """Rows 128 MiB apart, heads 5 GiB: only a few pages of that memory ever exist."""
    x = inputs(Case("far", Nq=40, Nk=37, Hq=2, Hk=2, d=24, d_v=40, dtype="bfloat16"))
    out, lse = Fibers().forward(x.q, x.k, x.v)
    want = run(x, SMALL["bfloat16"], out, lse)
    q, k, v, dout, out = (far_apart(a) for a in (x.q, x.k, x.v, x.dout, out))
    got = run(x._replace(q=q, k=k, v=v, dout=dout), SMALL["bfloat16"], out, lse)
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert_bit_equal(name, a, b)


# Barriers and waits left out. TF32 rounds what has arrived, so that the first wait shows.

FAULTY = {
    "bfloat16": (32, 32, 4, 2, 1, 2), "float16": (32, 32, 4, 2, 2, 1), "tf32": (32, 32, 2, 1, 1, 1),
    "float64": (32, 32, 4, 1, 2, 1),
}


def results(kind, **options):
    """What the kernel writes, or None if it did not come to its end; the names of its waits."""
    dtype, precision = KINDS[kind]
    x = inputs(Case("waits", Nq=75, Nk=69, B=2, Hq=2, Hk=1, d=20, d_v=20, dtype=dtype,
                    precision=precision, causal=True, kv_lens=(69, 30)))
    x = x._replace(options=x.options | {"q_offset": 5})
    gpu = Fibers(fused=FAULTY[kind], grid=1, fill=1, **options)
    out, lse = Fibers().forward(x.q, x.k, x.v, **x.options)
    try:
        got = gpu.backward(x.dout, x.q, x.k, x.v, out, lse, **x.options)[:3]
    except KernelError:
        return None, ()
    return [a.tobytes() for a in got], gpu.barriers["backward_sm80"]


def test_every_barrier_and_wait_is_needed():
    left = set()
    for kind in FAULTY:
        left |= set(results(kind)[1])
    assert left == WAITS
    for kind in FAULTY:
        want, names = results(kind)
        for name in sorted(left & set(names)):
            if any(results(kind, seed=seed, skip=name)[0] != want for seed in range(1, 13)):
                left.discard(name)
    assert left == set()

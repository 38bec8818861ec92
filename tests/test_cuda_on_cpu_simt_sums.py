"""The kernels without tensor cores on fibers: how exact they are, and sums in parts."""

import numpy as np
import pytest
from answers import answers_to, floors, judge
from cuda_on_cpu.harness import COMPILER
from numerics import assert_bit_equal
from test_cuda_on_cpu import assert_same, on_cpu
from test_cuda_on_cpu_simt import FACTOR, KINDS, NAMES, case, fibers, run

from cupy_flash.plan import cuda_simt, tuned
from cupy_flash.plan.kernel import SPLIT_KEYS

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler on Linux")

LOWEST = float(np.finfo(np.float32).min)


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


def test_the_pieces_of_a_split_are_whole_tiles():
    for rows in cuda_simt.KEY_TILES.values():
        for row in rows:
            assert cuda_simt.PIECE % row.walked == 0 and SPLIT_KEYS % row.walked == 0


@pytest.mark.parametrize("kind", KINDS)
def test_one_key_has_a_weight_of_one_however_large_its_score(kind):
    """Scores are those of forward to the bit, whichever kernel makes them."""
    for size in (1, 30, 133120.0, 133120.0 * 2**17):
        for sign in (1, -1):
            x = case("one", kind, Nq=57, window=(0, 0), d=8, d_v=2)
            q, k = (np.full_like(a, value) for a, value in ((x.q, sign * size), (x.k, size)))
            y = x._replace(q=q, k=k, dlse=np.zeros_like(x.dlse))
            out, lse, _, _, dv, *_ = run(y)
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

"""The forward kernel for sm_90a on fibers: all that it computes, and that every wait is needed."""

import numpy as np
import pytest
from answers import answers_to, floors, judge
from cases import DTYPES, FEATURES, Case, inputs
from cuda_on_cpu.harness import COMPILER, Fibers, KernelError

from cupy_flash.plan.cuda_forward_sm90 import Row

BFLOAT16 = DTYPES["bfloat16"]
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler on Linux")

TWO, THREE = Row(128, 32, 256, 256, "of a test"), Row(192, 16, 256, 256, "of a test")
TABLE = [x for x in FEATURES if x.Nk < 1000]
# All that keeps one warp or a copy from running ahead of another, with the row, keys and head dim
# of a case that needs it: `q_empty` where there is room for one tile of Q only. `work_empty` is not
# among them: whoever waits for a place of Q does not come that far; nor are the turns of the
# consumers: they change when products run, not what comes out.
WAITS = {**dict.fromkeys(("q_full", "k_full", "v_full", "k_empty", "v_empty", "work_full",
                          "panels_read", "last_panels_read"), (TWO, 140, 32)),
         "q_empty": (Row(128, 64, 256, 256, "of a test"), 160, 256)}


def padded(x):
    """An array whose rows take whole 16 bytes, with NaN behind them."""
    wide = np.full((*x.shape[:-1], -(-x.shape[-1] // 8) * 8), np.nan).astype(x.dtype)
    wide[..., :x.shape[-1]] = x
    return wide[..., :x.shape[-1]]


def check(x, row, **options):
    x = x._replace(q=padded(x.q), k=padded(x.k), v=padded(x.v))
    fibers = Fibers(hopper=row, **options)
    out, lse = fibers.forward(x.q, x.k, x.v, **x.options)
    assert "forward_sm90" in fibers.barriers
    want, plain = answers_to(x)
    judge("hopper", {"out": out, "lse": lse}, want, plain, floors(x))
    return out, lse


@pytest.mark.parametrize("row, dtype", [(TWO, "bfloat16"), (THREE, "float16")],
                         ids=["two", "three"])
@pytest.mark.parametrize("feature", TABLE, ids=lambda feature: feature.label)
def test_table(feature, row, dtype):
    check(inputs(Case(**{**feature.__dict__, "dtype": dtype})), row, grid=2, sms=2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_in_float32_are_those_before_rounding(dtype):
    x = inputs(Case("wide", Nq=150, Nk=100, d=40, d_v=24, B=2, dtype=dtype, causal=True,
                    q_lens=(150, 60)))
    out, lse = check(x, TWO)
    fibers = Fibers(hopper=TWO)
    wide, wide_lse = fibers.forward(x.q, x.k, x.v, out_dtype=np.float32, **x.options)
    for whole in (out, wide):               # rows of 46 or 92 bytes are stored element by element
        part, _ = Fibers(hopper=TWO).forward(x.q, x.k, x.v[..., :-1], out_dtype=whole.dtype,
                                             **x.options)
        assert part.tobytes() == whole[..., :-1].tobytes()
    assert "forward_sm90" in fibers.barriers and wide.dtype == np.float32
    assert wide.astype(out.dtype).tobytes() == out.tobytes()
    assert wide_lse.tobytes() == lse.tobytes()


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_threads_changes_nothing(seed):
    x = inputs(Case("order", Nq=300, Nk=150, B=2, Hq=4, Hk=2, d=32, dtype="bfloat16", causal=True,
                    kv_lens=(150, 90), q_lens=(300, 200)))
    got = check(x, TWO, seed=seed, grid=2)
    for a, b in zip(got, check(x, TWO, seed=9, grid=5), strict=True):
        assert a.tobytes() == b.tobytes()


def test_keys_that_no_row_of_a_tile_sees():
    """They may hold anything: before a window, behind the diagonal, behind a length, and wherever
    bias or mask hide them."""
    x = inputs(Case("hidden", Nq=140, Nk=200, Hq=1, Hk=1, d=32, dtype="bfloat16"))
    holes = [0, 1, 17, *range(60, 99), 143, 199]
    mask = np.random.default_rng(5).random((140, 200)) < 0.6
    mask[:, holes] = False
    for options, hidden in (({"causal": True, "q_offset": 0}, slice(140, None)),
                            ({"window": (20, 5), "q_offset": 50}, [*range(30), *range(195, 200)]),
                            ({"kv_lens": np.array([77], np.int32)}, slice(77, None)),
                            ({"mask": mask}, holes), ({"mask": mask[3]}, ~mask[3]),
                            ({"bias": np.where(mask, 0.5, -np.inf).astype(np.float32)}, holes)):
        want = check(x._replace(options=options), TWO)
        k, v = x.k.copy(), x.v.copy()
        k[..., hidden, :] = v[..., hidden, :] = np.nan
        got = Fibers(hopper=TWO).forward(x.q, k, v, **options)
        for a, b in zip(got, want, strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("wait", WAITS)
def test_every_wait_is_needed(wait):
    row, Nk, d = WAITS[wait]
    x = inputs(Case("waits", Nq=260, Nk=Nk, B=2, Hq=2, Hk=2, d=d, dtype="bfloat16"))
    want = check(x, row, grid=1)

    def differs(seed):
        """Whether the kernel fails, or returns something else, without the wait."""
        try:
            got = Fibers(hopper=row, grid=1, seed=seed, skip=wait).forward(x.q, x.k, x.v)
        except KernelError:
            return True
        return any(a.tobytes() != b.tobytes() for a, b in zip(got, want, strict=True))

    assert any(differs(seed) for seed in range(1, 9))


def test_one_key_has_a_weight_of_one_however_large_its_score():
    """Rounding errors of scores of 1e11 are in the thousands; the score of the only key is its own
    reference all the same. The largest case is one of a public report."""
    for size in (1, 30, 300, 4000, 133120):
        for sign in (1, -1):
            q = np.full((1, 1, 140, 64), sign * size, BFLOAT16)
            k = np.full((1, 1, 1, 64), size, BFLOAT16)
            v = np.linspace(-3, 3, 64).astype(BFLOAT16).reshape(1, 1, 1, 64)
            out, lse = Fibers(hopper=TWO).forward(q, k, v)
            assert out.tobytes() == np.broadcast_to(v, out.shape).tobytes(), (size, sign)
            exact = sign * 8.0 * float(BFLOAT16.type(size)) ** 2
            np.testing.assert_allclose(lse, exact, rtol=2e-7)


def test_large_scores_of_either_sign_in_later_keys():
    """References beyond the usual ones, which move, with empty and usual rows beside them."""
    rng = np.random.default_rng(3)
    q = np.sign(rng.standard_normal((1, 1, 140, 64)))
    k = rng.standard_normal((1, 1, 150, 64)) * np.geomspace(0.1, 4000, 150)[:, None]
    v = rng.standard_normal((1, 1, 150, 64))
    q[..., ::5, :] = 0                       # scores of 0
    q[..., 1::5, :] *= 1e-2
    x = inputs(Case("large", Nq=140, Nk=150, Hq=1, Hk=1, d=64, dtype="bfloat16"))
    for direction in (1, -1):
        given = (a.astype(BFLOAT16) for a in (q, k[:, :, ::direction], v))
        y = x._replace(**dict(zip("qkv", given, strict=True)))
        for options in ({}, {"causal": True, "q_offset": -20}):
            check(y._replace(options=options), TWO)


def test_a_row_whose_reference_moves_late_changes_no_other_row():
    """The whole tile does such a step again; the bits of the rows beside it stay what they are."""
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((1, 1, 300, 32)).astype(BFLOAT16) for _ in range(3))
    wild = q.copy()
    wild[..., 5, :] = 40 * k[..., 20, :]     # a score of 220, far behind the first tile of keys
    calm, other = (Fibers(hopper=TWO).forward(x, k, v) for x in (q, wild))
    for a, b in zip(calm, other, strict=True):
        same = (a.view(np.uint16) == b.view(np.uint16)).reshape(300, -1).all(1)
        assert not same[5] and same[:5].all() and same[6:].all()
    check(inputs(Case("wild", Nq=300, Nk=300, Hq=1, Hk=1, d=32,
                      dtype="bfloat16"))._replace(q=wild, k=k, v=v), TWO)

"""The backward kernel for sm_90a on fibers: all that it computes, and that every wait is needed."""

import numpy as np
import pytest
from cases import FEATURES, Case, inputs
from cuda_on_cpu.harness import COMPILER, Fibers, KernelError
from numerics import assert_bit_equal
from test_cuda_on_cpu import assert_same, on_cpu, small, wide
from test_cuda_on_cpu_fused import NAMES, check_hidden
from test_hopper_on_cpu import TWO, padded

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler on Linux")

TABLE = [x for x in FEATURES if not (x.label[1:2].isdigit() or x.mask or x.bias or x.softcap
                                     or x.alibi or 64 % (x.Hq // x.Hk))]
# What keeps a warp or a copy from running so far ahead of another that results change. That the
# turns of the consumers are needed, test_cuda_on_cpu_races.py shows.
WAITS = ["keys_full", "q_full", "dout_full", "q_empty", "dout_empty"]


def run(x, out, lse, **options):
    """dq, dk, dv in float32."""
    x = x._replace(**{name: padded(getattr(x, name)) for name in ("q", "k", "v", "dout")})
    gpu = Fibers(hopper=TWO, **options)
    got = gpu.backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse, grad_dtype=wide(x),
                       **x.options)[:3]
    name = "backward_sm90" + "_wide" * (max(x.q.shape[-1], x.v.shape[-1]) > 128)
    assert not x.k.size or not x.q.size or name in gpu.barriers
    return got


def check(label, x, **options):
    kind = x.q.dtype.name
    out, lse, *want = on_cpu(x)
    got = run(x, out, lse, **options)
    assert_same(label, kind, (out, lse, *got), (out, lse, *want[:3]))
    return got


@pytest.mark.parametrize("dtype, d, d_v", [("bfloat16", 20, 50), ("float16", 72, 128),
                                           ("bfloat16", 130, 60), ("float16", 240, 256)])
@pytest.mark.parametrize("feature", TABLE, ids=lambda feature: feature.label)
def test_table(feature, dtype, d, d_v):
    case = small(feature, dtype)
    check(feature.label, inputs(Case(**{**case.__dict__, "d": d, "d_v": d_v})))


@pytest.mark.parametrize("d", [64, 128, 192])
@pytest.mark.parametrize("group", [1, 2, 16])
def test_groups_and_whole_tiles(d, group):
    """Heads of a group side by side in tiles of rows, of which some see all keys of a block."""
    x = inputs(Case("groups", Nq=400 // group, Nk=300, B=2, Hq=2 * group, Hk=2, d=d, d_v=d,
                    dtype="bfloat16", causal=True, q_lens=(400 // group, 9), kv_lens=(290, 300)))
    check("groups", x)


@pytest.mark.parametrize("how", ["lens", "lens-causal", "window"])
@pytest.mark.parametrize("d", [20, 80, 200])
def test_hidden_values_do_not_matter(how, d):
    check_hidden(run, how, "bfloat16", d=d)


def test_rows_that_see_nothing_beside_nan():
    """A NaN that others of their tile see leaves them at zero."""
    x = inputs(Case("beside", causal=True, q_offset=-50, Hq=2, Hk=1, Nq=100, Nk=100, d=40, d_v=40,
                    dtype="float16"))
    x.k[..., 0, :] = x.v[..., 0, :] = np.nan
    out, lse = Fibers().forward(x.q, x.k, x.v, **x.options)
    dq = run(x, out, lse)[0]
    assert (dq[..., :10, :] == 0).all() and np.isnan(dq[..., 50:, :]).all()


@pytest.mark.parametrize("size", [500.0, 60000.0])
def test_a_key_that_is_all_there_is(size):
    """Its probability is 1 to the last bit, however large the score."""
    x = inputs(Case("dominant", Hq=2, Hk=1, Nq=200, Nk=200, d=64, d_v=64, dtype="bfloat16"))
    x.q[...] = 1
    x.k[..., 9, :] = size
    out, lse = Fibers().forward(x.q, x.k, x.v, **x.options)
    dv = run(x, out, lse)[2]
    others = np.arange(x.k.shape[-2]) != 9
    assert (dv[..., others, :] == 0).all()
    want = x.dout.astype(np.float64).sum((1, 2))
    assert np.abs(dv[:, 0, 9] - want).max() <= 1e-3 * np.abs(want).max()


@pytest.mark.parametrize("sizes", [
    {"Nk": 0}, {"Nq": 0}, {"B": 0}, {"Hq": 0, "Hk": 2}, {"Nq": 1, "Nk": 1}, {"kv_lens": (0,)},
], ids=str)
def test_nothing_to_see(sizes):
    case = Case("empty", **{"Nq": 5, "Nk": 7, "Hq": 2, "d": 24, "d_v": 40,
                            "dtype": "bfloat16"} | sizes)
    x = inputs(case)
    out, lse, *want = on_cpu(x)
    gpu = Fibers(hopper=TWO)
    got = gpu.backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse, grad_dtype=wide(x),
                       **x.options)[:3]
    assert_same("empty", "bfloat16", (out, lse, *got), (out, lse, *want[:3]))


def test_results_in_the_dtype_of_the_inputs_and_of_any_strides():
    x = inputs(Case("narrow", Nq=150, Nk=140, Hq=2, Hk=1, d=40, d_v=24, dtype="bfloat16"))
    out, lse = Fibers().forward(x.q, x.k, x.v)
    want = run(x, out, lse)
    got = Fibers(hopper=TWO).backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse)[:3]
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert_bit_equal(name, a, b.astype(x.q.dtype))


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_threads_changes_nothing(seed):
    x = inputs(Case("order", Nq=300, Nk=250, B=2, Hq=4, Hk=2, d=32, d_v=32, dtype="bfloat16",
                    causal=True, kv_lens=(250, 90), q_lens=(300, 200)))
    out, lse = Fibers().forward(x.q, x.k, x.v, **x.options)
    want, got = (run(x, out, lse, seed=n) for n in (9, seed))
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert_bit_equal(name, a, b)


@pytest.mark.parametrize("wait", WAITS)
def test_every_wait_is_needed(wait):
    x = inputs(Case("waits", Nq=300, Nk=140, Hq=1, Hk=1, d=128, d_v=128, dtype="bfloat16",
                    q_lens=(290,)))
    out, lse = Fibers().forward(x.q, x.k, x.v, **x.options)
    x.q[..., 290:, :] = x.dout[..., 290:, :] = np.nan
    want = run(x, out, lse)

    def differs(seed):
        """Whether the kernel fails, or returns something else, without the wait."""
        try:
            got = run(x, out, lse, seed=seed, skip=wait)
        except KernelError:
            return True
        return any(a.tobytes() != b.tobytes() for a, b in zip(got, want, strict=True))

    assert any(differs(seed) for seed in range(1, 9))

"""Faults that users of attention kernels met, as small inputs with the answers worked out by hand.

This file: log-sum-exp and merging, grouped heads, softcap, head dimensions, determinism, bias.
"""

import subprocess
import sys

import numpy as np
import pytest
from answers import answers_to, floors, judge
from cases import DTYPES, Case, inputs
from numerics import CANARY_BYTE, Fence, assert_bit_equal
from test_backward import assert_same_gradients, gradients
from test_forward import attend

import cupy_flash as cf

ALL = tuple(DTYPES)


def call(backend, q, k, v, **options):
    """`cf.attention` on plain arrays; results as NumPy."""
    q, k, v = (backend.asarray(x) for x in (q, k, v))
    out, lse = cf.attention(q, k, v, return_lse=True, **backend.move_options(options))
    return backend.asnumpy(out), backend.asnumpy(lse)


def call_backward(backend, dout, q, k, v, **options):
    """Forward and backward on plain arrays; gradients as NumPy, float64."""
    dout, q, k, v = (backend.asarray(x) for x in (dout, q, k, v))
    options = backend.move_options(options)
    out, lse = cf.attention(q, k, v, return_lse=True, **options)
    g = cf.attention_backward(dout, q, k, v, out, lse, **options)
    return {name: None if x is None else backend.asnumpy(x).astype(np.float64)
            for name, x in g._asdict().items()}


# C1: the logarithm is the natural one, in float32, for every head.


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("q_shape, k_shape", [
    ((2, 4, 5, 16), (2, 4, 7, 16)),
    ((2, 4, 5, 16), (2, 1, 7, 16)),
    ((3, 1, 8), (3, 300, 8)),
    ((8, 1, 32), (2, 300, 32)),
    ((1, 64, 1, 16), (1, 1, 2500, 16)),
])
def test_lse_of_equal_scores(backend, dtype, q_shape, k_shape):
    k = np.random.default_rng(0).standard_normal(k_shape).astype(DTYPES[dtype])
    out, lse = call(backend, np.zeros(q_shape, DTYPES[dtype]), k, np.ones_like(k))
    assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)
    np.testing.assert_allclose(lse, np.log(k_shape[-2]), rtol=2e-7)
    np.testing.assert_allclose(out.astype(np.float64), 1, rtol=0 if out.itemsize == 2 else 5e-7)


def test_lse_is_complete(backend):
    """Scale, softcap, bias and slopes are in it: one key, where lse is its score."""
    one = np.ones((1, 1))
    options = {"scale": 3.0, "softcap": 2.0, "bias": np.float64([[0.25]]),
               "alibi_slopes": np.float64([0.5]), "q_offset": 4}
    _, lse = call(backend, one, one, one, **options)
    np.testing.assert_allclose(lse, 2 * np.tanh(1.5) + 0.25 - 0.5 * 4, atol=2e-15)


# C3: partial results in float32 lose nothing; weights that sum to one do.


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_many_chunks_in_float32_are_as_good_as_one_pass(backend, dtype):
    """4096 keys in 64 chunks in the report; 1024 keys in 32 chunks of 32 here."""
    x = inputs(Case("chunks", Nq=64, Nk=1024, d=64, Hq=1, Hk=1, dtype=dtype))
    y = backend.move(x)
    total = total_lse = None
    for start in range(0, 1024, 32):
        chunk = slice(start, start + 32)
        out, lse = cf.attention(y.q, y.k[:, :, chunk], y.v[:, :, chunk], return_lse=True,
                                out_dtype=np.float32)
        total, total_lse = (out, lse) if total is None else cf.merge([total, out], [total_lse, lse])
    want, plain = answers_to(x)
    judge(dtype, {"out": backend.asnumpy(total), "lse": backend.asnumpy(total_lse)}, want, plain)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("data", ["normal", "late", "scales"])
def test_weights_sum_to_one(backend, dtype, data):
    x = inputs(Case("ones", Nq=100, Nk=1000, d=32, d_v=5, Hq=1, Hk=1, dtype=dtype, data=data))
    x = x._replace(v=np.ones_like(x.v))
    out, _ = attend(backend, x)
    unit = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 1e-6, "float64": 4e-15}[dtype]
    np.testing.assert_allclose(out.astype(np.float64), 1, rtol=0, atol=unit)


# D1: query head h reads key head h // (Hq // Hk).


@pytest.mark.parametrize("dtype", ALL)
def test_grouped_heads(backend, dtype):
    q, k = np.zeros((4, 3, 4), DTYPES[dtype]), np.zeros((2, 3, 4), DTYPES[dtype])
    v = np.broadcast_to(np.arange(2)[:, None, None], (2, 3, 4)).astype(DTYPES[dtype])
    out, _ = call(backend, q, k, v)
    assert (out == np.float64([0, 0, 1, 1])[:, None, None]).all()
    g = call_backward(backend, np.ones_like(q), q, k, v)
    np.testing.assert_allclose(g["dv"], 2, rtol=2e-3 if out.itemsize == 2 else 1e-6)


@pytest.mark.parametrize("Hq, Hk", [(4, 1), (6, 2), (7, 1), (10, 2), (12, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_groups_of_any_size(backend, Hq, Hk, dtype):
    x = inputs(Case("groups", Nq=33, Nk=70, d=20, Hq=Hq, Hk=Hk, causal=True, dtype=dtype))
    out, lse = attend(backend, x)
    judge(f"{Hq}:{Hk}", {"out": out, "lse": lse, **gradients(backend, x)}, *answers_to(x))


# D2: the cap comes before mask and bias, and its derivative is 1 - tanh^2.


def cap_example(q=2.0):
    """One query, two keys with opposite scores, one column."""
    return np.float64([[q]]), np.float64([[1], [-1]]), np.float64([[1], [0]])


def test_softcap_and_its_gradients(backend):
    q, k, v = cap_example()
    options = {"scale": 1.0, "softcap": 1.5}
    out, lse = call(backend, q, k, v, **options)
    np.testing.assert_allclose(out[0, 0], 0.9315142, atol=5e-8)
    np.testing.assert_allclose(lse[0], 1.3760363, atol=5e-8)
    g = call_backward(backend, np.ones((1, 1)), q, k, v, **options)
    np.testing.assert_allclose(g["dq"], [[0.0310037]], atol=5e-8)
    np.testing.assert_allclose(g["dk"], [[0.0310037], [-0.0310037]], atol=5e-8)
    np.testing.assert_allclose(g["dv"], [[0.9315142], [0.0684858]], atol=5e-8)


def test_a_masked_key_has_no_weight_however_small_the_cap(backend):
    out, lse = call(backend, *cap_example(), scale=1.0, softcap=1.0,
                    mask=np.array([[True, False]]))
    assert out[0, 0] == 1
    np.testing.assert_allclose(lse[0], np.tanh(2), rtol=1e-15)


def test_bias_is_added_to_the_capped_score(backend):
    _, lse = call(backend, *cap_example(), scale=1.0, softcap=1.0,
                  bias=np.float64([[7.0, -np.inf]]))
    np.testing.assert_allclose(lse[0], np.tanh(2) + 7, rtol=1e-15)


@pytest.mark.parametrize("dtype", ALL)
def test_a_saturated_cap_has_no_gradient(backend, dtype):
    q, k, v = (x.astype(DTYPES[dtype]) for x in cap_example(2e4))
    g = call_backward(backend, np.ones_like(q), q, k, v, scale=1.0, softcap=1.5)
    assert (g["dq"] == 0).all()
    assert all(np.isfinite(g[name]).all() for name in ("dq", "dk", "dv"))


def test_no_cap_is_none_or_zero(backend):
    want, want_lse = call(backend, *cap_example())
    for off in (None, 0, 0.0, -0.0):
        out, lse = call(backend, *cap_example(), softcap=off)
        assert_bit_equal(str(off), out, want)
        assert_bit_equal(str(off), lse, want_lse)


@pytest.mark.parametrize("dtype", ALL)
def test_softcap_where_weights_are_tiny(backend, dtype):
    """Weights below 1e-20: a tanh rebuilt from log P would fail."""
    x = inputs(Case("tiny", Hq=4, Hk=2, d=16, causal=True, window=(60, 60), softcap=40.0,
                    dtype=dtype, data="scales"))
    judge(dtype, gradients(backend, x), *answers_to(x), floors(x))


# D3: head dimensions and lengths off every grid.


@pytest.mark.parametrize("d", [1, 7, 8, 16, 20, 40, 46, 72, 80, 96, 104, 120, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_head_dimensions_and_lengths(backend, d, dtype):
    """All gradients into buffers whose rows and arrays have canaries behind them."""
    for Nq, Nk in ((1, 64), (2, 15), (17, 1), (33, 31), (65, 129), (63, 16)):
        case = Case("grid", Nq=Nq, Nk=Nk, d=d, Hq=3, Hk=1, dtype=dtype, causal=True)
        x = inputs(case)
        shapes = {"out": x.dout.shape, "dq": x.q.shape, "dk": x.k.shape, "dv": x.v.shape}
        fences = {name: Fence(shape, x.q.dtype, CANARY_BYTE, backend.xp)
                  for name, shape in shapes.items()}
        y = backend.move(x)
        buffers = {name: fence.array for name, fence in fences.items()}
        out, lse = cf.attention(y.q, y.k, y.v, causal=True, return_lse=True, out=buffers.pop("out"))
        g = cf.attention_backward(y.dout, y.q, y.k, y.v, out, lse, dlse=y.dlse, causal=True,
                                  **buffers)
        results = {"out": out, "lse": lse, **g._asdict()}
        judge(case.id, {n: None if a is None else backend.asnumpy(a) for n, a in results.items()},
              *answers_to(x), floors(x))
        for name, fence in fences.items():
            fence.assert_untouched(f"{case.id} {name}")


@pytest.mark.parametrize("d", [1, 7, 46, 72, 104])
def test_zero_columns_change_nothing_with_the_scale_of_the_true_head_dimension(backend, d):
    x = inputs(Case("padded", Nq=40, Nk=70, d=d, causal=True))
    out, lse = attend(backend, x)
    pad = [(0, 0)] * 3 + [(0, -d % 16)]
    y = x._replace(q=np.pad(x.q, pad), k=np.pad(x.k, pad), options={"causal": True,
                                                                    "scale": d**-0.5})
    padded, padded_lse = attend(backend, y)
    np.testing.assert_allclose(padded, out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(padded_lse, lse, rtol=1e-6, atol=1e-6)


# D6: no race, no stale accumulator.


def test_backward_again_and_again(backend):
    """B = 300, Nq = 2048, Nk = 128, 50 runs in the report; every run against the reference."""
    x = inputs(Case("races", B=6, Hq=1, Hk=1, Nq=300, Nk=128, d=32, dtype="float16"))
    x = x._replace(q=x.q * np.float16(3), k=x.k * np.float16(3), v=x.v * np.float16(3),
                   dout=np.ones_like(x.dout))
    answer = answers_to(x)
    for _ in range(10):
        judge("races", gradients(backend, x), *answer)


DIGEST = """
import hashlib, numpy as np, cupy_flash as cf
rng = np.random.default_rng(0)
q, k, v, dout = rng.standard_normal((4, 6, 200, 32), dtype=np.float32)
out, lse = cf.attention(q, k, v, causal=True, return_lse=True)
g = cf.attention_backward(dout, q, k, v, out, lse, causal=True, deterministic=True)
print(hashlib.sha256(b"".join(x.tobytes() for x in (out, lse, *g[:3]))).hexdigest())
"""


def test_two_processes_agree_to_the_bit():
    digests = {subprocess.run([sys.executable, "-c", DIGEST], check=True, capture_output=True,
                              text=True).stdout for _ in range(2)}
    assert len(digests) == 1 and len(digests.pop()) == 65


def test_stale_memory_does_not_show(backend):
    """Calls of other shapes, full of NaN, in between."""
    case = Case("stale", Nq=100, Nk=130, B=2, Hq=4, Hk=2, d=24, bias="hqk", causal=True)
    want = gradients(backend, inputs(case), deterministic=True)
    other = inputs(Case("other", Nq=150, Nk=190, B=2, Hq=4, Hk=4, d=40, bias="hqk"))
    nan = other._replace(**{n: np.full_like(getattr(other, n), np.nan) for n in ("q", "k", "v")})
    for _ in range(3):
        gradients(backend, nan)
        assert_same_gradients("stale", gradients(backend, inputs(case), deterministic=True), want)


# E1: the gradient of the bias is summed over what was broadcast.


@pytest.mark.parametrize("shape, value", [
    ((1, 1, 1, 2), 7.5), ((1, 1, 5, 2), 1.5), ((2, 1, 1, 2), 3.75), ((1, 3, 1, 2), 2.5),
    ((5, 2), 1.5), ((3, 5, 2), 0.5), ((2, 3, 5, 1), 0.0), ((2, 3, 5, 2), 0.25),
    ((2,), 7.5), ((1,), 0.0), ((5, 1), 0.0), ((1, 2), 7.5),
])
@pytest.mark.parametrize("dtype", ALL)
def test_bias_gradient_over_broadcast_axes(backend, shape, value, dtype):
    T = DTYPES[dtype]
    q, k, v = np.zeros((2, 3, 5, 8), T), np.zeros((2, 3, 2, 8), T), np.zeros((2, 3, 2, 1), T)
    v[:, :, 0] = 1
    bias = backend.asarray(np.zeros(shape, T))
    g = call_backward(backend, np.ones((2, 3, 5, 1), T), q, k, v, bias=bias)
    want = np.broadcast_to(np.float64([value, -value]), (*shape[:-1], 2))[..., : shape[-1]]
    assert g["dbias"].shape == shape
    np.testing.assert_allclose(g["dbias"], want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bias", ["bhqk", "1hqk", "b1qk", "bh1k", "bhq1", "11qk", "b111", "1h11",
                                  "111k", "1111", "hqk", "1qk", "qk", "1k", "q1", "k", "1"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_bias_gradient_with_every_broadcast(backend, bias, dtype):
    x = inputs(Case("dbias", Nq=40, Nk=110, B=2, Hq=4, Hk=2, d=16, bias=bias, causal=True,
                    mask="dense", softcap=4.0, dtype=dtype))
    g = gradients(backend, x)
    few = floors(x) if x.options["bias"].size == 1 else None
    judge(bias, g, *answers_to(x), few)
    assert g["dbias"].shape == x.options["bias"].shape
    if bias == "bhqk":
        visible = x.options["mask"] & (np.arange(110) <= np.arange(40)[:, None] + 70)
        assert (g["dbias"][~visible] == 0).all()


# E3: any pitch of the bias.


@pytest.mark.parametrize("Nk", [43, 77])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_bias_rows_of_any_pitch(backend, Nk, dtype):
    x = inputs(Case("pitch", Nq=50, Nk=Nk, d=16, bias="hqk", dtype=dtype))
    bias = x.options["bias"]
    want = {**dict(zip(("out", "lse"), attend(backend, x), strict=True)),
            **gradients(backend, x, deterministic=True)}
    judge(dtype, want, *answers_to(x))
    wide = np.full((2, 50, 80), np.nan, bias.dtype)
    wide[..., :Nk] = bias
    shifted = np.full((2, 50, 81), np.nan, bias.dtype)
    shifted[..., 1 : Nk + 1] = bias
    flipped = np.ascontiguousarray(bias[:, ::-1, ::-1])
    for view in (wide[..., :Nk], shifted[..., 1 : Nk + 1], flipped[:, ::-1, ::-1],
                 np.ascontiguousarray(bias.swapaxes(1, 2)).swapaxes(1, 2),
                 np.broadcast_to(bias[None], (1, 2, 50, Nk))):
        x.options["bias"] = view
        got = {**dict(zip(("out", "lse"), attend(backend, x), strict=True)),
               **gradients(backend, x, deterministic=True)}
        got["dbias"] = got["dbias"].reshape(bias.shape)
        assert_same_gradients(str(view.strides), got, want)

"""Backward: the whole table against the reference, and what its options promise."""

import numpy as np
import pytest
from answers import answers, answers_to, floors, judge
from cases import CASES, DTYPES, KINDS, Case, inputs
from numerics import assert_bit_equal
from test_forward import few

import cupy_flash as cf

GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink")
LENGTHS = (1, 2, 3, 5, 6, 7, 15, 16, 17, 47, 48, 49, 63, 64, 65, 95, 96, 97, 128, 129, 191, 193)


def gradients(backend, x, *, use_dlse=True, wide_out=False, **more):
    """Forward and backward on the backend; a dict of NumPy arrays.

    `wide_out` keeps `out` in the accumulator dtype in between. A gradient that is to be judged in
    float32 units needs that: delta = rowsum(dO * O) of a 16-bit O is off by units of 16 bits.
    """
    y = backend.move(x)
    out_dtype = np.float64 if x.q.dtype == np.float64 else np.float32
    out, lse = cf.attention(y.q, y.k, y.v, return_lse=True, **y.options,
                            out_dtype=out_dtype if wide_out else None)
    g = cf.attention_backward(y.dout, y.q, y.k, y.v, out, lse, dlse=y.dlse if use_dlse else None,
                              **y.options, **more)
    return {name: None if array is None else backend.asnumpy(array)
            for name, array in g._asdict().items()}


def assert_same_gradients(name, got, want):
    """Every gradient bit for bit."""
    assert got.keys() == want.keys()
    for field in got:
        if want[field] is None:
            assert got[field] is None, f"{name} {field}"
        else:
            assert_bit_equal(f"{name} {field}", got[field], want[field])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_table(backend, case):
    x = inputs(case)
    g = gradients(backend, x, wide_out=case.bias_dtype is not None or case.sink is not None)
    assert tuple(g) == GRADIENTS
    assert g["dq"].dtype == g["dk"].dtype == g["dv"].dtype == x.q.dtype
    if case.bias is not None:
        assert g["dbias"].dtype == x.options["bias"].dtype
    if case.sink is not None:
        assert g["dsink"].dtype == x.options["sink"].dtype
    judge(case.id, g, *answers(case), floors(x) if few(case) else None)


@pytest.mark.parametrize("N", LENGTHS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_lengths(backend, N, dtype):
    for other in {1, 17, 100, N}:
        for Nq, Nk in {(N, other), (other, N)}:
            case = Case("length", Nq=Nq, Nk=Nk, d=16, Hq=2, Hk=1, dtype=dtype, bias="hqk",
                        causal=bool((N + other) % 2))
            x = inputs(case)
            judge(case.id, gradients(backend, x, wide_out=True), *answers_to(x), floors(x))


@pytest.mark.parametrize("d", range(1, 257, 15))
def test_head_dimensions(backend, d):
    for d_v, dtype in ((d, "bfloat16"), (257 - d, "float32")):
        case = Case("head-dim", Nq=20, Nk=33, d=d, d_v=d_v, dtype=dtype)
        judge(case.id, gradients(backend, inputs(case)), *answers(case))


def test_without_dlse(backend):
    case = Case("no-dlse", B=2, Hq=4, Hk=2, d=32, causal=True, bias="1hqk")
    x = inputs(case)
    zero = x._replace(dlse=np.zeros_like(x.dlse))
    g = gradients(backend, x, use_dlse=False, deterministic=True)
    judge(case.id, g, *answers_to(zero))
    assert_same_gradients(case.id, gradients(backend, zero, deterministic=True), g)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [7, 64, 160])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_one_key_hand_their_gradient_on(backend, kind, d, deterministic):
    """Backward's scores are forward's, in whichever kernels: P of the only key is 1 and dv dout."""
    dtype, precision = KINDS[kind]
    x = inputs(Case("one-key", Nq=70, Nk=70, Hq=2, Hk=2, d=d, d_v=48, dtype=dtype,
                    precision=precision, window=(0, 0)))
    x = x._replace(q=3 * x.q)
    dv = gradients(backend, x, deterministic=deterministic)["dv"].astype(np.float64)
    dout = x.dout.astype(np.float64)
    # What the product of 1 and dout rounds off.
    rounding = {"tf32": 2.0**-11, "tf32x3": 2.0**-21}.get(kind, 0.0)
    assert np.abs(dv - dout).max() <= rounding * np.abs(dout).max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_deterministic_means_the_same_bits(backend, dtype):
    case = Case("deterministic", Nq=300, Nk=300, B=2, Hq=6, Hk=2, d=32, causal=True, dtype=dtype,
                bias="11qk")
    first = gradients(backend, inputs(case), deterministic=True)
    judge(case.id, first, *answers_to(inputs(case)))
    for _ in range(3):
        assert_same_gradients(case.id, gradients(backend, inputs(case), deterministic=True), first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grad_dtype(backend, dtype):
    case = Case("grad-dtype", Hq=4, Hk=2, causal=True, dtype=dtype, bias="1hqk", data="mean1",
                sink=(1.0, -2.0))
    x = inputs(case)
    accumulator = np.dtype(np.float64 if dtype == "float64" else np.float32)
    narrow, same, wide = (
        gradients(backend, x, deterministic=True, wide_out=True, grad_dtype=grad_dtype)
        for grad_dtype in (None, x.q.dtype, accumulator)
    )
    assert {array.dtype for array in wide.values() if array is not None} == {accumulator}
    assert_same_gradients(case.id, same, narrow)
    judge(case.id, wide, *answers(case))
    dsink = wide.pop("dsink")       # has the accumulators' dtype, whatever the others have
    assert_bit_equal("dsink", narrow.pop("dsink"), dsink)
    assert_same_gradients(
        case.id, {name: array.astype(x.q.dtype) for name, array in wide.items()}, narrow)


def test_grad_dtype_holds_for_dbias_too(backend):
    case = Case("dbias-dtype", dtype="bfloat16", bias="1hqk", bias_dtype="float32")
    for grad_dtype in (None, DTYPES["bfloat16"], np.dtype(np.float32)):
        g = gradients(backend, inputs(case), wide_out=True, grad_dtype=grad_dtype)
        assert g["dbias"].dtype == (grad_dtype or np.float32)
        judge(case.id, g, *answers(case))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_out_and_dout_in_the_accumulator_dtype(backend, dtype):
    case = Case("wide-out", Hq=4, Hk=2, causal=True, dtype=dtype, data="mean1")
    x = inputs(case)
    wide = x._replace(dout=x.dout.astype(np.float32))
    for name, y, wide_out in (("out", x, True), ("dout", wide, False), ("both", wide, True)):
        judge(f"{case.id} {name}", gradients(backend, y, wide_out=wide_out), *answers(case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_gradient_in_no_gradient_out(backend, dtype):
    case = Case("zero", Hq=4, Hk=2, causal=True, softcap=3.0, dtype=dtype, bias="1hqk",
                sink=(1.0, -3.0))
    x = inputs(case)
    g = gradients(backend, x._replace(dout=np.zeros_like(x.dout)), use_dlse=False)
    for name, array in g.items():
        assert (array == 0).all(), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_only_read(backend, dtype):
    case = Case("read-only", causal=True, mask="dense", bias="11qk", alibi="h", kv_lens=(150,),
                dtype=dtype)
    x = inputs(case)
    for array in (*x[:-1], *x.options.values()):
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    judge(case.id, gradients(backend, x), *answers(case))


def test_gradients_of_a_bias_given_as_a_broadcast_view(backend):
    """A stride-0 view has the full shape, so its gradient has it too: nothing is summed."""
    case = Case("bias-view", B=2, Hq=4, Hk=2, d=32, bias="bhqk")
    x = inputs(case)
    rng = np.random.default_rng(1)
    row = rng.standard_normal((1, 1, 1, case.Nk)).astype(np.float32)
    x.options["bias"] = np.broadcast_to(row, (2, 4, case.Nq, case.Nk))
    g = gradients(backend, x)
    judge(case.id, g, *answers_to(x))
    x.options["bias"] = row
    summed = gradients(backend, x)
    judge(case.id, summed, *answers_to(x))
    assert g["dbias"].shape == (2, 4, case.Nq, case.Nk)
    assert summed["dbias"].shape == (1, 1, 1, case.Nk)


def test_backward_takes_an_out_and_lse_of_more_keys(backend):
    """Per-chunk backward with the global out and lse adds up to the whole: ring attention."""
    case = Case("chunks", B=2, Hq=4, Hk=2, d=32, dtype="float64")
    x = inputs(case)
    y = backend.move(x)
    out, lse = cf.attention(y.q, y.k, y.v, return_lse=True)
    total, dk, dv = 0, [], []
    for part in (slice(0, 60), slice(60, 61), slice(61, None)):
        g = cf.attention_backward(y.dout, y.q, y.k[:, :, part], y.v[:, :, part], out, lse,
                                  dlse=y.dlse)
        total, dk, dv = total + backend.asnumpy(g.dq), [*dk, g.dk], [*dv, g.dv]
    g = {"dq": total, "dk": np.concatenate([backend.asnumpy(x) for x in dk], axis=2),
         "dv": np.concatenate([backend.asnumpy(x) for x in dv], axis=2)}
    judge(case.id, g, *answers(case))

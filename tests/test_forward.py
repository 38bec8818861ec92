"""Forward: the whole table against the reference, every length, every head dimension."""

import numpy as np
import pytest
from answers import answers, answers_to, floors, judge
from cases import CASES, DTYPES, Case, inputs
from numerics import assert_bit_equal

import cupy_flash as cf

# Every length up to one vector of lanes and one more, and both sides of each tile edge.
LENGTHS = (*range(1, 18), 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193)


def few(case):
    """Whether the case has too few entries for the largest error to mean much."""
    return case.Nq * case.Nk < 2000


def attend(backend, x, **more):
    """`cf.attention` on the backend, the results as NumPy arrays."""
    y = backend.move(x)
    out, lse = cf.attention(y.q, y.k, y.v, return_lse=True, **y.options, **more)
    return backend.asnumpy(out), backend.asnumpy(lse)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_table(backend, case):
    x = inputs(case)
    out, lse = attend(backend, x)
    assert out.dtype == x.q.dtype
    assert lse.dtype == (np.float64 if case.dtype == "float64" else np.float32)
    judge(case.id, {"out": out, "lse": lse}, *answers(case), floors(x) if few(case) else None)


@pytest.mark.parametrize("N", LENGTHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_length(backend, N, dtype):
    for other in {1, 5, 17, 96, 100, N}:
        for Nq, Nk in {(N, other), (other, N)}:
            case = Case("length", Nq=Nq, Nk=Nk, d=16, Hq=2, Hk=1, dtype=dtype,
                        causal=bool((N + other) % 2))
            x = inputs(case)
            out, lse = attend(backend, x)
            judge(case.id, {"out": out, "lse": lse}, *answers_to(x), floors(x))


@pytest.mark.parametrize("d", range(1, 257, 5))
def test_every_kind_of_head_dimension(backend, d):
    for d_v, dtype in ((d, "float32"), (257 - d, "float16")):
        case = Case("head-dim", Nq=20, Nk=33, d=d, d_v=d_v, dtype=dtype)
        out, lse = attend(backend, inputs(case))
        judge(case.id, {"out": out, "lse": lse}, *answers_to(inputs(case)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_alone_and_a_second_run_have_the_same_bits(backend, dtype):
    case = Case("again", B=2, Hq=4, Hk=2, d=32, causal=True, dtype=dtype)
    y = backend.move(inputs(case))
    out, lse = attend(backend, inputs(case))
    again, lse_again = attend(backend, inputs(case))
    alone = cf.attention(y.q, y.k, y.v, **y.options)
    assert_bit_equal(case.id, again, out)
    assert_bit_equal(case.id, lse_again, lse)
    assert_bit_equal(case.id, backend.asnumpy(alone), out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_dtype(backend, dtype):
    case = Case("out-dtype", Hq=2, Hk=1, causal=True, dtype=dtype, data="mean1")
    accumulator = np.float64 if dtype == "float64" else np.float32
    x = inputs(case)
    out, lse = attend(backend, x)
    wide, wide_lse = attend(backend, x, out_dtype=accumulator)
    same, _ = attend(backend, x, out_dtype=x.q.dtype)
    assert wide.dtype == accumulator
    # The wide result is judged in its own, finer units, and is what the narrow one is rounded from.
    judge(case.id, {"out": wide, "lse": wide_lse}, *answers(case))
    assert_bit_equal(case.id, wide.astype(x.q.dtype), out)
    assert_bit_equal(case.id, same, out)
    assert_bit_equal(case.id, wide_lse, lse)


def test_tf32_is_coarser_and_tf32x3_is_not(backend):
    """`precision` does what it says: without rounded operands the error is a thousandth."""
    errors = {}
    for precision in (None, "tf32x3", "tf32"):
        case = Case("precision", Hq=1, Hk=1, data="mean1", precision=precision)
        out, _ = attend(backend, inputs(case))
        errors[precision] = np.abs(out - answers(case)[0].out).max()
    assert errors["tf32"] > 1e-5
    assert max(errors[None], errors["tf32x3"]) < 2e-6


def test_inputs_are_only_read(backend):
    case = Case("read-only", causal=True, mask="dense", bias="11qk", alibi="h", kv_lens=(150,),
                q_lens=(100,))
    x = inputs(case)
    for array in (*x[:-1], *x.options.values()):
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    out, lse = attend(backend, x)
    judge(case.id, {"out": out, "lse": lse}, *answers(case))


def test_the_default_scale_is_that_of_the_true_head_dimension(backend):
    x = inputs(Case("scale", Nq=20, Nk=33, d=46))
    out, _ = attend(backend, x)
    x.options["scale"] = 46 ** -0.5
    explicit, _ = attend(backend, x)
    assert_bit_equal("scale", explicit, out)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_keys_far_below_the_largest_have_no_weight(backend, dtype):
    """Beyond the integers that a float64 counts, too, in the order in which the largest score
    comes first and in the other."""
    below = np.geomspace(2000, 1e30 if dtype == "float32" else 1e300, 300)
    for order in (1, -1):
        q, k, v = (np.zeros((n, 16), dtype) for n in (20, 301, 301))
        q[:, 0], k[1:, 0], v[...] = 1, -below, 2.0**30
        v[0] = 1
        q, k, v = (backend.asarray(x) for x in (q, k[::order], v[::order]))
        out, lse = cf.attention(q, k, v, scale=1.0, return_lse=True)
        assert (backend.asnumpy(out) == 1).all() and (backend.asnumpy(lse) == 0).all()

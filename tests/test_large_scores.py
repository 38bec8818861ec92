"""Where numbers are large: the place of the scale, and an lse that cannot hold ln n."""

import ml_dtypes
import numpy as np
import pytest
from answers import answers_to, judge
from cases import DTYPES, Case, inputs
from conftest import CPU
from test_backward import gradients
from test_forward import attend

import cupy_flash as cf
from cupy_flash import device

LOWEST = {name: float(ml_dtypes.finfo(dtype).min) for name, dtype in DTYPES.items()}


def judge_all(name, backend, x, but=()):
    """Every result but some; `out` is kept in the accumulators' type for the gradients."""
    got = dict(zip(("out", "lse"), attend(backend, x), strict=True))
    got |= gradients(backend, x, wide_out=True)
    judge(name, {field: a for field, a in got.items() if field not in but}, *answers_to(x))


@pytest.mark.parametrize("rows", [2, 30])
@pytest.mark.parametrize("columns, scale, softcap", [(16, 2.0**10, None), (1, 2.0**9, 16.0)])
@pytest.mark.parametrize("dtype, power", [("float32", 120), ("float64", 1016)])
def test_the_scale_multiplies_the_product(backend, dtype, power, columns, scale, softcap, rows):
    """Exact scores around 256 (8 under the cap), where scale * q is beyond the largest number."""
    x = inputs(Case("scale", Nq=rows, Nk=50, d=16, dtype=dtype, softcap=softcap, scale=scale))
    kind = x.q.dtype.type
    large, small = np.zeros((50, 16), kind), np.zeros((50, 16), kind)
    large[:, :columns], small[:, :columns] = 2.0**power, 2.0 ** (-power - 6)
    spread = (1 + np.arange(-25, 25) % 17 / 128).astype(kind)[:, None]
    x = x._replace(dout=x.dout * kind(2.0**-20), dlse=x.dlse * kind(2.0**-20))
    # The gradient of the large operand is subnormal in float32, and a GPU flushes it to zero.
    flushes = backend.name == "cuda" and dtype == "float32"
    judge_all("large q", backend, x._replace(q=large[:rows] + 0 * x.q, k=small * spread + 0 * x.k),
              but=("dq",) if flushes else ())
    judge_all("large k", backend, x._replace(q=small[:rows] + 0 * x.q, k=large * spread + 0 * x.k),
              but=("dk",) if flushes else ())


def with_lowest_row(case, value):
    """Inputs in which the bias of one row of each head is `value` for every key."""
    x = inputs(case)
    x.options["bias"][..., 3, :] = value
    return x


@pytest.mark.parametrize("bias_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_that_hides_every_key_by_a_large_number(backend, dtype, bias_dtype):
    """Forward is the mean of v, and P = 1 / n in backward."""
    if bias_dtype == "float64" and dtype != "float64":
        bias_dtype = "float32"          # the largest float64 is an infinity there
    for group in (1, 2):
        case = Case("lowest", Nq=40, Nk=120, B=2, Hq=2 * group, Hk=2, d=16, dtype=dtype,
                    bias="bhqk", bias_dtype=bias_dtype)
        judge_all(case.id, backend, with_lowest_row(case, LOWEST[bias_dtype]))


@pytest.mark.parametrize("value", [-1e4, -1e5, -1e9, -1e15, -1e30, -1e300, 1e6, 1e20])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_other_large_numbers(backend, dtype, value):
    if dtype == "float64" or abs(value) < 1e38:
        case = Case("large", Nq=40, Nk=120, Hq=2, Hk=1, d=16, dtype=dtype, bias="1hqk")
        judge_all(case.id, backend, with_lowest_row(case, value))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_gradient_of_a_broadcast_bias_of_large_numbers(backend, dtype):
    for bias in ("q1", "1k", "11"):
        case = Case("broadcast", Nq=130, Nk=120, d=16, dtype=dtype, bias=bias)
        x = inputs(case)
        x.options["bias"][:] = LOWEST[dtype]
        judge_all(case.id, backend, x)


@pytest.mark.parametrize("causal", [False, True])
def test_large_products(causal):
    """Keys that are all alike. On a GPU only calls with a bias or ALiBi look for such rows."""
    x = inputs(Case("alike", Nq=100, Nk=200, d=16, causal=causal))
    x.k[:] = 2.0**14 * x.k[:, :, :1]
    judge_all("1e5", CPU, x)
    x.q[:, :, ::3] *= 2.0**20
    judge_all("1e11", CPU, x)


def test_a_distance_that_swallows_what_it_is_added_to(backend):
    x = inputs(Case("far", Nq=40, Nk=200, d=16, alibi="h"))
    x.options.update({"q_offset": -(2**30), "alibi_slopes": np.float32([2.0**-6, 2.0**-3])})
    judge_all("alibi", backend, x)


def test_parts_of_the_keys_still_add_up(backend):
    """With the lse of all keys, a row's keys here are seen to be a part of them."""
    case = Case("parts", Nq=40, Nk=120, Hq=2, Hk=1, d=16, bias="1hqk")
    x = with_lowest_row(case, -1e4)
    y = backend.move(x)
    out, lse = cf.attention(y.q, y.k, y.v, return_lse=True, **y.options)
    parts = [
        cf.attention_backward(y.dout, y.q, y.k[:, :, part], y.v[:, :, part], out, lse, dlse=y.dlse,
                              bias=y.options["bias"][..., part])
        for part in (slice(0, 60), slice(60, 70), slice(70, None))
    ]
    total = {"dq": sum(backend.asnumpy(g.dq) for g in parts)}
    for name, axis in (("dk", 2), ("dv", 2), ("dbias", 3)):
        total[name] = np.concatenate([backend.asnumpy(getattr(g, name)) for g in parts], axis)
    judge("parts", total, *answers_to(x))


def test_splits_of_a_row_whose_lse_holds_no_logarithm(backend, monkeypatch):
    """They see unequal numbers of keys, which their lse do not tell."""
    monkeypatch.setattr(device, "cpu", lambda: device.Device("cpu", 8))
    case = Case("splits", Nq=20, Nk=3100, d=32, Hq=2, Hk=1, bias="1hqk", kv_lens=(1300,))
    judge_all(case.id, backend, with_lowest_row(case, LOWEST["float32"]))

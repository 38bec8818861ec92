"""attention_vjp: forward and a pullback, checked through the public interface alone."""

from dataclasses import replace

import numpy as np
import pytest
from answers import answers, floors, judge
from cases import FEATURES, SINK, Case, inputs
from numerics import assert_bit_equal
from test_backward import assert_same_gradients, gradients
from test_forward import attend, few

import cupy_flash as cf


def asdict(backend, g):
    """The gradients as NumPy arrays by name."""
    return {name: None if x is None else backend.asnumpy(x) for name, x in g._asdict().items()}


@pytest.mark.parametrize("feature", (*FEATURES[::3], *SINK[2::3]), ids=lambda case: case.label)
def test_is_forward_and_backward(backend, feature):
    x = inputs(feature)
    y = backend.move(x)
    (out, lse), pullback = cf.attention_vjp(y.q, y.k, y.v, return_lse=True, deterministic=True,
                                            **y.options)
    want_out, want_lse = attend(backend, x)
    assert_bit_equal("out", backend.asnumpy(out), want_out)
    assert_bit_equal("lse", backend.asnumpy(lse), want_lse)
    g = asdict(backend, pullback(y.dout, y.dlse))
    assert_same_gradients(feature.id, g, gradients(backend, x, deterministic=True))
    judge(feature.id, g, *answers(feature), floors(x) if few(feature) else None)


def test_without_lse(backend):
    case = Case("vjp", Hq=4, Hk=2, causal=True, dtype="bfloat16", bias="1hqk",
                sink=(1.0, -3.0))
    x = inputs(case)
    y = backend.move(x)
    out, pullback = cf.attention_vjp(y.q, y.k, y.v, deterministic=True, **y.options)
    assert_bit_equal("out", backend.asnumpy(out), attend(backend, x)[0])
    g = asdict(backend, pullback(y.dout))
    want = gradients(backend, x, use_dlse=False, deterministic=True)
    assert_same_gradients(case.id, g, want)
    # A pullback may be called again, and with another cotangent.
    assert_same_gradients(case.id, asdict(backend, pullback(y.dout)), want)
    zero = asdict(backend, pullback(backend.asarray(np.zeros_like(x.dout))))
    assert all((array == 0).all() for array in zero.values())


def test_grad_dtype(backend):
    case = Case("vjp-grad-dtype", Hq=4, Hk=2, dtype="float16")
    x = inputs(case)
    y = backend.move(x)
    _, pullback = cf.attention_vjp(y.q, y.k, y.v, deterministic=True, grad_dtype=np.float32)
    want = gradients(backend, x, use_dlse=False, deterministic=True, grad_dtype=np.float32)
    assert_same_gradients(case.id, asdict(backend, pullback(y.dout)), want)


def test_tf32_holds_for_the_pullback(backend):
    case = Case("vjp", data="mean1", precision="tf32")
    x = inputs(case)
    y = backend.move(x)
    _, pullback = cf.attention_vjp(y.q, y.k, y.v, deterministic=True, precision="tf32")
    exact, _ = answers(Case("vjp", data="mean1", precision="tf32"))
    g = asdict(backend, pullback(y.dout, y.dlse))
    judge(case.id, g, *answers(case))
    assert np.abs(g["dv"] - exact.dv).max() > 1e-5  # the operands were rounded indeed


@pytest.mark.parametrize("label", ["all-but-lens", "all-options", "softcap", "lens",
                                   "window-causal-gqa", "bias-head-key-causal",
                                   "sink-causal-tall", "sink-all-options"])
def test_pullback_is_the_derivative_of_the_forward_call(backend, label):
    """Central differences along random directions, through `cf.attention` itself."""
    feature = next(f for f in (*FEATURES, *SINK) if f.label == label)
    case = replace(feature, dtype="float64", data="normal")
    x = inputs(case)
    rng = np.random.default_rng(3)

    def loss(q, k, v, bias, sink):
        changed = {"bias": bias, "sink": sink}
        options = x.options | {name: a for name, a in changed.items() if a is not None}
        out, lse = attend(backend, x._replace(q=q, k=k, v=v, options=options))
        return (out * x.dout).sum() + (np.where(np.isfinite(lse), lse, 0) * x.dlse).sum()

    y = backend.move(x)
    _, pullback = cf.attention_vjp(y.q, y.k, y.v, return_lse=True, **y.options)
    g = asdict(backend, pullback(y.dout, y.dlse))
    arrays = [x.q, x.k, x.v, x.options.get("bias"), x.options.get("sink")]
    for at, name in enumerate(("dq", "dk", "dv", "dbias", "dsink")):
        if arrays[at] is None:
            continue
        direction = rng.standard_normal(arrays[at].shape)
        step = 1e-5
        up, down = list(arrays), list(arrays)
        up[at], down[at] = arrays[at] + step * direction, arrays[at] - step * direction
        slope = (loss(*up) - loss(*down)) / (2 * step)
        np.testing.assert_allclose((g[name] * direction).sum(), slope, rtol=1e-6, atol=1e-6)

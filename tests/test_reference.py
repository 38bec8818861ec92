"""The reference against finite differences, the ONNX operator and closed forms."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from cases import FEATURES, SINK, Case, inputs
from onnx.reference import ReferenceEvaluator

from cupy_flash import reference

# Small twins of the whole table: every option, sizes at which each entry can be moved.
SMALL = {"Nq": 5, "Nk": 7, "d": 3, "d_v": 2, "dtype": "float64"}


def small(feature):
    """`feature` with every option kept and every size cut down."""
    changes = dict(SMALL)
    if feature.window is not None:
        changes["window"] = tuple(w if w is None else w % 3 for w in feature.window)
    if feature.q_offset is not None:
        changes["q_offset"] = max(-2, min(feature.q_offset, 3))
    if feature.sink is not None:        # a loss of 1e9 has no digits left for differences
        changes["sink"] = tuple(min(x, 1e4) for x in feature.sink)
    for name, N in (("q_lens", 5), ("kv_lens", 7)):
        if getattr(feature, name) is not None:
            changes[name] = tuple(n % (N + 1) for n in getattr(feature, name))
    if feature.Nq == 1 or feature.Nk == 1:
        changes |= {"Nq": min(feature.Nq, 5), "Nk": min(feature.Nk, 7)}
    return replace(feature, **changes)


@pytest.mark.parametrize("case", [small(f) for f in (*FEATURES, *SINK)], ids=lambda case: case.id)
def test_gradients_are_finite_differences(case):
    x = inputs(case)
    arrays = {"q": x.q, "k": x.k, "v": x.v}
    arrays |= {name: x.options[name] for name in ("bias", "sink") if name in x.options}

    def loss(**changed):
        given = {**x.options, **arrays, **changed}
        out, lse = reference.attention(given.pop("q"), given.pop("k"), given.pop("v"),
                                       compute_dtype=np.longdouble, **given)
        seen = np.where(np.isfinite(lse), lse, 0)  # a row that sees nothing stays at -inf
        return (out * x.dout).sum() + (seen * x.dlse).sum()

    gradients = reference.attention_backward(x.dout, x.q, x.k, x.v, dlse=x.dlse, **x.options)
    gradients = dict(zip(("q", "k", "v", "bias", "sink"), gradients, strict=True))
    assert {name for name, gradient in gradients.items() if gradient is not None} == {*arrays}
    for name, array in arrays.items():
        gradient = gradients[name]
        assert gradient.shape == array.shape
        step = np.longdouble(2.0 ** -16)
        for at in np.ndindex(array.shape):
            up, down = array.astype(np.longdouble), array.astype(np.longdouble)
            up[at] += step
            down[at] -= step
            slope = (loss(**{name: up}) - loss(**{name: down})) / (2 * step)
            # The difference quotient itself is off by step^2 times a third derivative.
            assert abs(slope - gradient[at]) < 1e-6 * (1 + abs(slope)), (name, at)


def onnx_attention(q, k, v, *, mask=None, past=(None, None), kv_lens=None, **attributes):
    """The operator `Attention` of ONNX in its reference implementation."""
    given = {"Q": q, "K": k, "V": v, "attn_mask": mask, "past_key": past[0], "past_value": past[1],
             "nonpad_kv_seqlen": kv_lens}
    names = [name if value is not None else "" for name, value in given.items()]
    while not names[-1]:
        names.pop()
    attributes = {name: value for name, value in attributes.items() if value is not None}
    node = onnx.helper.make_node("Attention", names, ["Y"], **attributes)
    feeds = {name: value for name, value in given.items() if value is not None}
    graph = onnx.helper.make_graph(
        [node], "attention",
        [onnx.helper.make_tensor_value_info(
            name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
         for name, value in feeds.items()],
        [onnx.helper.make_tensor_value_info("Y", onnx.TensorProto.DOUBLE, None)],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 25)])
    return ReferenceEvaluator(model).run(None, feeds)[0]


ONNX_CASES = {
    "plain": {},
    "scale": {"scale": 0.25},  # its root is taken in float32
    "softcap": {"softcap": 1.5},
    "softcap-bias": {"softcap": 1.5, "bias": "1hqk"},
    "bias": {"bias": "bhqk"},
    "bias-shared": {"bias": "11qk"},
    "mask": {"mask": "dense"},
    "mask-padding": {"mask": "padding"},
    "causal-top-left": {"causal": True, "q_offset": 0},
    "causal-top-left-mask": {"causal": True, "q_offset": 0, "mask": "dense"},
    "window-top-left": {"window": (3, 2), "q_offset": 0},
    "window-left-causal": {"window": (2, None), "q_offset": 0, "causal": True},
    "kv-lens": {"kv_lens": (8, 3)},
    "kv-lens-causal": {"kv_lens": (11, 3), "causal": True},
    "kv-lens-window-causal": {"kv_lens": (11, 7), "causal": True, "window": (4, None)},
    "kv-lens-window-softcap-bias": {"kv_lens": (9, 6), "window": (4, 1), "softcap": 2.0,
                                    "bias": "bhqk"},
}


@pytest.mark.parametrize("label", ONNX_CASES)
def test_agrees_with_the_onnx_operator(label):
    case = Case(label, Nq=6, Nk=11, d=5, d_v=4, B=2, Hq=4, Hk=2, dtype="float64",
                                 **ONNX_CASES[label])
    x = inputs(case)
    out, _ = reference.attention(x.q, x.k, x.v, **x.options)
    left, right = case.window or (None, None)
    theirs = onnx_attention(
        x.q, x.k, x.v,
        mask=x.options.get("mask", x.options.get("bias")),
        kv_lens=None if case.kv_lens is None else np.array(case.kv_lens, np.int64),
        scale=case.scale, softcap=case.softcap, is_causal=int(case.causal),
        left_window_size=left, right_window_size=right,
    )
    np.testing.assert_allclose(out, theirs, rtol=0, atol=1e-14)


def test_alibi_is_a_bias():
    x = inputs(Case("alibi", Nq=6, Nk=11, d=5, B=2, Hq=3, Hk=3, dtype="float64"))
    slopes = np.array([[0.5, 0.25, 0.0], [1.0, 2.0, -0.1]])
    distance = np.abs(np.arange(6)[:, None] + 5 - np.arange(11))
    bias = -slopes[:, :, None, None] * distance
    got = reference.attention(x.q, x.k, x.v, alibi_slopes=slopes, causal=True)
    want = reference.attention(x.q, x.k, x.v, bias=bias, causal=True)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-14)


def test_lengths_are_slices():
    x = inputs(Case("lens", Nq=9, Nk=12, d=5, B=2, Hq=2, Hk=1, dtype="float64"))
    q_lens, kv_lens = np.array([4, 9], np.int32), np.array([12, 7], np.int32)
    options = {"causal": True, "window": (5, None)}
    out, lse = reference.attention(x.q, x.k, x.v, q_lens=q_lens, kv_lens=kv_lens, **options)
    for b, (n, m) in enumerate(zip(q_lens, kv_lens, strict=True)):
        want, want_lse = reference.attention(x.q[b, :, :n], x.k[b, :, :m], x.v[b, :, :m], **options)
        np.testing.assert_allclose(out[b, :, :n], want, rtol=0, atol=1e-14)
        np.testing.assert_allclose(lse[b, :, :n], want_lse, rtol=0, atol=1e-14)
        assert (out[b, :, n:] == 0).all() and (lse[b, :, n:] == -np.inf).all()


def test_poison_that_nobody_sees_does_not_matter():
    x = inputs(Case("poison", Nq=6, Nk=9, d=4, Hq=4, Hk=2, dtype="float64"))
    mask = np.ones((1, 9), bool)
    mask[0, [2, 8]] = False
    options = {"mask": mask, "causal": True, "window": (2, None), "q_lens": np.array([5], np.int32)}
    hidden = [0, 1, 2, 8]  # left of every window, or masked
    k, v, q, dout = x.k.copy(), x.v.copy(), x.q.copy(), x.dout.copy()
    want = (*reference.attention(q, k, v, **options),
            *reference.attention_backward(dout, q, k, v, **options))
    k[..., hidden, :], v[..., hidden, :] = np.nan, np.inf
    q[..., 5, :], dout[..., 5, :] = np.nan, np.nan
    got = (*reference.attention(q, k, v, **options),
           *reference.attention_backward(dout, q, k, v, **options))
    for a, b in zip(got[:-1], want[:-1], strict=True):  # the last one is dbias, None
        np.testing.assert_array_equal(a, b)


def test_tf32_rounds_to_nearest_even():
    x = np.float32([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-20, -1 - 2**-11, 0, -0.0,
                    np.inf, -np.inf, np.finfo(np.float32).max])
    want = np.float32([1, 1 + 2**-9, 1 + 2**-10, -1, 0, -0.0, np.inf, -np.inf,
                       np.finfo(np.float32).max])
    np.testing.assert_array_equal(reference._to_tf32(x), want)
    assert np.isnan(reference._to_tf32(np.float32([np.nan]))).all()

"""Every message ends with the next step, and the step works.

Where a message says "pass `code`", the code is run on the arguments, and the call is made again
with its value: it must go through.
"""

import re
import sys
from decimal import Decimal
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from test_bad_input import (
    BAD,
    BAD_BACKWARD,
    BAD_FORWARD,
    MASK,
    call,
    call_backward,
    good,
    good_backward,
    zeros,
)
from test_merge import BAD as BAD_PARTS

import cupy_flash as cf


def refusal(function, arguments):
    """The text of the error of a call."""
    with pytest.raises((TypeError, ValueError)) as raised:
        function(arguments)
    return str(raised.value)


def split(text):
    """Name, what is wrong with it, and the next step."""
    found = re.fullmatch(r"`(\w+)`(?:\[\d\])?(.*?expected.*?): ([^:].*|`.*)", text, re.DOTALL)
    assert found, f"no next step in {text!r}"
    return found.groups()


def mended(arguments, text):
    """The arguments after the step "pass `code`" of a message."""
    name, _, step = split(text)
    code = re.search(r"pass `([^`]+)`", step)[1]
    return arguments | {name: eval(code, {"np": np, "ml_dtypes": ml_dtypes} | arguments)}


TABLES = {"both": (call, good, BAD), "forward": (call, good, BAD_FORWARD),
          "backward": (call_backward, good_backward, BAD_BACKWARD)}


@pytest.mark.parametrize("table", TABLES)
def test_every_refusal_has_a_next_step(table):
    """`check_buffer` apart, whose few messages say with "expected" what to pass."""
    function, arguments, rows = TABLES[table]
    for label, (changes, *_) in rows.items():
        text = refusal(function, arguments() | changes)
        assert len(split(text)[2]) > 10, label
        assert len(text) < 400, text


def test_every_refusal_of_merge_has_a_next_step():
    for outs, lses, *_ in BAD_PARTS.values():
        split(refusal(lambda parts: cf.merge(*parts), (outs, lses)))


BATCH_MASK = np.arange(9) < np.array([[4], [9]])        # (B, Nk), B = 2
COMPLEX = np.zeros((2, 4, 7, 8), complex).astype(np.complex64)

# What is changed, the name, and the code in the step; run, it must make the call a good one.
STEPS = {
    "q-list": ({"q": zeros(2, 4, 7, 8).tolist()}, "q", "np.array(q, np.float32)"),
    "q-integers": ({"q": zeros(2, 4, 7, 8, dtype=np.int32)}, "q", "q.astype(np.float32)"),
    "q-bool": ({"q": zeros(2, 4, 7, 8, dtype=bool)}, "q", "q.astype(np.float32)"),
    "q-object": ({"q": zeros(2, 4, 7, 8, dtype=object)}, "q", "q.astype(np.float32)"),
    "q-complex": ({"q": COMPLEX}, "q", "q.real"),
    "q-float8": ({"q": zeros(2, 4, 7, 8).astype(ml_dtypes.float8_e4m3fn)}, "q",
                 "q.astype(np.float32)"),
    "q-bytes-swapped": ({"q": zeros(2, 4, 7, 8, dtype=">f4")}, "q",
                        'q.astype(q.dtype.newbyteorder("="))'),
    "q-masked": ({"q": np.ma.zeros((2, 4, 7, 8), np.float32)}, "q", "q.filled(0)"),
    "k-dtype": ({"k": zeros(2, 2, 9, 8, dtype=np.float64)}, "k", "k.astype(q.dtype)"),
    "k-columns": ({"k": zeros(2, 2, 8, 9)}, "k", "k.swapaxes(-1, -2)"),
    "k-many-columns": ({"k": zeros(2, 2, 8, 300), "v": zeros(2, 2, 300, 5), "mask": None}, "k",
                       "k.swapaxes(-1, -2)"),
    "v-rows-before-heads": ({"v": zeros(2, 9, 2, 5)}, "v", "v.swapaxes(1, 2)"),
    "v-columns": ({"v": zeros(2, 2, 5, 9)}, "v", "v.swapaxes(2, 3)"),
    "mask-additive": ({"mask": MASK.astype(np.float32)}, "mask", "mask != 0"),
    "mask-integers": ({"mask": MASK.astype(np.int64)}, "mask", "mask != 0"),
    "mask-list": ({"mask": MASK.tolist()}, "mask", "np.array(mask, bool)"),
    "mask-batch-keys": ({"mask": BATCH_MASK}, "mask", "mask[:, None, None, :]"),
    "mask-batch-queries-keys": ({"mask": np.ones((2, 7, 9), bool)}, "mask", "mask[:, None]"),
    "mask-keys-queries": ({"mask": np.ones((9, 7), bool)}, "mask", "mask.swapaxes(-1, -2)"),
    "mask-key-heads": ({"mask": np.ones((2, 2, 7, 9), bool)}, "mask",
                       "np.repeat(mask, 2, axis=-3)"),
    "bias-integers": ({"bias": zeros(7, 9, dtype=np.int64)}, "bias", "bias.astype(np.float32)"),
    "bias-list": ({"bias": [0.0] * 9}, "bias", "np.array(bias, np.float32)"),
    "bias-number": ({"bias": 0.5}, "bias", "np.array(bias, np.float32)"),
    "bias-batch-keys": ({"bias": zeros(2, 9)}, "bias", "bias[:, None, None, :]"),
    "slopes-integers": ({"alibi_slopes": zeros(4, dtype=int)}, "alibi_slopes",
                        "alibi_slopes.astype(np.float32)"),
    "slopes-half": ({"alibi_slopes": zeros(4, dtype=np.float16)}, "alibi_slopes",
                    "alibi_slopes.astype(np.float32)"),
    "slopes-key-heads": ({"alibi_slopes": zeros(2)}, "alibi_slopes", "np.repeat(alibi_slopes, 2)"),
    "sink-wide": ({"sink": zeros(4, dtype=np.float64)}, "sink", "sink.astype(np.float32)"),
    "sink-key-heads": ({"sink": zeros(2)}, "sink", "np.repeat(sink, 2)"),
    "sink-infinite": ({"sink": np.float32([0, np.inf, np.nan, 0])}, "sink",
                      "np.minimum(sink, 1e30)"),
    "lens-int64": ({"kv_lens": np.array([3, 4])}, "kv_lens", "kv_lens.astype(np.int32)"),
    "scale-fraction": ({"scale": Fraction(1, 3)}, "scale", "float(scale)"),
    "scale-decimal": ({"scale": Decimal("0.5")}, "scale", "float(scale)"),
    "scale-text": ({"scale": "0.5"}, "scale", "float(scale)"),
    "scale-bfloat16": ({"scale": ml_dtypes.bfloat16(0.5)}, "scale", "float(scale)"),
    "scale-complex": ({"scale": 1 + 0j}, "scale", "scale.real"),
    "softcap-list-of-one": ({"softcap": np.ones(1)}, "softcap", "float(softcap[0])"),
    "causal-1": ({"causal": 1}, "causal", "bool(causal)"),
    "causal-0-d": ({"causal": np.array(True)}, "causal", "bool(causal)"),
    "q_offset-float": ({"q_offset": 2.0}, "q_offset", "int(q_offset)"),
    "window-array": ({"window": np.array([2, 1])}, "window", "tuple(window)"),
}


@pytest.mark.parametrize("label", STEPS)
def test_the_step_works(label):
    changes, name, code = STEPS[label]
    for function, arguments in ((call, good()), (call_backward, good_backward())):
        bad = arguments | changes
        text = refusal(function, bad)
        assert text.startswith((f"`{name}` ", f"`{name}`[")) and f"pass `{code}`" in text, text
        function(mended(bad, text))


STEPS_BACKWARD = {
    "dout-half": ({"dout": zeros(2, 4, 7, 5, dtype=np.float16)}, "dout.astype(np.float32)"),
    "lse-wide": ({"lse": zeros(2, 4, 7, dtype=np.float64)}, "lse.astype(np.float32)"),
    "dq-wide": ({"dq": zeros(2, 4, 7, 8, dtype=np.float64)}, "np.empty((2, 4, 7, 8), np.float32)"),
    "dk-heads": ({"dk": zeros(2, 4, 9, 8)}, "np.empty((2, 2, 9, 8), np.float32)"),
    "wrt-string": ({"wrt": "v"}, '("v",)'),
    "wrt-twice": ({"wrt": ["v", "q", "v"]}, "tuple(dict.fromkeys(wrt))"),
    "wrt-no-bias": ({"wrt": ("v", "bias")}, "('v',)"),
    "dv-bytes": ({"dv": zeros(2, 2, 9, 5, dtype=">f4")}, "np.empty((2, 2, 9, 5), np.float32)"),
}


@pytest.mark.parametrize("label", STEPS_BACKWARD)
def test_the_step_of_a_backward_call_works(label):
    changes, code = STEPS_BACKWARD[label]
    bad = good_backward() | changes
    text = refusal(call_backward, bad)
    assert f"pass `{code}`" in text, text
    call_backward(mended(bad, text))


def test_a_buffer_of_bfloat16_is_spelled_out():
    x = {name: a.astype(ml_dtypes.bfloat16) for name, a in good().items()}
    bad = x | {"out": zeros(2, 4, 7, 5)}
    text = refusal(call, bad)
    assert "`np.empty((2, 4, 7, 5), ml_dtypes.bfloat16)`" in text
    call(mended(bad, text))


# Heads and rows in the wrong order. B = 2, N = 7 and 9, H = 4 and 2; each view is named.

ROWS_FIRST = {
    "all": (("q", "k", "v"), "`x.swapaxes(1, 2)` for q, k and v"),
    "keys": (("k", "v"), "`k.swapaxes(1, 2)` and v.swapaxes(1, 2)"),
    "queries": (("q",), "`q.swapaxes(1, 2)`"),
}


@pytest.mark.parametrize("label", ROWS_FIRST)
def test_heads_behind_rows(label):
    names, view = ROWS_FIRST[label]
    arguments = good()
    for name in names:
        arguments[name] = arguments[name].swapaxes(1, 2)
    text = refusal(call, arguments)
    assert "(B, N, H, d)" in text and view in text
    three = {name: x[0] for name, x in arguments.items()}
    text = refusal(call, three)
    assert "(N, H, d)" in text and view.replace("(1, 2)", "(0, 1)") in text


def test_heads_side_by_side():
    """(B, N, H * d), as projections leave it."""
    x = {"q": zeros(2, 7, 4 * 96), "k": zeros(2, 9, 2 * 96), "v": zeros(2, 9, 2 * 96)}
    for name in "qkv":
        wide = good() | {name: zeros(2, 4, 512)}
        wide |= {other: zeros(2, 4, 8) for other in "qkv" if other != name}
        assert f"`{name}.reshape(B, N, H, d).swapaxes(1, 2)`" in refusal(call, wide)
    view = re.search(r"split as `q(\.reshape.*)`", refusal(call, x))[1]
    split_up = {name: eval(f"x{view}", {"x": a, "B": 2, "N": a.shape[1], "H": a.shape[2] // 96,
                                        "d": 96}) for name, a in x.items()}
    assert call(split_up).shape == (2, 4, 7, 96)


def test_one_number_for_all_heads():
    for name in ("sink", "alibi_slopes"):
        text = refusal(call, good() | {name: 0.5})
        code = re.search("pass `([^`]+)`", text)[1]
        call(good() | {name: eval(code, {"np": np, "Hq": 4, name: 0.5})})


def test_a_pullback_takes_the_gradients_apart():
    (out, lse), pullback = cf.attention_vjp(**good(), return_lse=True)
    with pytest.raises(TypeError, match=r"`dout` is a tuple.*as in `pullback\(dout, dlse\)`"):
        pullback((out, lse))
    pullback(out, lse)


def test_more_key_heads_than_query_heads():
    x = good() | {"q": zeros(2, 1, 7, 8)}
    text = refusal(call, x)
    assert "pass `np.repeat(q, 2, axis=-3)`, or q and k the other way round" in text
    call(mended(x, text))


def test_one_batch_for_all():
    for names, code in ((("k", "v"), "`np.broadcast_to(k, (len(q), *k.shape[1:]))`"),
                        (("q",), "`np.broadcast_to(q, (len(k), *q.shape[1:]))`")):
        x = good()
        x |= {name: x[name][:1] for name in names}
        text = refusal(call, x)
        assert code in text
        other = x["q"] if "k" in names else x["k"]
        call(x | {n: np.broadcast_to(x[n], (len(other), *x[n].shape[1:])) for n in names})


def test_a_boolean_bias_is_a_mask():
    assert "`mask=`" in refusal(call, good() | {"bias": MASK})


def test_an_additive_mask_is_a_bias():
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        assert "it is `bias=`" in refusal(call, good() | {"mask": MASK.astype(dtype)})


@pytest.mark.parametrize("lens", [[3, 4], (3, 4), 3, np.int64(3)], ids=repr)
def test_lengths_are_an_array_of_int32(lens):
    for name in ("q_lens", "kv_lens"):
        assert "`np.int32([...])`" in refusal(call, good() | {name: lens})


def test_cumulative_lengths():
    text = refusal(call, good() | {"kv_lens": np.int32([0, 3, 9])})
    assert "`np.diff(kv_lens)`" in text


def test_minus_one_is_not_unlimited():
    for window, right in (((-1, 0), "(None, 0)"), ((4, -1), "(4, None)"),
                          ((-1, -1), "(None, None)")):
        text = refusal(call, good() | {"window": window})
        assert str(window) in text and f"None means unlimited, as in `window={right}`" in text


def test_an_infinite_window_is_none():
    assert "None for unlimited" in refusal(call, good() | {"window": (float("inf"), 0)})


@pytest.mark.parametrize("side", [2**40, 2**40 + 1, sys.maxsize, 2**70, np.uint64(2**64 - 1)],
                         ids=str)
def test_a_side_wider_than_all_keys_is_unlimited(side):
    x = {name: np.random.default_rng(0).standard_normal(a.shape) for name, a in good().items()}
    for window, causal in (((side, 0), True), ((side, side), False), ((0, side), False)):
        want = call(x | {"window": tuple(None if s == side else s for s in window)})
        assert (call(x | {"window": window}) == want).all()
        if causal:
            assert (call(x | {"causal": True}) == want).all()


def test_one_scale_for_each_head_is_multiplied_into_q():
    text = refusal(call, good() | {"scale": np.ones(4)})
    assert "shape (4,)" in text and "multiply `q`" in text and "waited" not in text


def test_an_array_is_not_printed_in_a_message():
    big = np.ones((300, 300), bool)
    for name in ("causal", "scale", "softcap", "window", "q_offset", "precision", "out_dtype"):
        text = refusal(call, good() | {name: big})
        assert "(300, 300)" in text and len(text) < 300, text
    assert "`mask=`" in refusal(call, good() | {"causal": big})


@pytest.mark.parametrize("value", [1, 0, "True", None, np.int8(1)], ids=repr)
@pytest.mark.parametrize("name", ["causal", "return_lse", "deterministic"])
def test_flags_are_bools(name, value):
    function, x = (call_backward, good_backward()) if name == "deterministic" else (call, good())
    text = refusal(function, x | {name: value})
    assert text.startswith(f"`{name}` is ") and "expected a bool" in text
    function(x | {name: np.bool_(True)})


# The order of a backward call.


@pytest.mark.parametrize("order", ["q k v out lse dout", "q k v dout out lse"])
def test_backward_with_q_first(order):
    x = good_backward()
    with pytest.raises(ValueError, match=r"the first argument is dout"):
        cf.attention_backward(*(x[name] for name in order.split()))


def test_backward_with_q_first_where_all_shapes_are_alike():
    x, lse = zeros(2, 4, 7, 8), zeros(2, 4, 7)
    with pytest.raises(ValueError, match=r"^`out` has 3 axes.*the first argument is dout"):
        cf.attention_backward(x, x, x, x, lse, x)


def test_wrong_results_of_forward_are_no_wrong_order():
    """A dout or out of its own wrong shape is named, with no guess about others."""
    for name in ("dout", "out"):
        text = refusal(call_backward, good_backward() | {name: zeros(2, 4, 6, 5)})
        assert text.startswith(f"`{name}` has shape (2, 4, 6, 5), expected (2, 4, 7, 5)")


# Of merge.


def test_merge_takes_results_of_attention():
    out, lse = zeros(5, 3), zeros(5)
    for dtype in (int, bool, complex, object, np.longdouble, np.uint16):
        other = out.astype(dtype)
        text = refusal(lambda parts: cf.merge(*parts), ([other, other], [lse, lse]))
        assert text.startswith("`outs`[0] has dtype ") and "`outs[0]." in text
        assert "expected float16, bfloat16, float32 or float64: " in text
        text = refusal(lambda parts: cf.merge(*parts), ([out, out], [lse, lse.astype(dtype)]))
        assert text.startswith("`lses`[1] has dtype ")
    half = lse.astype(np.float16)
    text = refusal(lambda parts: cf.merge(*parts), ([out], [half]))
    assert "expected float32 or float64: pass `lses[0].astype(np.float32)`" in text
    swapped = out.astype(">f4")
    text = refusal(lambda parts: cf.merge(*parts), ([swapped], [lse]))
    assert "byte order" in text


def test_merge_of_no_sequences():
    for outs in (None, 3, cf.attention):
        text = refusal(lambda parts: cf.merge(*parts), (outs, [zeros(5)]))
        assert text.startswith("`outs` is a ") and "merge([out1, out2], [lse1, lse2])" in text
    pairs = [zeros(5, 3), zeros(5)], [zeros(5, 3), zeros(5)]       # (out, lse) of each part
    text = refusal(lambda parts: cf.merge(*parts), pairs)
    assert text.startswith("`lses`[0] has shape (5, 3)") and "merge([out1, out2]," in text


def test_merge_of_other_queries_is_a_concatenation():
    parts = [zeros(5, 3), zeros(6, 3)], [zeros(5), zeros(6)]
    assert "`np.concatenate`" in refusal(lambda p: cf.merge(*p), parts)

"""Words that a function does not have: of other libraries, of other functions, misspelt ones."""

import inspect
import re
import sys

import numpy as np
import pytest

import cupy_flash as cf
from cupy_flash import words
from cupy_flash.bind import Options

X = np.zeros((2, 4, 7, 8), np.float32)
LSE = X[..., 0]
CALLS = {
    "attention": lambda **kw: cf.attention(X, X, X, **kw),
    "attention_backward": lambda **kw: cf.attention_backward(X, X, X, X, X, LSE, **kw),
    "attention_vjp": lambda **kw: cf.attention_vjp(X, X, X, **kw),
    "explain": lambda **kw: cf.explain(X, X, X, **kw),
}
# A word of another library, and what its answer must say.
ANSWERS = {
    "attn_mask": ["`mask=`", "`bias=`", "True = may attend"],
    "attention_mask": ["`mask=", "[:, None, None, :]", "`kv_lens=`", "`bias=`"],
    "key_padding_mask": ["True hides", "`mask=~key_padding_mask[:, None, None, :]`", "`kv_lens=`"],
    "is_causal": ["`causal=True`", "`q_offset=0`"],
    "softmax_scale": ["`scale=`"],
    "sm_scale": ["`scale=`"],
    "window_size": ["(-1, 0)", "`window=(None, 0)`"],
    "local_window_size": ["`window=(left, right)`", "(w, w)"],
    "sliding_window": ["`window=(W - 1, 0)`"],
    "enable_gqa": ["leave it out"],
    "dropout_p": ["no dropout in this version"],
    "dropout": ["no dropout in this version"],
    "attn_bias": ["`bias=`"],
    "s_aux": ["`sink=`", "one logit per query head"],
    "sinks": ["`sink=`"],
    "learnable_sink": ["`sink=`"],
    "sink_token": ["`sink=`"],
    "diagonal_band_left_bound": ["`window=(left, right)`", "does not count", "`q_offset=0`"],
    "diagonal_alignment": ["leave it out", "`q_offset=0`"],
    "past_key": ["join", "k and v"],
    "kv_num_heads": ["leave it out", "`x.reshape(B, N, H, d).swapaxes(1, 2)`"],
    "use_deterministic_algorithm": ["`deterministic=True`"],
    "return_aux": ["`return_lse=True`"],
    "mask_mod": ["`mask=`", "`bias=`"],
    "logits_soft_cap": ["`softcap=`"],
    "query_seq_lengths": ["`q_lens=`", "int32"],
    "key_value_seq_lengths": ["`kv_lens=`", "int32"],
    "cu_seqlens_q": ["packed", "pad", "`q_lens=`"],
    "max_seqlen_k": ["packed", "pad"],
    "block_table": ["not in this version"],
    "need_weights": ["never exists", "`return_lse=True`"],
    "return_softmax_lse": ["`return_lse=True`"],
    "qkv_format": ["`x.swapaxes(1, 2)`"],
    "num_splits": ["`explain`"],
    "layout": ["last axis but one"],
}


def message(function, **given):
    """What the TypeError of a call says."""
    with pytest.raises(TypeError) as raised:
        CALLS[function](**given)
    text = str(raised.value)
    assert "Options" not in text and "__new__" not in text
    return text


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("word", ANSWERS)
def test_words_of_other_libraries_are_answered(function, word):
    text = message(function, **{word: None})
    assert text.startswith(f"`{word}` is no argument of `{function}`: ")
    for part in ANSWERS[word]:
        assert part in text


def test_no_word_of_another_library_is_one_of_ours():
    ours = {name for f in (cf.attention, cf.attention_backward, cf.explain)
            for name in inspect.signature(f).parameters}
    assert not ours & set(words.ELSEWHERE)
    named = {name for answer in words.ELSEWHERE.values()
             for name in re.findall(r"`(\w+)=", answer)}
    assert named and named <= ours | {*Options._fields}


@pytest.mark.parametrize("function, word, near", [
    ("attention", "casual", "causal"), ("attention", "Scale", "scale"),
    ("attention", "q_len", "q_lens"),
    ("attention", "outdtype", "out_dtype"), ("attention_backward", "softcaps", "softcap"),
    ("attention_backward", "determinstic", "deterministic"), ("attention_vjp", "kvlens", "kv_lens"),
    ("attention_vjp", "returns_lse", "return_lse"), ("explain", "windows", "window"),
    ("explain", "grad_dtypes", "grad_dtype"),
])
def test_a_misspelt_word_is_named_with_the_nearest(function, word, near):
    assert message(function, **{word: 1}) == (
        f"`{word}` is no argument of `{function}`: did you mean `{near}`?")


def test_a_word_like_none_gets_the_list():
    text = message("attention", zzz=1)
    for name in inspect.signature(cf.attention).parameters:
        assert name in text
    text = message("attention_backward", zzz=1)
    assert "unnamed" not in text and "alibi_slopes" in text and "dlse" in text


@pytest.mark.parametrize("function, word, owner", [
    ("attention", "deterministic", "`attention_backward`"),
    ("attention", "dlse", "attention_backward"),
    ("attention_backward", "return_lse", "`attention`"),
    ("attention_backward", "out_dtype", "attention"),
    ("attention_vjp", "out_dtype", "`attention`"), ("attention_vjp", "dq", "attention_backward"),
])
def test_a_word_of_another_function_is_sent_there(function, word, owner):
    text = message(function, **{word: None})
    assert text.startswith(f"`{word}` is no argument of `{function}`: it is one of ")
    assert owner in text


def test_a_right_word_beside_a_wrong_one_is_not_blamed():
    for function in CALLS:
        assert message(function, causal=True, scale=1.0, attn_mask=1).startswith("`attn_mask` ")


def test_what_comes_by_position_is_asked_for_by_name():
    calls = (lambda *more: cf.attention(X, X, X, *more),
             lambda *more: cf.attention_backward(X, X, X, X, X, LSE, *more),
             lambda *more: cf.attention_vjp(X, X, X, *more),
             lambda *more: cf.explain(X, X, X, *more))
    for call in calls:
        with pytest.raises(TypeError, match=r"got True by position.*q, k, v.*`causal=True`"):
            call(True)
        with pytest.raises(TypeError, match=r"got a numpy.ndarray of shape \(7, 7\) by position"):
            call(np.ones((7, 7), bool), 0.5)
    with pytest.raises(TypeError, match="expected no more than dout, q, k, v, out, lse so"):
        cf.attention_backward(X, X, X, X, X, LSE, True)


def test_help_shows_what_may_be_passed():
    """And nothing of what catches mistakes."""
    shown = list(inspect.signature(cf.attention).parameters)
    assert shown[:4] == ["q", "k", "v", "scale"] and {*Options._fields} <= {*shown}
    for function in (cf.attention, cf.attention_backward, cf.attention_vjp, cf.explain):
        assert not {"unnamed", "unknown"} & {*inspect.signature(function).parameters}


def test_explain_takes_the_words_of_the_calls():
    out = np.zeros_like(X)
    forward = {"return_lse": True, "out": out, "out_dtype": None}
    backward = {"dout": X, "lse": LSE, "dlse": LSE, "deterministic": True, "grad_dtype": np.float32,
                "dq": np.zeros_like(X), "dk": np.zeros_like(X), "dv": np.zeros_like(X)}
    for given in (forward, backward, forward | backward, {"causal": True} | backward):
        text = cf.explain(X, X, X, **given)
        assert text.startswith("forward: ") and "\nbackward: " in text
    half = X.astype(np.float16)
    cf.explain(half, half, half, out=np.zeros_like(X), out_dtype=np.float32)
    with pytest.raises(TypeError, match=r"^`out` has dtype float32, expected float16"):
        cf.explain(half, half, half, out=np.zeros_like(X))
    for name, value, error in (("return_lse", 1, TypeError), ("deterministic", 0, TypeError),
                               ("grad_dtype", np.int8, TypeError), ("out", X, ValueError),
                               ("dq", X[..., :4], ValueError), ("dlse", X, ValueError)):
        with pytest.raises(error, match=f"^`{name}`"):
            cf.explain(X, X, X, **{name: value})


def test_vjp_checks_the_words_of_the_pullback_first(monkeypatch):
    monkeypatch.setattr(sys.modules["cupy_flash.attention"], "_run", None)
    for name, value in (("deterministic", "yes"), ("grad_dtype", np.int8), ("return_lse", 1)):
        with pytest.raises(TypeError, match=f"^`{name}`"):
            cf.attention_vjp(X, X, X, **{name: value})

"""Arguments that a function does not have: what the word of another library is called here.

Nothing of this is looked at in a call that is right. The functions end in ``*unnamed`` and
``**unknown``, which cost a call nothing, and `exact` keeps these two out of `help`.
"""

import inspect
from reprlib import Repr

import numpy as np

_NO_DROPOUT = "there is no dropout in this version: leave it out"
_SCALE = "here it is `scale=`"
_SOFTCAP = "here it is `softcap=`"
_ALIBI = "here it is `alibi_slopes=`"
_SINK = "here it is `sink=`, one logit per query head"
_RETURN_LSE = "here it is `return_lse=True`, and the result is (out, lse)"
_NO_MATRIX = ("the matrix of probabilities never exists; `return_lse=True` gives the log-sum-exp "
              "that makes them from scores")
_CAUSAL = ("here it is `causal=True`, aligned to the last query and key; `q_offset=0` aligns the "
           "first ones, which differs where Nq and Nk do")
_BIAS = "here it is `bias=`, added to the scores after `scale` and `softcap`"
_EITHER = "boolean, it is `mask=` (True = may attend); added to the scores, it is `bias=`"
_PADDING = ("pass `mask=x.astype(bool)[:, None, None, :]` for an x of shape (B, Nk) in which 1 may "
            "be seen, or the true lengths as `kv_lens=`; added to the scores, it is `bias=`")
_WINDOW = ("here it is `window=(left, right)`, with None where others write -1 for unlimited: (-1, "
           "0) is `window=(None, 0)`")
_TOKENS = "W tokens, the query's own included, are `window=(W - 1, 0)`"
_PACKED = ("packed sequences are not in this version: pad to (B, H, N, d) and pass `q_lens=` and "
           "`kv_lens=`, or call once for each sequence")
_PAGED = "paged keys are not in this version: gather k and v, and pass `kv_lens=`"
_Q_LENS, _KV_LENS = (f"here it is `{name}=`, int32, one per batch entry"
                     for name in ("q_lens", "kv_lens"))
_CHOSEN = "leave it out: the kernel follows from the problem, `explain` says which and why"
_LAYOUT = ("leave it out: the sequence is the last axis but one, always; a (B, N, H, d) array is "
           "passed as `x.swapaxes(1, 2)`")
_CACHE = "join the new keys and values to the cached ones beforehand, and pass them as k and v"
_BAND = ("here it is `window=(left, right)`, which does not count the query's own key; "
         "`q_offset=0` aligns the first query and key")
_ABSENT = "this version does not have it"

# Words of PyTorch (scaled_dot_product_attention, MultiheadAttention, flex_attention), flash-attn,
# xFormers, JAX and tokamax, Keras, Transformers, FlashInfer, cuDNN and ONNX, and what each is here.
ELSEWHERE = {
    **dict.fromkeys(("softmax_scale", "sm_scale", "attn_scale", "logits_scale", "scaling"), _SCALE),
    **dict.fromkeys(("is_causal", "use_causal_mask", "use_causal_mask_bottom_right"), _CAUSAL),
    "diagonal_alignment": "leave it out: the last query and key are aligned, with `q_offset=0` the "
                          "first ones",
    **dict.fromkeys(("diagonal_band_left_bound", "diagonal_band_right_bound", "left_window_size",
                     "right_window_size"), _BAND),
    **dict.fromkeys(("logits_soft_cap", "logit_cap", "attn_logit_softcapping", "soft_cap"),
                    _SOFTCAP),
    **dict.fromkeys(("attn_mask", "custom_mask"), _EITHER),
    **dict.fromkeys(("attn_bias", "position_bias", "pair_bias", "relative_position_bias"), _BIAS),
    "attention_mask": _PADDING,
    "key_padding_mask": ("True hides a key there: pass `mask=~key_padding_mask[:, None, None, :]`, "
                         "or the true lengths as `kv_lens=`"),
    **dict.fromkeys(("window_size", "local_window_size"), f"{_WINDOW}; one number w is (w, w)"),
    **dict.fromkeys(("sliding_window", "sliding_window_length"), _TOKENS),
    "window_left": "here it is `window=(window_left, 0)`, with None for -1",
    **dict.fromkeys(("alibi", "slopes", "use_alibi_mask"), _ALIBI),
    **dict.fromkeys(("s_aux", "sinks", "learnable_sink", "sink_token"), _SINK),
    **dict.fromkeys(("query_seq_lengths", "seqused_q", "seq_len_q"), _Q_LENS),
    **dict.fromkeys(("key_value_seq_lengths", "seqused_k", "seq_len_kv", "cache_seqlens",
                     "nonpad_kv_seqlen"), _KV_LENS),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv", "cu_seq_len_q",
                     "cu_seq_len_kv", "max_seqlen", "max_seqlen_q", "max_seqlen_k",
                     "max_seqlen_kv", "qo_indptr", "kv_indptr"), _PACKED),
    **dict.fromkeys(("block_table", "page_table", "paging_info", "cache_batch_idx",
                     "paged_attention_k_table", "paged_attention_v_table"), _PAGED),
    "use_padding_mask": "leave it out: `q_lens=` and `kv_lens=` are enough",
    **dict.fromkeys(("past_key", "past_value"), _CACHE),
    **dict.fromkeys(("q_num_heads", "kv_num_heads"), "leave it out: the heads have an axis of "
                    "their own, as in `x.reshape(B, N, H, d).swapaxes(1, 2)`"),
    "enable_gqa": "leave it out: k and v may have fewer heads than q, and need no word for it",
    **dict.fromkeys(("dropout_p", "dropout", "dropout_mask", "dropout_rate", "p"), _NO_DROPOUT),
    **dict.fromkeys(("need_weights", "average_attn_weights", "output_attentions",
                     "return_attention_scores", "return_attn_probs", "qk_matmul_output_mode"),
                    _NO_MATRIX),
    **dict.fromkeys(("return_softmax_lse", "return_residual", "return_residuals", "return_aux",
                     "generate_stats"), _RETURN_LSE),
    **dict.fromkeys(("layout", "kv_layout", "input_layout", "qkv_format", "tensor_layout"),
                    _LAYOUT),
    **dict.fromkeys(("num_splits", "pack_gqa", "implementation", "backend", "kernel_options", "op",
                     "sm_margin", "softmax_precision"), _CHOSEN),
    "use_deterministic_algorithm": "here it is `deterministic=True`, where there are gradients",
    **dict.fromkeys(("score_mod", "mask_mod", "block_mask"), f"{_ABSENT}; what it hides is "
                    "`mask=`, what it adds is `bias=`"),
    **dict.fromkeys(("head_mask", "rotary_cos", "rotary_sin", "q_descale", "qv",
                     "attention_chunk"), _ABSENT),
}

_repr = Repr()
_repr.maxstring = _repr.maxother = 60


def shown(value):
    """A value as messages show it: arrays by kind and shape, all else in a few words.

    Of numbers in arrays, only NumPy's are read: others might have to be waited for.
    """
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and (shape or not isinstance(value, (np.generic, np.ndarray))):
        return f"a {kind_of(value)} of shape {shape}"
    return _repr.repr(value)


def described(value):
    """The same with the type of what is no array."""
    text, kind = shown(value), kind_of(value)
    return text if text.startswith(f"a {kind} of shape") else f"{text} of type {kind}"


def kind_of(value):
    """Module and name of a value's class."""
    module, name = type(value).__module__, type(value).__qualname__
    return name if module == "builtins" else f"{module}.{name}"


def exact(function):
    """Keep what only catches mistakes out of the signature that `help` and editors show."""
    signature = inspect.signature(function)
    kept = [p for p in signature.parameters.values() if p.name not in ("unnamed", "unknown")]
    function.__signature__ = signature.replace(parameters=kept)
    return function


def arguments_of(function, options):
    """Names that may be passed to a function; `options` are those behind its ``**options``."""
    parameters = inspect.signature(function).parameters
    return [name for name in parameters if name != "options"] + [
        name for name in options if "options" in parameters]


def refusal(function, unnamed, given, arguments):
    """The TypeError for arguments that a function does not have.

    Parameters
    ----------
    function : str
        Its name.
    unnamed : tuple
        Values that came by position, after the last that may.
    given : iterable of str
        Words that came.
    arguments : dict of str to list of str
        The names that each public function takes.
    """
    known = arguments[function]
    word = next((word for word in given if word not in known), None)
    if word is None:
        return TypeError(f"`{function}` got {shown(unnamed[0])} by position, expected no more than "
                         f"{', '.join(positional(known))} so: pass all else by name, as in "
                         "`causal=True` or `mask=mask`")
    answer = _answer(function, word, arguments)
    return TypeError(f"`{word}` is no argument of `{function}`: {answer}")


def positional(known):
    """The arguments that are passed by position: all up to `v`, in backward up to `lse`."""
    return known[: known.index("lse" if known[0] == "dout" else "v") + 1]


def _answer(function, word, arguments):
    """What to write in the place of a word that a function does not know."""
    import difflib

    if word in ELSEWHERE:
        return ELSEWHERE[word]
    owners = [f"`{name}`" for name, names in arguments.items()
              if word in names and name != "explain"]
    if owners:
        step = ", to be called in its place" if function == "attention_vjp" else ""
        return f"it is one of {' and '.join(owners)}{step}"
    near = difflib.get_close_matches(word.lower(), arguments[function], 1)
    if near:
        return f"did you mean `{near[0]}`?"
    return f"expected {', '.join(arguments[function])}"

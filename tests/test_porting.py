"""The porting guide: each line of its tables computes the same on both sides.

A library's own results are held against ours where it is installed. Ours in float64 are the truth,
and ours in float32 the baseline: the other's may err by no more than the rule allows.
"""

import importlib.util
import inspect
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from numerics import assert_as_accurate_as_baseline
from test_documents import blocks
from test_reference import onnx_attention

import cupy_flash as cf
from cupy_flash.words import ELSEWHERE

PAGE = Path(__file__).resolve().parents[1] / "docs" / "porting.md"
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.S))


def calls(section):
    """(left, right) of the lines of a section's table, as the texts of code spans; "" without."""
    for line in re.findall(r"^\| (.*) \|$", SECTIONS[section], re.MULTILINE):
        left, right = re.split(r" \| ", line)
        yield tuple(found[1] if (found := re.search("`([^`]+)`", cell)) else ""
                    for cell in (left, right))


def lines(section):
    """The lines of which the left side is a whole call, not an argument or a part of one."""
    return [(left, right) for left, right in calls(section)
            if right.startswith("cf.") and "(..." not in left and is_expression(left)]


def is_expression(code):
    """Whether Python can evaluate a text."""
    try:
        compile(code, "", "eval")
    except SyntaxError:
        return False
    return "(" in code


def names():
    """What the first code block of the page defines."""
    found = {}
    exec(next(block for _, block in blocks(PAGE)), found)
    return found


def widened(arrays):
    """The same with every float array in float64."""
    return {name: x.astype(np.float64) if getattr(x, "dtype", None) == np.float32 else x
            for name, x in arrays.items()}


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


def compare(left, right, theirs):
    """`theirs`, results in float32, against the right column."""
    here = names()
    truth, plain = (as_tuple(eval(right, dict(given))) for given in (widened(here), here))
    assert len(theirs) == len(truth)
    for got, want, baseline in zip(theirs, truth, plain, strict=True):
        assert got.dtype == np.float32
        assert_as_accurate_as_baseline(f"{left} and {right}", got, want,
                                       [(want, baseline.astype(np.float64))])


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("left, right", lines("NumPy"))
def test_numpy(left, right):
    compare(left, right, (eval(left, names() | {"softmax": softmax}).astype(np.float32),))


@pytest.mark.parametrize("left, right", lines("ONNX"))
def test_onnx(left, right):
    def attention(q, k, v, attn_mask=None, past_key=None, past_value=None, nonpad_kv_seqlen=None,
                  **attributes):
        if nonpad_kv_seqlen is not None:
            nonpad_kv_seqlen = nonpad_kv_seqlen.astype(np.int64)
        return onnx_attention(q, k, v, mask=attn_mask, past=(past_key, past_value),
                              kv_lens=nonpad_kv_seqlen, **attributes)

    wide = widened(names()) | {"attention": attention}
    compare(left, right, (eval(left, wide).astype(np.float32),))


@pytest.mark.parametrize("section", ["FlashAttention", "xFormers", "cuDNN"])
def test_our_column_runs(section):
    """Where the other library needs a GPU."""
    here = names()
    q, k, v = (here[name] for name in "qkv")
    here |= {"dout": np.ones_like(q)}
    for part, one in (("1", slice(0, 4)), ("2", slice(4, 7))):
        here["out" + part], here["lse" + part] = cf.attention(q, k[:, :, one], v[:, :, one],
                                                              return_lse=True)
    here["out"], here["lse"] = cf.attention(q, k, v, return_lse=True)
    ours = [right for _, right in calls(section) if right.startswith("cf.")]
    assert len(ours) >= 8
    for right in ours:
        assert eval(right, here) is not None


def test_a_wrong_line_is_found():
    line = "softmax(q @ k.swapaxes(2, 3)) @ v", "cf.attention(q, k, v)"
    with pytest.raises(AssertionError, match="exceeds"):
        test_numpy(*line)


# Arguments that only their own functions know: of the cache, of an array or of a gradient.
THEIRS = {"k", "v", "axis", "argnums", "hidden", "dBias", "dSink_token", "BLOCK_SIZE", "outs",
          "lses", "aux"}


def test_words_of_other_libraries_are_answered():
    """Each argument in a left column is one of ours, or its refusal says what to write."""
    found = set()
    for section in ("PyTorch", "FlexAttention", "JAX", "ONNX", "FlashAttention", "xFormers",
                    "cuDNN"):
        for line in re.findall(r"^\| (.*?) \| ", SECTIONS[section], re.MULTILINE):
            found |= {word for code in re.findall("`([^`]+)`", line)
                      for word in re.findall(r"(\w+)=(?!=)", code)}
    ours = {*inspect.signature(cf.attention).parameters,
            *inspect.signature(cf.attention_backward).parameters}
    assert len(found) > 40
    assert found - ours - {*ELSEWHERE} <= THEIRS, found - ours - {*ELSEWHERE} - THEIRS


if importlib.util.find_spec("torch"):
    import torch
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    def tensors():
        """The names of the page as tensors."""
        return {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x
                for name, x in names().items()} | {"torch": torch}

    @pytest.mark.parametrize("left, right", lines("PyTorch"))
    def test_pytorch(left, right):
        sdpa = torch.nn.functional.scaled_dot_product_attention
        given = tensors() | {"sdpa": sdpa, "upper_left": causal_upper_left,
                             "lower_right": causal_lower_right}
        compare(left, right, (eval(left, given).numpy(),))

    def test_our_attention_as_an_operation_of_pytorch():
        code = "\n".join(block for language, block in blocks(PAGE) if language == "python")
        exec(compile(code, PAGE.name, "exec"), {})

    @pytest.mark.parametrize("left, right", lines("FlexAttention"))
    def test_flex_attention(left, right):
        def made(f):
            return create_block_mask(f, None, None, 5, 7, device="cpu")

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")         # it would rather be compiled
            theirs = eval(left, tensors() | {"flex": flex_attention, "blocks": made,
                                             "aux": AuxRequest(lse=True)})
        if isinstance(theirs, tuple):
            theirs = theirs[0], theirs[1].lse
        compare(left, right, tuple(x.numpy() for x in as_tuple(theirs)))


if importlib.util.find_spec("jax"):
    import jax

    @pytest.mark.parametrize("left, right", lines("JAX"))
    def test_jax(left, right):
        swapped = {name: x.swapaxes(1, 2) if name in ("q", "k", "v", "k2", "v2") else x
                   for name, x in names().items()}
        theirs = as_tuple(eval(left, swapped | {"dpa": jax.nn.dot_product_attention}))
        compare(left, right, tuple(np.asarray(x).swapaxes(1, 2) for x in theirs))


def test_every_library_of_the_page_is_tested():
    tested = Path(__file__).read_text()
    assert all(f'"{section}"' in tested for section in SECTIONS
               if not section.startswith("What differs"))
    assert {section: len(lines(section)) for section in ("NumPy", "PyTorch", "FlexAttention", "JAX",
                                                         "ONNX")} == {
        "NumPy": 5, "PyTorch": 9, "FlexAttention": 13, "JAX": 10, "ONNX": 12}

"""What is wrong is refused before anything runs, by an error that names the argument.

It also says what came and what is expected.
"""

import re
import sys

import numpy as np
import pytest
from cases import DTYPES

import cupy_flash as cf

BFLOAT16 = DTYPES["bfloat16"]


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def good():
    """Arguments that both passes accept; a row of the tables changes some of them."""
    return {"q": zeros(2, 4, 7, 8), "k": zeros(2, 2, 9, 8), "v": zeros(2, 2, 9, 5)}


def good_backward():
    return good() | {"dout": zeros(2, 4, 7, 5), "out": zeros(2, 4, 7, 5), "lse": zeros(2, 4, 7)}


def call(arguments):
    return cf.attention(**arguments)


def call_backward(arguments):
    return cf.attention_backward(**arguments)


class Gpu:
    """Looks like an array in GPU memory to everyone who asks by protocol."""

    shape, dtype, ndim = (2, 2, 9, 8), np.dtype(np.float32), 4

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, **kwargs):
        raise AssertionError("an array on the GPU was to be read")


INF, NAN = float("inf"), float("nan")
MASK = np.ones((7, 9), bool)

# What is changed, the error, the argument it names, and words that it must contain: what came and
# what is expected.
BAD = {
    # dtypes and kinds of objects
    "q-list": ({"q": [[1.0]]}, TypeError, "q", ["list"]),
    "k-tuple": ({"k": ((1.0,),)}, TypeError, "k", ["tuple"]),
    "v-none": ({"v": None}, TypeError, "v", ["None"]),
    "q-scalar": ({"q": 1.0}, TypeError, "q", ["float"]),
    "q-int32": ({"q": zeros(2, 4, 7, 8, dtype=np.int32)}, TypeError, "q", ["int32", "float32"]),
    "q-complex": ({"q": zeros(2, 4, 7, 8, dtype=complex)}, TypeError, "q", ["complex128"]),
    "q-object": ({"q": zeros(2, 4, 7, 8, dtype=object)}, TypeError, "q", ["object"]),
    "all-uint16": ({n: zeros(2, 2, 9, 8, dtype=np.uint16) for n in "qkv"}, TypeError, "q",
                   ["uint16", "bfloat16"]),
    "all-longdouble": ({n: zeros(2, 2, 9, 8, dtype=np.longdouble) for n in "qkv"}, TypeError, "q",
                       [np.dtype(np.longdouble).name, "float64"]),
    "q-swapped-bytes": ({"q": zeros(2, 4, 7, 8, dtype=">f4")}, TypeError, "q", [">f4"]),
    "k-other-dtype": ({"k": zeros(2, 2, 9, 8, dtype=np.float64)}, TypeError, "k",
                      ["float64", "float32"]),
    "v-other-dtype": ({"v": zeros(2, 2, 9, 5, dtype=np.float16)}, TypeError, "v",
                      ["float16", "float32"]),
    "q-bfloat16": ({"q": zeros(2, 4, 7, 8, dtype=BFLOAT16)}, TypeError, "k",
                   ["float32", "bfloat16"]),
    "masked-array": ({"q": np.ma.zeros((2, 4, 7, 8), np.float32)}, TypeError, "q", ["Masked"]),
    "mixed": ({"k": Gpu()}, TypeError, "k", ["GPU", "CPU"]),
    "mixed-option": ({"bias": Gpu()}, TypeError, "bias", ["GPU", "CPU"]),
    # shapes
    "q-1d": ({"q": zeros(8)}, ValueError, "q", ["(8,)", "(H, N, d)"]),
    "q-5d": ({"q": zeros(1, 2, 4, 7, 8)}, ValueError, "q", ["(1, 2, 4, 7, 8)", "(B, H, N, d)"]),
    "k-3d": ({"k": zeros(2, 9, 8)}, ValueError, "k", ["(2, 9, 8)", "(2, 4, 7, 8)"]),
    "v-3d": ({"v": zeros(2, 9, 5)}, ValueError, "v", ["(2, 9, 5)"]),
    "q-head-dim-0": ({"q": zeros(2, 4, 7, 0), "k": zeros(2, 2, 9, 0)}, ValueError, "q",
                     ["0", "1", "256"]),
    "q-head-dim-257": ({"q": zeros(2, 4, 7, 257), "k": zeros(2, 2, 9, 257)}, ValueError, "q",
                       ["257", "256"]),
    "v-head-dim-0": ({"v": zeros(2, 2, 9, 0)}, ValueError, "v", ["0", "256"]),
    "v-head-dim-257": ({"v": zeros(2, 2, 9, 257)}, ValueError, "v", ["257", "256"]),
    "k-head-dim": ({"k": zeros(2, 2, 9, 6)}, ValueError, "k", ["6", "8"]),
    "v-length": ({"v": zeros(2, 2, 10, 5)}, ValueError, "v", ["10", "9"]),
    "v-heads": ({"v": zeros(2, 4, 9, 5)}, ValueError, "v", ["(2, 4, 9, 5)", "(2, 2, 9, 8)"]),
    "v-batch": ({"v": zeros(1, 2, 9, 5)}, ValueError, "v", ["(1, 2, 9, 5)", "(2, 2, 9, 8)"]),
    "k-batch-1": ({"k": zeros(1, 2, 9, 8), "v": zeros(1, 2, 9, 5)}, ValueError, "k",
                  ["1", "2", "(B, H, N, d)"]),
    "heads-3-2": ({"q": zeros(2, 3, 7, 8)}, ValueError, "q", ["3", "2"]),
    "heads-2-4": ({"q": zeros(2, 2, 7, 8), "k": zeros(2, 4, 9, 8), "v": zeros(2, 4, 9, 5)},
                  ValueError, "q", ["2", "4"]),
    "heads-4-0": ({"k": zeros(2, 0, 9, 8), "v": zeros(2, 0, 9, 5)}, ValueError, "q", ["4", "0"]),
    # numbers
    "scale-nan": ({"scale": NAN}, ValueError, "scale", ["nan", "finite"]),
    "scale-inf": ({"scale": -INF}, ValueError, "scale", ["inf", "finite"]),
    "scale-string": ({"scale": "0.1"}, TypeError, "scale", ["str"]),
    "scale-complex": ({"scale": 1j}, TypeError, "scale", ["complex"]),
    "scale-array": ({"scale": np.ones(1)}, TypeError, "scale", ["ndarray"]),
    "scale-gpu": ({"scale": Gpu()}, TypeError, "scale", ["Gpu"]),
    "scale-huge": ({"scale": 10**400}, ValueError, "scale", ["finite"]),
    "softcap-negative": ({"softcap": -1.0}, ValueError, "softcap", ["-1"]),
    "softcap-nan": ({"softcap": NAN}, ValueError, "softcap", ["nan"]),
    "softcap-string": ({"softcap": "x"}, TypeError, "softcap", ["str"]),
    "causal-string": ({"causal": "no"}, TypeError, "causal", ["no", "bool"]),
    "causal-none": ({"causal": None}, TypeError, "causal", ["None", "bool"]),
    "q_offset-float": ({"q_offset": 1.5}, TypeError, "q_offset", ["1.5", "integer"]),
    "q_offset-array": ({"q_offset": np.array([1, 2])}, TypeError, "q_offset", ["integer"]),
    "window-int": ({"window": 5}, TypeError, "window", ["5", "left"]),
    "window-negative": ({"window": (-1, 2)}, ValueError, "window", ["-1", "0"]),
    "window-negative-right": ({"window": (2, -1)}, ValueError, "window", ["-1", "0"]),
    "window-float": ({"window": (2.0, 1)}, TypeError, "window", ["2.0", "integer"]),
    "window-three": ({"window": (1, 2, 3)}, (TypeError, ValueError), "window", ["(1, 2, 3)"]),
    # masks and biases
    "mask-float": ({"mask": MASK.astype(np.float32)}, TypeError, "mask", ["float32", "bool"]),
    "mask-int8": ({"mask": MASK.view(np.int8)}, TypeError, "mask", ["int8", "bool"]),
    "mask-list": ({"mask": MASK.tolist()}, TypeError, "mask", ["list"]),
    "mask-shape": ({"mask": MASK.T}, ValueError, "mask", ["(9, 7)", "(2, 4, 7, 9)"]),
    "mask-batch": ({"mask": np.ones((3, 1, 7, 9), bool)}, ValueError, "mask",
                   ["(3, 1, 7, 9)", "(2, 4, 7, 9)"]),
    "mask-key-heads": ({"mask": np.ones((2, 7, 9), bool)}, ValueError, "mask", ["(2, 7, 9)"]),
    "mask-5d": ({"mask": np.ones((1, 1, 1, 7, 9), bool)}, ValueError, "mask", ["(1, 1, 1, 7, 9)"]),
    "bias-int": ({"bias": zeros(7, 9, dtype=np.int64)}, TypeError, "bias", ["int64", "float32"]),
    "bias-bool": ({"bias": MASK}, TypeError, "bias", ["bool"]),
    "bias-shape": ({"bias": zeros(7, 8)}, ValueError, "bias", ["(7, 8)", "(2, 4, 7, 9)"]),
    "bias-list": ({"bias": [0.0] * 9}, TypeError, "bias", ["list"]),
    "slopes-int": ({"alibi_slopes": zeros(4, dtype=np.int32)}, TypeError, "alibi_slopes",
                   ["int32", "float32"]),
    "slopes-heads": ({"alibi_slopes": zeros(2)}, ValueError, "alibi_slopes", ["(2,)", "(4,)"]),
    "slopes-batch": ({"alibi_slopes": zeros(3, 4)}, ValueError, "alibi_slopes",
                     ["(3, 4)", "(2, 4)"]),
    "slopes-float": ({"alibi_slopes": 0.5}, TypeError, "alibi_slopes", ["float"]),
    # lengths
    "lens-list": ({"kv_lens": [3, 4]}, TypeError, "kv_lens", ["list"]),
    "lens-int64": ({"kv_lens": np.array([3, 4])}, TypeError, "kv_lens", ["int64", "int32"]),
    "lens-shape": ({"kv_lens": np.array([3], np.int32)}, ValueError, "kv_lens", ["(1,)", "(2,)"]),
    "kv-lens-large": ({"kv_lens": np.array([3, 10], np.int32)}, ValueError, "kv_lens", ["10", "9"]),
    "kv-lens-negative": ({"kv_lens": np.array([-1, 3], np.int32)}, ValueError, "kv_lens",
                         ["-1", "9"]),
    "q-lens-large": ({"q_lens": np.array([8, 7], np.int32)}, ValueError, "q_lens", ["8", "7"]),
    "q-lens-float": ({"q_lens": zeros(2)}, TypeError, "q_lens", ["float32", "int32"]),
    # precision
    "precision-word": ({"precision": "fast"}, ValueError, "precision", ["fast", "tf32"]),
    "precision-float64": ({n: zeros(2, 2, 9, 8, dtype=np.float64) for n in "qkv"}
                          | {"precision": "tf32"}, ValueError, "precision", ["float64", "float32"]),
    "precision-float16": ({n: zeros(2, 2, 9, 8, dtype=np.float16) for n in "qkv"}
                          | {"precision": "tf32x3"}, ValueError, "precision",
                          ["float16", "float32"]),
}

BAD_FORWARD = {
    "out-dtype": ({"out": zeros(2, 4, 7, 5, dtype=np.float64)}, TypeError, "out",
                  ["float64", "float32"]),
    "out-shape": ({"out": zeros(2, 4, 7, 8)}, ValueError, "out", ["(2, 4, 7, 8)", "(2, 4, 7, 5)"]),
    "out-list": ({"out": [0.0]}, TypeError, "out", ["list"]),
    "out-of-a-wide-dtype": ({"out": zeros(2, 4, 7, 5), "out_dtype": np.float64},
                            (TypeError, ValueError), "out(_dtype)?", ["float64"]),
    "out_dtype-float16": ({"out_dtype": np.float16}, (TypeError, ValueError), "out_dtype",
                          ["float16", "float32"]),
    "out_dtype-float64": ({"out_dtype": np.float64}, (TypeError, ValueError), "out_dtype",
                          ["float64", "float32"]),
    "out_dtype-int": ({"out_dtype": np.int32}, (TypeError, ValueError), "out_dtype", ["int32"]),
    "out_dtype-word": ({"out_dtype": "nothing"}, (TypeError, ValueError), "out_dtype", ["nothing"]),
}

BAD_BACKWARD = {
    "mixed": ({"dout": Gpu()}, TypeError, "dout", ["GPU", "CPU"]),
    "dout-dtype": ({"dout": zeros(2, 4, 7, 5, dtype=np.float16)}, TypeError, "dout",
                   ["float16", "float32"]),
    "dout-float64": ({"dout": zeros(2, 4, 7, 5, dtype=np.float64)}, TypeError, "dout",
                     ["float64", "float32"]),
    "dout-shape": ({"dout": zeros(2, 4, 7, 8)}, ValueError, "dout",
                   ["(2, 4, 7, 8)", "(2, 4, 7, 5)"]),
    "dout-none": ({"dout": None}, TypeError, "dout", ["None"]),
    "out-shape": ({"out": zeros(2, 4, 7, 8)}, ValueError, "out", ["(2, 4, 7, 8)", "(2, 4, 7, 5)"]),
    "out-dtype": ({"out": zeros(2, 4, 7, 5, dtype=np.float64)}, TypeError, "out", ["float64"]),
    "out-none": ({"out": None}, TypeError, "out", ["None"]),
    "lse-dtype": ({"lse": zeros(2, 4, 7, dtype=np.float64)}, TypeError, "lse",
                  ["float64", "float32"]),
    "lse-shape": ({"lse": zeros(2, 4, 7, 1)}, ValueError, "lse", ["(2, 4, 7, 1)", "(2, 4, 7)"]),
    "lse-none": ({"lse": None}, TypeError, "lse", ["None"]),
    "dlse-dtype": ({"dlse": zeros(2, 4, 7, dtype=np.float16)}, TypeError, "dlse",
                   ["float16", "float32"]),
    "dlse-shape": ({"dlse": zeros(2, 7, 4)}, ValueError, "dlse", ["(2, 7, 4)", "(2, 4, 7)"]),
    "deterministic": ({"deterministic": "yes"}, TypeError, "deterministic", ["yes", "bool"]),
    "grad_dtype": ({"grad_dtype": np.float16}, (TypeError, ValueError), "grad_dtype",
                   ["float16", "float32"]),
    "dq-dtype": ({"dq": zeros(2, 4, 7, 8, dtype=np.float64)}, TypeError, "dq",
                 ["float64", "float32"]),
    "dk-shape": ({"dk": zeros(2, 4, 9, 8)}, ValueError, "dk", ["(2, 4, 9, 8)", "(2, 2, 9, 8)"]),
    "dv-shape": ({"dv": zeros(2, 2, 9, 8)}, ValueError, "dv", ["(2, 2, 9, 8)", "(2, 2, 9, 5)"]),
    "dq-list": ({"dq": []}, TypeError, "dq", ["list"]),
    "wrt-string": ({"wrt": "q"}, TypeError, "wrt", ["q", "str", "tuple"]),
    "wrt-word": ({"wrt": "all"}, TypeError, "wrt", ["all", "str", "tuple"]),
    "wrt-set": ({"wrt": {"q"}}, TypeError, "wrt", ["set", "tuple"]),
    "wrt-flag": ({"wrt": True}, TypeError, "wrt", ["True", "bool", "tuple"]),
    "wrt-arrays": ({"wrt": (zeros(2, 4, 7, 8),)}, TypeError, "wrt", ["(2, 4, 7, 8)", "names"]),
    "wrt-empty": ({"wrt": ()}, ValueError, "wrt", ["()", "one name or more"]),
    "wrt-gradient": ({"wrt": ("dq",)}, ValueError, "wrt", ["dq", 'wrt=("q",)']),
    "wrt-twice": ({"wrt": ("q", "k", "q")}, ValueError, "wrt", ["once"]),
    "wrt-no-bias": ({"wrt": ("q", "bias")}, ValueError, "wrt", ["bias", "('q',)"]),
    "wrt-no-bias-alone": ({"wrt": ("bias",)}, ValueError, "wrt", ["bias="]),
    "dk-not-wanted": ({"dk": zeros(2, 2, 9, 8), "wrt": ("q",)}, ValueError, "dk",
                      ["wrt", "('q',)", "add 'k'"]),
}


def check(function, arguments, row):
    """The error of `row`: its type, the argument it names first, and the words in it."""
    changes, error, name, words = row
    with pytest.raises(error) as raised:
        function(arguments | changes)
    message = str(raised.value)
    assert re.match(rf"`{name}`", message), message
    for word in words:
        found = re.search(rf"(?<!\w){re.escape(word)}(?!\d)", message)
        assert found, f"{word!r} is not in {message!r}"


@pytest.mark.parametrize("label", BAD)
def test_bad_arguments_of_both_passes(label):
    check(call, good(), BAD[label])
    check(call_backward, good_backward(), BAD[label])
    changes, error, name, _ = BAD[label]
    for function in (cf.explain, cf.attention_vjp):
        with pytest.raises(error, match=f"^`{name}`"):
            function(**good() | changes)


@pytest.mark.parametrize("label", BAD_FORWARD)
def test_bad_arguments_of_forward(label):
    check(call, good(), BAD_FORWARD[label])


@pytest.mark.parametrize("label", BAD_BACKWARD)
def test_bad_arguments_of_backward(label):
    check(call_backward, good_backward(), BAD_BACKWARD[label])


def test_arrays_on_a_gpu_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    for function, arguments in ((call, good()), (call_backward, good_backward())):
        on_gpu = {name: Gpu() for name in arguments}
        check(function, arguments, (on_gpu, NotImplementedError, "q", ["GPU", "CuPy", "NumPy"]))


def test_the_good_arguments_are_good():
    assert call(good()).shape == (2, 4, 7, 5)
    assert call_backward(good_backward()).dv.shape == (2, 2, 9, 5)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "mask"])
def test_out_that_overlaps_an_input(name):
    shared = np.zeros(4096, np.float32)
    shapes = {"q": (2, 4, 7, 8), "k": (2, 2, 9, 8), "v": (2, 2, 9, 5), "bias": (7, 9)}
    arguments = good()
    if name == "mask":
        arguments["mask"] = shared.view(bool)[1:64].reshape(7, 9)
    else:
        arguments[name] = shared[: np.prod(shapes[name])].reshape(shapes[name])
    arguments["out"] = shared[8 : 8 + 280].reshape(2, 4, 7, 5)
    with pytest.raises(ValueError, match=f"^`out` overlaps `{name}`"):
        call(arguments)
    arguments["out"] = shared[2048 : 2048 + 280].reshape(2, 4, 7, 5)
    call(arguments)


def test_out_between_the_rows_of_an_input_is_no_overlap():
    """Interleaved memory that shares no element is fine."""
    shared = np.zeros((2, 4, 7, 13), np.float32)
    assert call(good() | {"q": shared[..., :8], "out": shared[..., 8:]}).shape == (2, 4, 7, 5)
    with pytest.raises(ValueError, match=r"^`out` overlaps `q`"):
        call(good() | {"q": shared[..., :8], "out": shared[..., 7:12]})


@pytest.mark.parametrize("buffer, other", [("dq", "q"), ("dk", "k"), ("dv", "v"), ("dq", "dout"),
                                           ("dk", "out"), ("dq", "lse"), ("dk", "dq"), ("dv", "dk"),
                                           ("dv", "dlse")])
def test_gradient_buffers_that_overlap(buffer, other):
    shared = np.zeros(4096, np.float32)
    shapes = {"q": (2, 4, 7, 8), "k": (2, 2, 9, 8), "v": (2, 2, 9, 5), "dout": (2, 4, 7, 5),
              "out": (2, 4, 7, 5), "lse": (2, 4, 7), "dlse": (2, 4, 7), "dq": (2, 4, 7, 8),
              "dk": (2, 2, 9, 8), "dv": (2, 2, 9, 5)}
    arguments = good_backward()
    for name in (buffer, other):
        arguments[name] = shared[: np.prod(shapes[name])].reshape(shapes[name])
    with pytest.raises(ValueError, match=f"^`({buffer}|{other})` overlaps `({buffer}|{other})`"):
        call_backward(arguments)


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_buffers_that_cannot_hold_a_result(name):
    shapes = {"out": (2, 4, 7, 5), "dq": (2, 4, 7, 8), "dk": (2, 2, 9, 8), "dv": (2, 2, 9, 5)}
    function, arguments = ((call, good()) if name == "out" else (call_backward, good_backward()))
    read_only = np.zeros(shapes[name], np.float32)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match=f"^`{name}` .*read-only"):
        function(arguments | {name: read_only})
    one_row = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), shapes[name], (0, 0, 0, 4))
    with pytest.raises(ValueError, match=f"^`{name}` .*overlap"):
        function(arguments | {name: one_row})


def test_a_refused_call_leaves_the_buffers_alone():
    out = np.full((2, 4, 7, 5), 777, np.float32)
    with pytest.raises(TypeError):
        call(good() | {"out": out, "mask": MASK.astype(np.float32)})
    assert (out == 777).all()


def test_unknown_options_are_no_options():
    for function, arguments in ((call, good()), (call_backward, good_backward())):
        for option in ("dropout_p", "is_causal", "attn_mask", "sm_scale", "layout"):
            with pytest.raises(TypeError, match=option):
                function(arguments | {option: 1})
    with pytest.raises(TypeError):
        cf.attention(zeros(7, 8), zeros(9, 8), zeros(9, 8), 0.5)


def test_options_mean_the_same_in_every_function():
    """Same words, same defaults: forward, backward, vjp and explain."""
    arguments = good() | {"scale": 0.5, "causal": True, "q_offset": 1, "window": (3, None),
                          "mask": MASK, "bias": zeros(7, 9), "softcap": 2.0,
                          "alibi_slopes": zeros(4), "q_lens": np.array([7, 3], np.int32),
                          "kv_lens": np.array([9, 1], np.int32), "precision": "tf32"}
    call(arguments)
    call_backward(good_backward() | arguments)
    cf.attention_vjp(**arguments)[1](zeros(2, 4, 7, 5))
    assert isinstance(cf.explain(**arguments), str)

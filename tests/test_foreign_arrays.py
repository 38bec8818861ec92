"""Arrays of other libraries in CPU memory, and classes that mean more than numbers; what comes in.

The tensors are stand-ins with the protocols of PyTorch's and JAX's. bfloat16 comes as these two
hand it out: a DLPack capsule that NumPy refuses.
"""

import ctypes
import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

import cupy_flash as cf
from cupy_flash import dlpack

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
X = np.random.default_rng(0).standard_normal((2, 4, 7, 8)).astype(np.float32)
LSE = np.zeros((2, 4, 7), np.float32)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi))


class Exporter:
    """An array of another library, in CPU memory."""

    def __init__(self, x, **state):
        self.x = x
        self.__dict__ |= state

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **asked):
        return self.x.__dlpack__(**asked)


class Bfloat16(Exporter):
    """The same of bfloat16: NumPy's capsule of the bits, with the code of the other elements.

    `code` is DLPack's kind, 4 for bfloat16; `versioned` is whether the exporter knows DLPack 1.
    """

    code, versioned = 4, True

    def __init__(self, x):
        super().__init__(x.view(np.uint16))

    def __dlpack__(self, **asked):
        if not self.versioned and asked:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        capsule = self.x.__dlpack__(**asked)
        if asked.get("max_version"):
            tensor = dlpack._Versioned.from_address(_pointer(capsule, b"dltensor_versioned")).tensor
        else:
            tensor = dlpack._Tensor.from_address(_pointer(capsule, b"dltensor"))
        tensor.code = self.code
        return capsule


class Old(Bfloat16):
    versioned = False


class Failing(Exporter):
    """One whose export fails with an error of its own."""

    error = BufferError("not today")

    def __dlpack__(self, **_):
        raise self.error


def same(a, b):
    """Whether two arrays have the same bits."""
    return a.dtype == b.dtype and (a.view(np.uint16) == b.view(np.uint16)).all()


# bfloat16 in CPU memory


@pytest.mark.parametrize("exporter", [Bfloat16, Old])
def test_bfloat16_is_taken_in_without_a_copy(exporter):
    x = X.astype(BFLOAT16)
    for view in (x, x[..., ::2], x[:, ::-1, 1:, :], x.swapaxes(1, 2), x[0, 0], x[:0]):
        taken = cf.intake.take("q", exporter(view))
        assert taken.dtype == BFLOAT16 and taken.shape == view.shape
        assert view.size == 0 or (taken.strides == view.strides and taken.ctypes.data
                                  == view.ctypes.data)
        assert same(np.ascontiguousarray(taken), np.ascontiguousarray(view))


def test_attention_over_bfloat16_of_another_library():
    q, k, v = (X.astype(BFLOAT16), X[:, :2].astype(BFLOAT16), X[:, 2:, :, :5].astype(BFLOAT16))
    want, want_lse = cf.attention(q, k, v, causal=True, return_lse=True)
    for exporter in (Bfloat16, Old):
        out, lse = cf.attention(*map(exporter, (q, k, v)), causal=True, return_lse=True,
                                bias=exporter(np.zeros(7, BFLOAT16)))
        assert same(out, want) and (lse == want_lse).all()
    buffer = np.empty_like(want)
    result = cf.attention(q, k, v, causal=True, out=(wrapped := Bfloat16(buffer)))
    assert result is wrapped and same(buffer, want)


def test_memory_of_which_nothing_is_known_is_no_result():
    """An exporter without a version cannot say that its memory may be written to."""
    x = X.astype(BFLOAT16)
    with pytest.raises(ValueError, match=r"^`out` .*read-only"):
        cf.attention(x, x, x, out=Old(np.empty_like(x)))
    frozen = np.empty_like(x)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match=r"^`out` .*read-only"):
        cf.attention(x, x, x, out=Bfloat16(frozen))


@pytest.mark.parametrize("exporter", [Bfloat16, Old])
def test_the_memory_lives_as_long_as_what_looks_at_it(exporter):
    class Memory(np.ndarray):
        """Of which the end is seen."""

    bits = np.zeros((50, 8), np.uint16).view(Memory)
    end = weakref.ref(bits)
    exported = exporter(np.zeros((1, 1), BFLOAT16))
    exported.x = bits
    taken = cf.intake.take("q", exported)[3:]
    del bits, exported
    gc.collect()
    assert end() is not None
    del taken
    gc.collect()
    assert end() is None


def test_other_elements_are_no_bfloat16():
    class Float8(Bfloat16):
        code = 10

    with pytest.raises(TypeError, match=r"^`k` is a .*DLPack's kind 10.*: pass a NumPy array"):
        cf.attention(X, Float8(X.astype(BFLOAT16)), X)


def test_a_later_dlpack_is_not_guessed(monkeypatch):
    monkeypatch.setattr(dlpack, "_VERSION", 2)
    with pytest.raises(TypeError, match=r"^`q` .*DLPack has version 1, expected 2"):
        x = Bfloat16(X.astype(BFLOAT16))
        x.__class__ = type("Later", (Bfloat16,), {
            "__dlpack__": lambda self, **_: Bfloat16.__dlpack__(self, max_version=(1, 0))})
        cf.attention(x, x, x)


# What an exporter raises


class Raised(Exception):
    """Of another library, derived from nothing that is known here."""


@pytest.mark.parametrize("error", [BufferError("a"), RuntimeError("b"), TypeError("c"), Raised("d"),
                                   NotImplementedError("e"), AttributeError("f")], ids=repr)
def test_errors_of_others_name_the_argument(error):
    bad = Failing(X)
    bad.error = error
    for name, call in {
        "q": lambda: cf.attention(bad, X, X), "v": lambda: cf.attention(X, X, bad),
        "bias": lambda: cf.attention(X, X, X, bias=bad),
        "dlse": lambda: cf.attention_backward(X, X, X, X, X, LSE, dlse=bad),
        "out": lambda: cf.explain(X, X, X, out=bad),
    }.items():
        with pytest.raises(TypeError, match=rf"^`{name}` .*{error}.*: pass "):
            call()

    class NoDevice(Exporter):
        def __dlpack_device__(self):
            raise error

    with pytest.raises(TypeError, match=rf"^`q` .*no device.*{error}.*: pass "):
        cf.attention(NoDevice(X), X, X)


STATES = {
    "requires_grad": "`q.detach()`",
    "is_sparse": "`q.to_dense()`",
    "is_sparse_csr": "`q.to_dense()`",
    "is_quantized": "`q.dequantize()`",
    "is_nested": "`q.to_padded_tensor(0.0)`",
    "is_meta": "one with memory, to `explain` `np.empty(shape, dtype)`",
    "is_deleted": "one that lives",
}


@pytest.mark.parametrize("state", STATES)
def test_tensors_that_are_not_their_elements(state):
    """They refuse to be exported; why, is told by a method or an attribute."""
    for value in (True, lambda: True):
        with pytest.raises(TypeError) as raised:
            cf.attention(Failing(X, **{state: value}), X, X)
        text = str(raised.value)
        assert text.startswith("`q` is a ") and f"pass {STATES[state]}" in text
    for value in (False, lambda: False):
        assert (cf.attention(Exporter(X, **{state: value}), X, X) == cf.attention(X, X, X)).all()


def test_a_view_with_the_wrong_sign_is_not_taken_in():
    """PyTorch exports the memory of ``x.conj().imag`` without a word about its sign."""
    class Signed(Exporter):
        negative = False

        def is_neg(self):
            return self.negative

    with pytest.raises(TypeError, match=r"^`q` is a .*negative bit.*pass `q.resolve_neg\(\)`"):
        cf.attention(Signed(X, negative=True), X, X)
    assert (cf.attention(Signed(X), X, X) == cf.attention(X, X, X)).all()


@pytest.mark.parametrize("kind, words", [(8, "kind 8"), (10, "kind 10")])
def test_devices_that_are_neither(kind, words):
    """Metal and ROCm: CuPy for CUDA would not help there."""
    class There(Exporter):
        def __dlpack_device__(self):
            return kind, 0

    with pytest.raises(TypeError, match=rf"^`q` is .*{words}, expected CPU memory or an NVIDIA"):
        cf.attention(*[There(X)] * 3)


# Classes that mean more than numbers


class Memmap(np.ndarray):
    """A subclass that adds nothing to the meaning, as np.memmap."""

    def __array_finalize__(self, other):
        self.note = getattr(other, "note", None)

    def __array_wrap__(self, *args):
        return super().__array_wrap__(*args)


class Units(np.ndarray):
    def __array_ufunc__(self, *args, **kwargs):
        return NotImplemented


class Functions(np.ndarray):
    def __array_function__(self, *args, **kwargs):
        return NotImplemented


class Product(np.ndarray):
    def __matmul__(self, other):
        return NotImplemented


def everywhere(arrays, value):
    """Calls with an array in the place of each; `value` makes it of a given array."""
    forward, backward, options, parts = arrays
    for name in forward | options:
        yield name, lambda name=name: cf.attention(**forward | {name: value(
            (forward | options)[name])})
    for name in backward:
        yield name, lambda name=name: cf.attention_backward(**forward | backward | {
            name: value(backward[name])})
    for name in parts:
        yield name, lambda name=name: cf.merge(**parts | {name: [value(x) for x in parts[name]]})


def arguments():
    """Good arguments of all functions."""
    return ({"q": X, "k": X, "v": X},
            {"dout": X, "out": X, "lse": LSE, "dlse": LSE, "dq": np.empty_like(X),
             "dk": np.empty_like(X), "dv": np.empty_like(X)},
            {"mask": np.ones((7, 7), bool), "bias": np.zeros((7, 7), np.float32),
             "alibi_slopes": np.zeros(4, np.float32), "q_lens": np.int32([7, 3]),
             "kv_lens": np.int32([1, 7]), "out": np.empty_like(X)},
            {"outs": [X], "lses": [LSE]})


@pytest.mark.parametrize("kind", [Units, Functions, Product, np.matrix, np.ma.MaskedArray])
def test_classes_with_a_meaning_are_refused_everywhere(kind):
    def value(x):
        return x.reshape(-1, x.shape[-1]).view(kind) if kind is np.matrix else x.view(kind)

    for name, call in everywhere(arguments(), value):
        with pytest.raises(TypeError, match=rf"^`{name}`.* is a .*more than numbers.*: pass `"):
            call()


@pytest.mark.parametrize("kind", [Memmap, np.memmap, np.recarray])
def test_classes_without_a_meaning_of_their_own_are_arrays(kind):
    for _, call in everywhere(arguments(), lambda x: x.view(kind)):
        call()
    out = cf.attention(X.view(kind), X, X)
    assert type(out) is np.ndarray


def test_a_number_with_a_unit_is_no_scale():
    with pytest.raises(TypeError, match=r"^`scale` is a .*Units"):
        cf.attention(X, X, X, scale=np.array(0.5).view(Units))


def test_a_wrapper_that_hands_attributes_on_is_no_array():
    """As pint.Quantity: its unit would be lost."""
    class Wrapper:
        def __init__(self, x):
            self.x = x

        def __getattr__(self, name):
            return getattr(self.x, name)

    with pytest.raises(TypeError, match=r"^`k` is a .*Wrapper.*: pass `np.asarray\(k\)`|pass an"):
        cf.attention(X, Wrapper(X), X)


def tensor(**members):
    """A class as torch.Tensor, and one derived from it with some members of its own."""
    def plain(*_):
        return NotImplemented

    base = type("Tensor", (Exporter,), {"__module__": "torch", "__torch_dispatch__": plain,
                                        "__torch_function__": plain})
    return base, type("Derived", (base,), members)


def test_tensors_of_a_class_of_their_own():
    """A FakeTensor has no elements at all: its memory would be another's."""
    base, derived = tensor()
    assert (cf.attention(base(X), derived(X), X) == cf.attention(X, X, X)).all()
    for hook in ("__torch_dispatch__", "__torch_function__"):
        _, derived = tensor(**{hook: lambda *_: None})
        with pytest.raises(TypeError, match=r"^`q` is a .*Derived.*more than numbers"):
            cf.attention(derived(X), X, X)
    _, parameter = tensor(__torch_function__=None, __module__="torch.nn.parameter")
    assert (cf.attention(parameter(X), X, X) == cf.attention(X, X, X)).all()


class Tracer:
    """What JAX traces a function with."""

    __module__ = "jax"
    shape = ()

    def __float__(self):
        raise RuntimeError("a traced value was asked for its number")

    __bool__ = __index__ = __array__ = __float__


def test_traced_values():
    for name in ("q", "mask"):
        with pytest.raises(TypeError, match=rf"^`{name}` .*`jax.pure_callback`"):
            cf.attention(**{"q": X, "k": X, "v": X, name: Tracer()})
    for name in ("scale", "softcap", "causal"):
        with pytest.raises(TypeError, match=rf"^`{name}` .*JAX traces it.*static_argnames"):
            cf.attention(X, X, X, **{name: Tracer()})


class Frame:
    """A table, as pandas.DataFrame."""

    def to_numpy(self):
        return X[0, 0]

    __array__ = to_numpy


class Sparse:
    """A sparse matrix, as SciPy's."""

    def toarray(self):
        return X[0, 0]


class Lazy:
    """An array that is computed when asked for, as Dask's."""

    def __array__(self, dtype=None, copy=None):
        return X[0, 0]


@pytest.mark.parametrize("kind, step", [(Frame, "k.to_numpy()"), (Sparse, "k.toarray()"),
                                        (Lazy, "np.asarray(k)")])
def test_other_containers_are_told_what_to_call(kind, step):
    x, k = X[0, 0], kind()
    with pytest.raises(TypeError) as raised:
        cf.attention(x, k, x)
    assert str(raised.value).endswith(f": pass `{step}`")
    cf.attention(x, eval(step, {"k": k, "np": np}), x)

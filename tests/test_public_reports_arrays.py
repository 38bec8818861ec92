"""Faults that users of attention kernels met, as small inputs with the answers worked out by hand.

This file: zero extents, strides and alignment, wrong layouts, chunks of keys, scalars, dtypes.
"""

import ml_dtypes
import numpy as np
import pytest
from answers import answers_to, judge
from cases import DTYPES, Case, inputs
from numerics import assert_bit_equal, fenced
from test_backward import assert_same_gradients, gradients
from test_forward import attend

import cupy_flash as cf

ALL = tuple(DTYPES)
BFLOAT16 = DTYPES["bfloat16"]


def everything(backend, x):
    """Forward and all gradients of `x` in one dict."""
    out, lse = attend(backend, x)
    return {"out": out, "lse": lse, **gradients(backend, x, deterministic=True)}


# G1: a size of zero is a size.


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("sizes", [
    {"B": 0}, {"Hq": 0, "Hk": 0}, {"Nq": 0}, {"Nk": 0}, {"Nq": 0, "Nk": 0}, {"B": 0, "Nk": 0},
    {"Hq": 0, "Hk": 2}, {"ndim": 3, "Nk": 0}, {"ndim": 2, "Hq": 1, "Hk": 1, "Nq": 0},
    {"ndim": 3, "Hq": 0, "Hk": 0},
], ids=str)
def test_zero_extents(backend, sizes, dtype):
    full = {"Nq": 5, "Nk": 7, "d": 8, "d_v": 4, "B": 2, "Hq": 4, "Hk": 2, "dtype": dtype} | sizes
    for options in ({}, {"causal": True}, {"window": (2, 1)}, {"bias": "hqk"}, {"softcap": 2.0},
                    {"alibi": "h", "causal": True}):
        x = inputs(Case("zero", **full, **options))
        x.options["mask"] = np.ones((full["Nq"], full["Nk"]), bool)
        got = everything(backend, x)
        judge(f"{sizes} {options}", got, *answers_to(x))
        assert got["out"].dtype == x.q.dtype
        if full["Nk"] == 0:
            assert (got["out"] == 0).all() and (got["lse"] == -np.inf).all()
            assert (got["dq"] == 0).all() and got["dk"].shape == x.k.shape


def test_zero_lengths_and_no_batch(backend):
    x = inputs(Case("lens", Nq=5, Nk=7, d=8, B=2, q_lens=(0, 0), kv_lens=(0, 0), causal=True))
    got = everything(backend, x)
    judge("lens", got, *answers_to(x))
    empty = inputs(Case("lens", Nq=5, Nk=7, d=8, B=0, q_lens=(), kv_lens=()))
    assert everything(backend, empty)["out"].shape == (0, 2, 5, 8)


def test_a_head_dimension_of_zero_is_an_error():
    with pytest.raises(ValueError, match="`q` has head dim 0"):
        cf.attention(*[np.zeros((3, 0), np.float32)] * 3)


# H1: each array has strides of its own.


def through_model_layout(x):
    """(B, H, N, d) as a transposed view of (B, N, H * d)."""
    B, H, N, d = x.shape
    return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(B, N, H * d).reshape(
        B, N, H, d).swapaxes(1, 2)


@pytest.mark.parametrize("dtype", ALL)
def test_q_k_and_v_in_different_layouts(backend, dtype):
    """H = 16, N = 62, d = 128 in the report; all eight combinations of two layouts."""
    x = inputs(Case("layouts", B=2, Hq=4, Hk=4, Nq=62, Nk=62, d=48, dtype=dtype))
    want = everything(backend, x)
    for bits in range(8):
        arrays = {name: through_model_layout(getattr(x, name)) for at, name in enumerate("qkv")
                  if bits >> at & 1}
        assert_same_gradients(f"{sorted(arrays)}", everything(backend, x._replace(**arrays)), want)


@pytest.mark.parametrize("dtype", ALL)
def test_gradients_into_parts_of_one_packed_array(backend, dtype):
    """dq, dk and dv as slices of one (N, B, Hq + 2 Hk, d) array, like the inputs they belong to."""
    B, Hq, Hk, N, d = 2, 4, 1, 62, 24
    x = inputs(Case("packed", B=B, Hq=Hq, Hk=Hk, Nq=N, Nk=N, d=d, dtype=dtype, causal=True))
    want = everything(backend, x)
    xp = backend.xp

    def parts(packed):
        return {name: packed[:, :, heads].transpose(1, 2, 0, 3)
                for name, heads in (("q", slice(0, Hq)), ("k", slice(Hq, Hq + Hk)),
                                    ("v", slice(Hq + Hk, None)))}

    packed = parts(xp.zeros((N, B, Hq + 2 * Hk, d), x.q.dtype))
    for name, view in packed.items():
        view[...] = backend.asarray(getattr(x, name))
    memory = xp.full((N, B, Hq + 2 * Hk, d), 777, x.q.dtype)
    buffers = {f"d{name}": view for name, view in parts(memory).items()}
    y = backend.move(x)
    out, lse = cf.attention(**packed, return_lse=True, causal=True)
    cf.attention_backward(y.dout, packed["q"], packed["k"], packed["v"], out, lse, dlse=y.dlse,
                          causal=True, deterministic=True, **buffers)
    for name, view in buffers.items():
        assert_bit_equal(name, backend.asnumpy(view), want[name])


# H3: pointers that are aligned to the element only.


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("offset", [1, 2, 4])
def test_pointers_off_every_vector(backend, dtype, offset):
    """Contiguous in every flag; d = 46 makes rows of 92 bytes in 16-bit types."""
    case = Case("offset", B=2, Hq=2, Hk=1, Nq=33, Nk=49, d=46, bias="bhqk", dtype=dtype)
    x = inputs(case)
    want = everything(backend, x)

    def shifted(array):
        flat = np.zeros(array.size + offset, array.dtype)[offset:].reshape(array.shape)
        flat[...] = array
        assert flat.flags.c_contiguous
        return flat

    for names in (*"qkv", "dout", "bias", ("q", "k", "v", "dout", "bias")):
        names = (names,) if isinstance(names, str) else names
        options = {n: shifted(a) if n in names else a for n, a in x.options.items()}
        moved = x._replace(options=options,
                           **{n: shifted(getattr(x, n)) for n in names if n != "bias"})
        assert_same_gradients(f"{names} + {offset}", everything(backend, moved), want)
    out = backend.asarray(shifted(want["out"] * 0))
    y = backend.move(x)
    cf.attention(y.q, y.k, y.v, out=out, **y.options)
    assert_bit_equal("out", backend.asnumpy(out), want["out"])


# H5: what cannot be told apart is at least named in the error text.


def test_layouts_and_batches_that_do_not_fit():
    q, k = np.zeros((2, 4, 6, 8), np.float32), np.zeros((2, 2, 9, 8), np.float32)
    for bad_k, bad_v in ((k[:1], k[:1]), (k, k[:, :, :8]), (k[0], k[0]), (k[None], k[None])):
        with pytest.raises(ValueError, match=r"\(B, H, N, d\)"):
            cf.attention(q, bad_k, bad_v)
    # (B, N, H, d) for both: 6 "heads" that would have to be a multiple of 9.
    with pytest.raises(ValueError, match=r"^`q` has 6 heads and `k` has 9.*\(B, H, N, d\)"):
        cf.attention(q.swapaxes(1, 2), k.swapaxes(1, 2), k.swapaxes(1, 2))
    with pytest.raises(ValueError, match=r"^`mask` has shape \(3, 1, 6, 9\)"):
        cf.attention(q, k, k, mask=np.ones((3, 1, 6, 9), bool))


def test_read_only_inputs_are_fine_and_a_read_only_result_is_not():
    q = np.ones((3, 8), np.float32)
    q.flags.writeable = False
    assert (cf.attention(q, q, q) == 1).all()
    with pytest.raises(ValueError, match=r"^`out`"):
        cf.attention(q.copy(), q.copy(), q.copy(), out=q)


# K1: backward over a part of the keys, with the output and the lse of the whole.


def chunked_gradients(backend, x, cuts, *, own=False):
    """Sum of per-chunk backward passes, each with the global `out` and `lse` (or with its own)."""
    y = backend.move(x)
    options = dict(y.options)
    causal = options.pop("causal", False)
    Nq, Nk = y.q.shape[2], y.k.shape[2]
    offset = Nk - Nq if causal else None
    out, lse = cf.attention(y.q, y.k, y.v, return_lse=True, causal=causal)
    dq, dk, dv = 0, [], []
    for start, stop in zip((0, *cuts), (*cuts, Nk), strict=True):
        k, v = y.k[:, :, start:stop], y.v[:, :, start:stop]
        chunk = {"causal": causal, "q_offset": None if offset is None else offset - start}
        dout, args = y.dout, (out, lse)
        if own:  # the mistake: the chunk's own softmax, dout scaled by the chunk's weight
            args = cf.attention(y.q, k, v, return_lse=True, **chunk)
            dout = y.dout * backend.xp.exp(args[1] - lse)[..., None]
        g = cf.attention_backward(dout, y.q, k, v, *args, **chunk)
        dq, dk, dv = dq + g.dq, [*dk, g.dk], [*dv, g.dv]
    return {"dq": backend.asnumpy(dq), "dk": np.concatenate([backend.asnumpy(a) for a in dk], 2),
            "dv": np.concatenate([backend.asnumpy(a) for a in dv], 2)}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_ring_backward_with_the_global_output(backend, dtype, causal):
    for sizes, cuts in (
        ({"Nq": 8, "Nk": 8, "d": 16, "Hq": 1, "Hk": 1}, (4,)),
        ({"Nq": 100, "Nk": 130, "d": 16, "B": 2, "Hq": 4, "Hk": 2}, (40, 41, 97)),
    ):
        x = inputs(Case("ring", dtype=dtype, causal=causal, **sizes))
        x = x._replace(dlse=np.zeros_like(x.dlse))
        want, plain = answers_to(x)
        judge(f"{sizes}", chunked_gradients(backend, x, cuts), want, plain)


def test_ring_backward_with_its_own_output_is_wrong(backend):
    """dv is right even then, so a test of dv alone proves nothing."""
    x = inputs(Case("ring", Nq=8, Nk=8, d=16, Hq=1, Hk=1, dtype="float64"))
    x = x._replace(dlse=np.zeros_like(x.dlse))
    got = chunked_gradients(backend, x, (4,), own=True)
    want, _ = answers_to(x)
    error = {n: np.abs(got[n] - getattr(want, n)).max() / np.abs(getattr(want, n)).max()
             for n in got}
    assert error["dv"] < 1e-14 and error["dq"] > 0.1 and error["dk"] > 0.1


# M1: every spelling of a number is the same number.


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_spellings_of_a_number(backend, dtype):
    x = inputs(Case("scalars", Nq=20, Nk=33, d=24, dtype=dtype))
    spellings = {
        "scale": [
            (0.125, np.float64(0.125), np.float32(0.125), np.float16(0.125), np.array(0.125)),
            (72**-0.5, np.float64(72**-0.5), np.array(72**-0.5)),
            (1, 1.0, np.int64(1), np.int32(1), np.uint8(1), np.float32(1), np.array(1)),
            (0, 0.0, -0.0, np.int8(0)),
            (-2, -2.0, np.float32(-2)),
        ],
        "softcap": [(3, 3.0, np.float32(3), np.int64(3), np.array(3.0))],
        "window": [((4, 2), (np.int64(4), np.int32(2)), [4, 2], (np.uint8(4), np.int16(2)))],
        "q_offset": [(5, np.int64(5), np.int8(5)), (-3, np.int64(-3))],
    }
    for name, groups in spellings.items():
        for first, *others in groups:
            extra = {"causal": True} if name == "q_offset" else {}
            want = everything(backend, x._replace(options={name: first, **extra}))
            judge(f"{name}={first}", want, *answers_to(x._replace(options={name: first, **extra})))
            for other in others:
                got = everything(backend, x._replace(options={name: other, **extra}))
                assert_same_gradients(f"{name}={other!r}", got, want)


def test_slopes_in_float64_are_not_read_as_float32(backend):
    x = inputs(Case("slopes", Nq=20, Nk=33, d=24, Hq=2, Hk=2))
    slopes = np.array([0.5, 0.0625])
    want = everything(backend, x._replace(options={"alibi_slopes": slopes}))
    judge("slopes", want, *answers_to(x._replace(options={"alibi_slopes": slopes})))
    got = everything(backend, x._replace(options={"alibi_slopes": slopes.astype(np.float32)}))
    assert_same_gradients("float32", got, want)


# M5: bfloat16 is the type of ml_dtypes, rounded to nearest even.


def one_key(backend, value, dtype, **options):
    """Attention over one key returns its value: the way in and the way out of a dtype."""
    v = np.array([value], dtype).reshape(1, -1)
    q = np.zeros((1, 4), dtype)
    return backend.asnumpy(cf.attention(*(backend.asarray(a) for a in (q, q, v)), **options))[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_number_survives(backend, dtype):
    bits = np.arange(65536, dtype=np.uint16)
    for columns in bits.reshape(-1, 256):
        values = columns.view(DTYPES[dtype])
        out = one_key(backend, values, DTYPES[dtype])
        nan = np.isnan(values.astype(np.float32))
        assert (np.isnan(out.astype(np.float32)) == nan).all()
        # The sign of a zero may go: -0 + 0 is 0. A subnormal bfloat16 is a subnormal float32, which
        # CuPy's compiler flags flush to zero.
        smallest = 0x80 if (backend.name, dtype) == ("cuda", "bfloat16") else 1
        zero = columns & 0x7FFF < smallest
        assert (out.view(np.uint16) == columns)[~nan & ~zero].all()
        assert (out[zero] == 0).all()
        wide = one_key(backend, values, DTYPES[dtype], out_dtype=np.float32)
        np.testing.assert_array_equal(wide, np.where(zero, 0, values.astype(np.float32)))


def test_results_are_rounded_to_nearest_even(backend):
    """The mean of two numbers half a unit apart is a tie: 1 + 2^-8 to 1, 1 + 3 * 2^-8 up."""
    for dtype, unit in ((BFLOAT16, 2.0**-7), (DTYPES["float16"], 2.0**-10)):
        v = np.array([[1, 1 + unit, -1, -1 - unit], [1 + unit, 1 + 2 * unit, -1 - unit,
                                                     -1 - 2 * unit]], dtype)
        out = cf.attention(*(backend.asarray(a) for a in (np.zeros((1, 4), dtype),
                                                          np.zeros((2, 4), dtype), v)))
        want = np.array([1, 1 + 2 * unit, -1, -1 - 2 * unit], dtype)
        assert_bit_equal(f"{dtype}", backend.asnumpy(out)[0], want)


def test_gradients_are_rounded_to_nearest_even(backend):
    """dv of a single key is the sum of dout: 1 + unit / 2 is a tie."""
    for dtype, unit in ((BFLOAT16, 2.0**-7), (DTYPES["float16"], 2.0**-10)):
        q, k = np.zeros((2, 4), dtype), np.zeros((1, 4), dtype)
        dout = np.array([[1, 1, -1, 1], [unit / 2, 3 * unit / 2, -unit / 2, unit]], dtype)
        q, k, v, dout = (backend.asarray(a) for a in (q, k, np.ones((1, 4), dtype), dout))
        out, lse = cf.attention(q, k, v, return_lse=True)
        g = cf.attention_backward(dout, q, k, v, out, lse)
        want = np.array([[1, 1 + 2 * unit, -1, 1 + unit]], dtype)
        assert_bit_equal(f"{dtype}", backend.asnumpy(g.dv), want)


def test_bits_of_bfloat16_are_not_guessed():
    bits = np.zeros((3, 8), np.uint16)
    with pytest.raises(TypeError, match=r"uint16.*bfloat16"):
        cf.attention(bits, bits, bits)
    typed = bits.view(ml_dtypes.bfloat16)
    assert cf.attention(typed, typed, typed).dtype == ml_dtypes.bfloat16


class Wrapped:
    """An array of another library: it speaks DLPack and nothing else."""

    def __init__(self, array):
        self._array = array
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    def __dlpack__(self, **kwargs):
        return self._array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_arrays_of_other_libraries(dtype):
    """Taken in through DLPack, offsets and strides included; results are NumPy arrays."""
    x = inputs(Case("dlpack", Nq=20, Nk=33, d=24, dtype=dtype, causal=True))
    q, k, v = (fenced(a) for a in (x.q, x.k, x.v))
    want, want_lse = cf.attention(x.q, x.k, x.v, causal=True, return_lse=True)
    out, lse = cf.attention(Wrapped(q), Wrapped(k), Wrapped(v), causal=True, return_lse=True)
    assert isinstance(out, np.ndarray) and isinstance(lse, np.ndarray)
    assert_bit_equal("out", out, want)
    g = cf.attention_backward(Wrapped(x.dout), Wrapped(q), Wrapped(k), Wrapped(v), Wrapped(out),
                              Wrapped(lse), causal=True, deterministic=True)
    h = cf.attention_backward(x.dout, x.q, x.k, x.v, want, want_lse, causal=True,
                              deterministic=True)
    for name in ("dq", "dk", "dv"):
        assert_bit_equal(name, getattr(g, name), getattr(h, name))


# M7: float32 means float32, unless something coarser is asked for.


def test_float32_keeps_the_last_bit_of_its_operands(backend):
    d = 16
    q, k, v = np.zeros((1, d), np.float32), np.zeros((2, d), np.float32), np.zeros((2, 1))
    q[0, :2], k[0, 0], k[1, 1], v[0] = (1 + 2**-12, 1), 4096, 4096, 1
    arrays = [backend.asarray(a.astype(np.float32)) for a in (q, k, v)]
    for precision in (None, "tf32x3"):
        out = cf.attention(*arrays, scale=1, precision=precision)
        np.testing.assert_allclose(backend.asnumpy(out), 0.7310586, rtol=1e-6)
    coarse = cf.attention(*arrays, scale=1, precision="tf32")
    assert backend.asnumpy(coarse)[0, 0] == 0.5


@pytest.mark.parametrize("precision, limit", [(None, 1e-5), ("tf32x3", 1e-5), ("tf32", 5e-3)])
def test_error_of_float32(backend, precision, limit):
    x = inputs(Case("float32", Nq=128, Nk=512, d=64, Hq=1, Hk=1, precision=precision))
    out, _ = attend(backend, x)
    error = np.abs(out - answers_to(x)[0].out).max()
    assert limit / 1000 < error < limit

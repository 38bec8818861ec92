"""Any strides, any alignment, any memory order; buffers are filled and nothing else is."""

from dataclasses import replace

import numpy as np
import pytest
from answers import answers_to, floors, judge
from cases import DTYPES, Case, inputs
from numerics import CANARY_BYTE, NAN_BYTE, Fence, assert_bit_equal, fenced, fill_free_memory
from test_backward import assert_same_gradients

import cupy_flash as cf

CASE = Case("layout", Nq=70, Nk=101, d=20, d_v=24, B=2, Hq=4, Hk=2, causal=True, mask="dense",
            bias="bhqk", alibi="bh", sink=(1.0, -np.inf, 3.0, -1.0))


def as_rows_first(x, xp):
    """(B, H, N, d) over (B, N, H, d) memory; arrays with fewer axes as they are."""
    if x.ndim < 4:
        return x
    return xp.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def as_fortran(x, xp):
    return xp.asfortranarray(x)


def with_strided_columns(x, xp):
    """Every second element of a wider array."""
    wide = xp.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def backwards(x, xp):
    """All axes with negative strides, the last one too."""
    flip = (slice(None, None, -1),) * x.ndim
    return xp.ascontiguousarray(x[flip])[flip]


def rows_backwards(x, xp):
    """Rows, heads and batch with negative strides, columns contiguous."""
    flip = (slice(None, None, -1),) * (x.ndim - 1)
    return xp.ascontiguousarray(x[flip])[flip]


def with_wide_rows(x, xp):
    """A slice from column 1 of rows with a pitch of 7 more."""
    wide = xp.full((*x.shape[:-1], x.shape[-1] + 7), np.nan if x.dtype.kind != "b" else True)
    wide = wide.astype(x.dtype)
    wide[..., 1 : 1 + x.shape[-1]] = x
    return wide[..., 1 : 1 + x.shape[-1]]


def off_by_one_element(x, xp):
    """Contiguous in every flag, aligned to the element and to nothing more."""
    flat = xp.zeros(x.size + 1, x.dtype)[1:].reshape(x.shape)
    flat[...] = x
    return flat


def unaligned(x, xp):
    """Not even aligned to the element."""
    raw = xp.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    raw[...] = x
    return raw


def among_nan(x, xp):
    return fenced(x, NAN_BYTE, xp)


VIEWS = (as_rows_first, as_fortran, with_strided_columns, backwards, rows_backwards, with_wide_rows,
         off_by_one_element, unaligned, among_nan)
# One query of two heads, whole vectors of columns, nothing masked: keys may be read in place.
DECODE = Case("decode", Nq=1, Nk=101, d=32, d_v=16, B=2, Hq=2, Hk=1, causal=True,
              sink=(1.0, -1.0))
ARRAYS = ("q", "k", "v", "dout", "dlse", "out", "lse", "mask", "bias", "alibi_slopes", "sink")


def run(backend, x, changed=(), view=None):
    """Forward and backward with the arrays named in `changed` seen through `view`."""
    y = backend.move(x)
    arrays = {**y._asdict(), **y.options}

    def seen(name, array):
        return view(array, backend.xp) if name in changed else array

    arrays |= {name: seen(name, arrays[name]) for name in ARRAYS if name in arrays}
    options = {name: arrays[name] for name in y.options}
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    out, lse = cf.attention(q, k, v, return_lse=True, **options)
    g = cf.attention_backward(arrays["dout"], q, k, v, seen("out", out), seen("lse", lse),
                              dlse=arrays["dlse"], deterministic=True, **options)
    results = {"out": out, "lse": lse, **g._asdict()}
    return {name: None if a is None else backend.asnumpy(a) for name, a in results.items()}


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [CASE, DECODE], ids=lambda case: case.label)
def test_every_array_in_every_layout(backend, case, dtype, view):
    """The same bits whatever the layout, for each array alone and all together."""
    x = inputs(replace(case, dtype=dtype))
    want = run(backend, x)
    judge(case.id, want, *answers_to(x, x.q.dtype), floors(x))
    changes = [(name,) for name in ARRAYS] if dtype in ("float32", "bfloat16") else []
    for changed in (*changes, ARRAYS):
        present = [n for n in changed if n in x.options or hasattr(x, n) or n in ("out", "lse")]
        if view is unaligned and backend.name == "cuda" and present not in ([], ["mask"]):
            with pytest.raises(ValueError, match="no multiple of its"):     # a GPU cannot read it
                run(backend, x, changed, view)
            continue
        got = run(backend, x, changed, view)
        assert_same_gradients(f"{view.__name__} {changed}", got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_around_everything_at_once(backend, dtype):
    """Lengths that are no multiple of anything; NaN on every side of every array."""
    for Nq, Nk, d in ((1, 1, 1), (9, 70, 46), (77, 9, 7), (1, 503, 64), (113, 97, 33)):
        sizes = Case("poison", Nq=Nq, Nk=Nk, d=d, B=2, Hq=4, Hk=2, dtype=dtype)
        lens = {"q_lens": (Nq, Nq // 2), "kv_lens": (Nk // 2 + 1, Nk)}
        masked = {"bias": "bhqk", "mask": "padding", "alibi": "h", "sink": (0.5, -2.0)}
        for options in ({}, {"causal": True}, lens, lens | masked):
            x = inputs(replace(sizes, **options))
            fill_free_memory(backend.xp, NAN_BYTE)
            got = run(backend, x, ARRAYS, among_nan)
            assert_same_gradients(f"{sizes.id} {options}", got, run(backend, x))


def test_packed_projections(backend):
    """q, k and v as slices of one (N, B, Hq + 2 Hk, d) array, as a fused projection leaves them."""
    rng = np.random.default_rng(0)
    packed = backend.asarray(rng.standard_normal((62, 2, 16 + 2, 32)).astype(np.float32))
    q, k, v = (packed[:, :, part].transpose(1, 2, 0, 3)
               for part in (slice(0, 16), slice(16, 17), slice(17, 18)))
    out, lse = cf.attention(q, k, v, causal=True, return_lse=True)
    dense = [backend.xp.ascontiguousarray(a) for a in (q, k, v)]
    want, want_lse = cf.attention(*dense, causal=True, return_lse=True)
    assert_bit_equal("out", backend.asnumpy(out), backend.asnumpy(want))
    assert_bit_equal("lse", backend.asnumpy(lse), backend.asnumpy(want_lse))
    assert out.transpose(2, 0, 1, 3).flags.c_contiguous  # the order of q: rows, batch, heads


def test_broadcast_views_of_q_k_v(backend):
    """A stride of 0 is a stride: one head of keys seen as several."""
    rng = np.random.default_rng(0)
    q = backend.asarray(rng.standard_normal((4, 30, 8)).astype(np.float32))
    one = backend.asarray(rng.standard_normal((1, 50, 8)).astype(np.float32))
    k = backend.xp.broadcast_to(one, (4, 50, 8))
    out, lse = cf.attention(q, k, k, return_lse=True)
    want, want_lse = cf.attention(q, one, one, return_lse=True)
    np.testing.assert_allclose(backend.asnumpy(out), backend.asnumpy(want), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(backend.asnumpy(lse), backend.asnumpy(want_lse), rtol=1e-6)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_out_keeps_the_memory_order_of_q(backend, order):
    """A (B, N, H, d) program gets (B, N, H, d) back, and so for every order of the axes."""
    rng = np.random.default_rng(0)
    shape = (2, 3, 40, 16)
    memory = rng.standard_normal([shape[axis] for axis in order] + [16]).astype(np.float32)
    x = backend.asarray(memory).transpose(*np.argsort(order), 3)
    assert x.shape == shape
    v = backend.asarray(rng.standard_normal((2, 3, 50, 20)).astype(np.float32))
    out = cf.attention(x, v[..., :16], v)
    assert out.transpose(*order, 3).flags.c_contiguous


@pytest.mark.parametrize("view", [as_rows_first, as_fortran, with_strided_columns, backwards,
                                  with_wide_rows, off_by_one_element],
                         ids=lambda view: view.__name__)
@pytest.mark.parametrize("dtype", DTYPES)
def test_buffers_of_any_layout(backend, dtype, view):
    """out, dq, dk and dv go where they are told, and the buffer itself is returned."""
    x = inputs(replace(CASE, dtype=dtype))
    want = run(backend, x)
    y = backend.move(x)

    def buffer(like):
        return view(backend.xp.full(like.shape, 777, like.dtype), backend.xp)

    out = buffer(want["out"])
    got, lse = cf.attention(y.q, y.k, y.v, out=out, return_lse=True, **y.options)
    assert got is out
    buffers = {name: buffer(want[name]) for name in ("dq", "dk", "dv")}
    g = cf.attention_backward(y.dout, y.q, y.k, y.v, got, lse, dlse=y.dlse, deterministic=True,
                              **y.options, **buffers)
    for name, array in buffers.items():
        assert getattr(g, name) is array
    results = {"out": out, "lse": lse, **g._asdict()}
    assert_same_gradients(view.__name__, {n: backend.asnumpy(a) for n, a in results.items()}, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [
    CASE,
    Case("tall", Nq=130, Nk=50, d=7, d_v=3, Hq=2, Hk=1, causal=True),
    Case("no-keys", Nq=30, Nk=0, d=8, Hq=2, Hk=2),
    Case("lens", Nq=100, Nk=101, d=20, B=2, q_lens=(17, 100), kv_lens=(101, 0)),
], ids=lambda case: case.label)
def test_nothing_outside_the_buffers_is_written(backend, case, dtype):
    """And everything inside is: rows that see no key, and rows behind `q_lens`, too."""
    x = inputs(replace(case, dtype=dtype))
    want = run(backend, x)
    y = backend.move(x)
    fences = {name: Fence(want[name].shape, want[name].dtype, CANARY_BYTE, backend.xp)
              for name in ("out", "dq", "dk", "dv")}
    buffers = {name: fence.array for name, fence in fences.items()}
    out, lse = cf.attention(y.q, y.k, y.v, out=buffers.pop("out"), return_lse=True, **y.options)
    cf.attention_backward(y.dout, y.q, y.k, y.v, out, lse, dlse=y.dlse, deterministic=True,
                          **y.options, **buffers)
    for name, fence in fences.items():
        fence.assert_untouched(f"{case.id} {name}")
        assert_bit_equal(name, backend.asnumpy(fence.array), want[name])


def test_some_buffers_and_a_wide_dtype(backend):
    """A buffer has the dtype that the result would have."""
    x = inputs(Case("buffers", Hq=2, Hk=1, dtype="bfloat16"))
    y = backend.move(x)
    out = backend.xp.zeros(x.q.shape, np.float32)
    got, lse = cf.attention(y.q, y.k, y.v, out=out, out_dtype=np.float32, return_lse=True)
    want = cf.attention(y.q, y.k, y.v, out_dtype=np.float32)
    assert got is out
    assert_bit_equal("out", backend.asnumpy(out), backend.asnumpy(want))
    dk = backend.xp.zeros(x.k.shape, np.float32)
    args = (y.dout, y.q, y.k, y.v, out, lse)
    g = cf.attention_backward(*args, dk=dk, grad_dtype=np.float32, deterministic=True)
    want = cf.attention_backward(*args, grad_dtype=np.float32, deterministic=True)
    assert g.dk is dk and g.dq.dtype == g.dv.dtype == np.float32
    for name in ("dq", "dk", "dv"):
        assert_bit_equal(name, backend.asnumpy(getattr(g, name)),
                         backend.asnumpy(getattr(want, name)))


def test_out_may_be_reused(backend):
    """A buffer full of NaN, infinities or an earlier result makes no difference."""
    x = backend.move(inputs(CASE))
    want = cf.attention(x.q, x.k, x.v, **x.options)
    out = backend.xp.full_like(want, np.nan)
    for _ in range(2):
        cf.attention(x.q, x.k, x.v, out=out, **x.options)
        assert_bit_equal("out", backend.asnumpy(out), backend.asnumpy(want))


@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_leading_axes_of_one_do_not_matter(backend, ndim):
    case = Case("axes", Nq=70, Nk=101, d=20, Hq=1, Hk=1, causal=True, mask="dense", bias="bhqk")
    x = inputs(case)
    want = run(backend, x)
    drop = (0,) * (4 - ndim)
    options = {name: x.options[name][drop] if name in ("mask", "bias") else x.options[name]
               for name in x.options}
    got = run(backend, x._replace(options=options, **{
        name: getattr(x, name)[drop] for name in ("q", "k", "v", "dout", "dlse")}))
    for name, array in got.items():
        if array is not None:
            assert_bit_equal(name, array, want[name][drop])

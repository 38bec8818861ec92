"""What only a GPU can show: streams, graphs, devices, blocks without number, derivatives."""

import numpy as np
import pytest
from answers import answers_to, floors, judge
from cases import CASES, KINDS, Case, inputs
from numerics import eps

import cupy_flash as cf

pytestmark = pytest.mark.gpu
ALL_OPTIONS = {case.dtype: case for case in CASES if case.label == "all-options"}


@pytest.fixture
def cp():
    """CuPy."""
    return pytest.importorskip("cupy")


def on_gpu(cp, x):
    """The `Inputs` as CuPy arrays of the current device."""
    def move(a):
        """The bits of a bfloat16 array: CuPy cannot take in every one of NumPy's as it is."""
        wide = a.dtype.name != "bfloat16"
        return cp.asarray(a) if wide else cp.asarray(a.view(np.uint16)).view(a.dtype)

    options = {name: move(value) if isinstance(value, np.ndarray) else value
               for name, value in x.options.items()}
    return type(x)(*map(move, x[:-1]), options)


def both(y, **more):
    """out, lse and the gradients, dbias among them if there is a bias."""
    out, lse = cf.attention(y.q, y.k, y.v, return_lse=True, **y.options)
    g = cf.attention_backward(y.dout, y.q, y.k, y.v, out, lse, dlse=y.dlse, **y.options, **more)
    return {"out": out, "lse": lse, **{n: a for n, a in g._asdict().items() if a is not None}}


def assert_same_arrays(got, want, summed_in_any_order=()):
    """Bit by bit, on the device or off it; the arrays named last to rounding."""
    for name, a in want.items():
        one, other = got[name].get(), a.get()
        if name in summed_in_any_order:
            wide = other.astype(np.float64)
            unit = eps(other.dtype) * np.abs(wide).max()
            np.testing.assert_allclose(one.astype(np.float64), wide, rtol=0, atol=8 * unit)
        else:
            assert one.tobytes() == other.tobytes(), name


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ALL_OPTIONS)
def test_calls_are_captured_into_a_graph(cp, dtype, deterministic):
    """No call synchronises, reads back or uses another stream, or the capture would fail."""
    first, second = (on_gpu(cp, inputs(ALL_OPTIONS[dtype])) for _ in range(2))
    for name in ("q", "k", "v", "dout"):
        getattr(second, name)[...] = getattr(second, name)[..., ::-1, :].copy()
    want = both(second, deterministic=deterministic)
    wanted = cf.merge([want["out"]] * 2, [want["lse"]] * 2)     # compiles CuPy's kernels as well
    stream = cp.cuda.Stream(non_blocking=True)
    pool = cp.cuda.MemoryPool()         # a graph keeps using what was allocated while it was made
    with stream, cp.cuda.using_allocator(pool.malloc):
        both(first, deterministic=deterministic)        # compiles
        stream.begin_capture()
        got = both(first, deterministic=deterministic)
        merged = cf.merge([got["out"]] * 2, [got["lse"]] * 2)
        graph = stream.end_capture()
        for name in ("q", "k", "v", "dout"):
            getattr(first, name)[...] = getattr(second, name)
        graph.launch()
        stream.synchronize()
        assert_same_arrays(got, want, [] if deterministic else ["dq"])
        assert_same_arrays(dict(enumerate(merged)), dict(enumerate(wanted)))


def test_work_goes_to_the_current_stream(cp):
    """What the stream is still busy with is seen by the call that follows on it."""
    x = on_gpu(cp, inputs(Case("stream", d=64, dtype="float32")))
    want = both(x)
    late = x._replace(q=cp.zeros_like(x.q))
    work = cp.ones((4096, 4096), np.float32)
    with cp.cuda.Stream(non_blocking=True) as stream:
        for _ in range(20):
            work = work @ work * 1e-4
        late.q[...] = x.q
        got = both(late)
        stream.synchronize()
    assert_same_arrays(got, want, ["dq"])


def test_repeated_calls_keep_nothing(cp):
    from cupy_flash.backends.cuda import compile as compiled

    x = on_gpu(cp, inputs(ALL_OPTIONS["bfloat16"]))
    want = both(x)
    pool = cp.get_default_memory_pool()
    modules, used, total = len(compiled._functions), pool.used_bytes(), None
    for i in range(300):
        assert_same_arrays(both(x), want, ["dq"]) if i % 100 == 0 else both(x)
        total = total or pool.total_bytes()
    assert len(compiled._functions) == modules
    assert pool.used_bytes() == used and pool.total_bytes() <= 2 * total


def test_arrays_on_a_device_that_is_not_current(cp):
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    x = inputs(ALL_OPTIONS["float32"])
    results = []
    for current, number in ((0, 1), (0, 0), (1, 0), (0, 1), (1, 1)):
        with cp.cuda.Device(number):
            y = on_gpu(cp, x)
        with cp.cuda.Device(current):
            got = both(y, deterministic=True)
            merged = cf.merge([got["out"]] * 2, [got["lse"]] * 2)
            assert cp.cuda.runtime.getDevice() == current
            assert all(a.device.id == number for a in (*got.values(), *merged))
            with pytest.raises(ValueError, match="`window`"):
                cf.attention(y.q, y.k, y.v, window=(-1, 0))
            assert cp.cuda.runtime.getDevice() == current
        with cp.cuda.Device(number):
            results.append({name: a.get() for name, a in got.items()})
    for other in results[1:]:
        for name, a in results[0].items():
            assert a.tobytes() == other[name].tobytes(), name
    with cp.cuda.Device(0):
        q = on_gpu(cp, x).q
    with cp.cuda.Device(1):
        k = on_gpu(cp, x).k
    with pytest.raises(ValueError, match="`k` is on GPU 1, but `q` is on GPU 0"):
        cf.attention(q, k, k)


def test_more_blocks_than_a_grid_had_room_for(cp):
    x = cp.random.default_rng(0).standard_normal((70_000, 3, 16), np.float32)
    got = cf.attention(x, x, x, causal=True)
    S = x @ x.transpose(0, 2, 1) / 4
    S[:, ~np.tri(3, dtype=bool)] = -np.inf
    P = cp.exp(S - S.max(axis=2, keepdims=True))
    want = P @ x / P.sum(axis=2, keepdims=True)
    assert float(cp.abs(got - want).max()) < 1e-2       # CuPy's own products may be TF32


def test_the_gradient_is_the_derivative(cp):
    """Forward against backward in float64, along random directions, with every option."""
    y = on_gpu(cp, inputs(ALL_OPTIONS["float64"]))
    grads = both(y)
    rng = cp.random.default_rng(0)
    step = 1e-6

    def loss(**arrays):
        z = y._replace(**{n: a for n, a in arrays.items() if n != "bias"})
        options = {**y.options, **{n: a for n, a in arrays.items() if n == "bias"}}
        out, lse = cf.attention(z.q, z.k, z.v, return_lse=True, **options)
        seen = cp.isfinite(lse)
        return float((out * y.dout).sum() + (cp.where(seen, lse, 0) * y.dlse).sum())

    for name in ("q", "k", "v", "bias"):
        x = y.options["bias"] if name == "bias" else getattr(y, name)
        way = rng.standard_normal(x.shape)
        slope = (loss(**{name: x + step * way}) - loss(**{name: x - step * way})) / (2 * step)
        along = float((grads["d" + name] * way).sum())
        assert abs(slope - along) < 1e-6 * max(1, float(cp.abs(grads["d" + name]).sum())), name


@pytest.mark.parametrize("dtype", ALL_OPTIONS)
def test_the_same_bits_every_time(cp, dtype):
    y = on_gpu(cp, inputs(ALL_OPTIONS[dtype]))
    want, deterministic = both(y), both(y, deterministic=True)
    for _ in range(5):
        assert_same_arrays(both(y), want, ["dq"])
        assert_same_arrays(both(y, deterministic=True), deterministic)


def test_lengths_out_of_range_are_clamped(cp):
    """They are not read on the host; nothing beyond the arrays is touched all the same."""
    y = on_gpu(cp, inputs(Case("clamp", B=2, dtype="float32")))
    rows, keys = y.q.shape[-2], y.k.shape[-2]
    lens = {"q_lens": [rows, 0], "kv_lens": [keys, 0]}
    wild = {"q_lens": [rows + 7, -3], "kv_lens": [2**31 - 1, -(2**31)]}
    want, got = (both(y._replace(options={name: cp.array(value, np.int32)
                                          for name, value in given.items()}))
                 for given in (lens, wild))
    assert_same_arrays(got, want, ["dq"])


class Dlpack:
    """A GPU array of a library that has nothing but DLPack."""

    def __init__(self, x):
        self.x, self.shape = x, x.shape

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)


class Interface:
    """A GPU array of a library that has nothing but the older interface."""

    def __init__(self, x):
        self.__cuda_array_interface__ = x.__cuda_array_interface__
        self.x = x


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_of_other_libraries_are_not_copied(cp, dtype):
    x = on_gpu(cp, inputs(Case("foreign", dtype=dtype)))
    want = cf.attention(x.q, x.k, x.v)
    out = cf.attention(Dlpack(x.q), x.k, Dlpack(x.v))
    assert_same_arrays({"out": out}, {"out": want})
    if dtype == "float32":
        k = Interface(x.k)
        assert_same_arrays({"out": cf.attention(x.q, k, x.v)}, {"out": want})
        x.k[...] = 0
        assert not bool((cf.attention(x.q, k, x.v) == want).all())
    else:
        with pytest.raises(TypeError, match=r"`k`.*bfloat16"):
            cf.attention(x.q, Interface(x.k), x.v)


@pytest.mark.parametrize("scale", [np.float32(0.125), np.float64(0.125), np.array(0.125), -0.0],
                         ids=repr)
def test_every_spelling_of_a_number(cp, scale):
    x = on_gpu(cp, inputs(Case("scalar", dtype="float32")))
    want = cf.attention(x.q, x.k, x.v, scale=float(scale))
    assert_same_arrays({"out": cf.attention(x.q, x.k, x.v, scale=scale)}, {"out": want})


@pytest.mark.parametrize("case", [case for case in CASES if case.label == "decode-long"],
                         ids=lambda case: case.id)
def test_split_keys(cp, case):
    """Few queries and many keys: the keys are split and merged."""
    x = inputs(case)
    assert "combine" in cf.explain(*on_gpu(cp, x)[:3], **on_gpu(cp, x).options)
    got = {name: a.get() for name, a in both(on_gpu(cp, x)).items()}
    judge(case.id, got, *answers_to(x), floors(x))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype, d", [("float16", 64), ("bfloat16", 128), ("bfloat16", 200),
                                      ("float32", 64), ("float64", 64)])
def test_wrt_changes_no_bit_of_what_is_asked_for(cp, dtype, d, deterministic):
    """But for dq, where additions have no order."""
    for bias in ("", "bhqk"):
        x = on_gpu(cp, inputs(Case("wrt", Nq=150, Nk=170, B=2, Hq=4, Hk=2, d=d, dtype=dtype,
                                   bias=bias)))
        out, lse = cf.attention(x.q, x.k, x.v, return_lse=True, **x.options)
        options = x.options | {"deterministic": deterministic}
        want = cf.attention_backward(x.dout, x.q, x.k, x.v, out, lse, **options)
        for wrt in (("q",), ("k",), ("v",), *((("bias",),) if bias else ())):
            got = cf.attention_backward(x.dout, x.q, x.k, x.v, out, lse, wrt=wrt, **options)
            for name in ("q", "k", "v", "bias"):
                one, other = getattr(got, f"d{name}"), getattr(want, f"d{name}")
                assert (one is None) == (name not in wrt)
                if one is not None and (deterministic or name != "q"):
                    assert one.tobytes() == other.tobytes(), (name, wrt, bias)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axes", ["11qk", "1hqk", "b11k", "111k", "1h1k", "1hq1", "1h11", "1111"])
def test_dbias_of_a_broadcast_bias(cp, axes, kind):
    """Added by many blocks at a time, and the sums of queries always in the same order."""
    dtype, precision = KINDS[kind]
    x = inputs(Case("dbias", Nq=700, Nk=901, B=2, Hq=4, Hk=2, bias=axes, causal=True, dtype=dtype,
                    precision=precision))
    y = on_gpu(cp, x)
    assert "dbias_wmma" not in cf.explain(y.q, y.k, y.v, **y.options)
    first, second = (both(y) for _ in range(2))
    varies = ["dq", "dbias"] if axes in ("11qk", "1hqk", "1h1k", "1hq1", "1h11") else ["dq"]
    assert_same_arrays(second, first, varies)
    judge(f"{axes} {kind}", {name: a.get() for name, a in first.items()}, *answers_to(x))

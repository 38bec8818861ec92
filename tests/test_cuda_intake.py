"""GPU arrays as they come in: what is taken, what is refused and in what words; without a GPU."""

import sys

import cupy
import numpy as np
import pytest
from fake_cupy import fake

import cupy_flash as cf
from cupy_flash import device, intake


def test_sides_and_devices_are_not_mixed(launches):
    x = np.zeros((5, 16), np.float32)
    with pytest.raises(TypeError, match="`q` is on a GPU, but `k` is in CPU memory"):
        cf.attention(fake(x), x, x)
    with pytest.raises(TypeError, match="`q` is on a GPU, but `mask` is in CPU memory"):
        cf.attention(fake(x), fake(x), fake(x), mask=np.ones((5, 5), bool))
    with pytest.raises(ValueError, match="`v` is on GPU 1, but `q` is on GPU 0"):
        cf.attention(fake(x), fake(x), fake(x, device=1))
    with pytest.raises(ValueError, match="`kv_lens` is on GPU 2, but `q` is on GPU 1"):
        cf.attention(*(fake(x, device=1) for _ in "qkv"), kv_lens=fake(np.int32([5]), device=2))
    with pytest.raises(TypeError, match="`scale` is a cupy"):
        cf.attention(fake(x), fake(x), fake(x), scale=fake(np.float32(1)))
    lse = np.zeros(5, np.float32)
    with pytest.raises(TypeError, match="lses"):
        cf.merge([fake(x), fake(x)], [lse, lse])
    with pytest.raises(ValueError, match=r"GPU 1, but `outs`.0. is on GPU 0"):
        cf.merge([fake(x), fake(x, device=1)], [fake(lse), fake(lse)])
    assert launches == []


def test_mixed_sides_are_told_both_ways_out(launches):
    x = np.zeros((5, 16), np.float32)
    step = r"pass `cupy.asarray\(k\)` or `cupy.asnumpy\(q\)`$"
    with pytest.raises(TypeError, match=step):
        cf.attention(fake(x), x, fake(x))
    with pytest.raises(ValueError, match=r"pass a copy made under `with cupy.cuda.Device\(0\):`$"):
        cf.attention(fake(x), fake(x), fake(x, device=1))
    lse = np.zeros(5, np.float32)
    with pytest.raises(TypeError, match=r"^`lses`\[0\] .*pass `cupy.asarray\(lses\[0\]\)`$"):
        cf.merge([fake(x)], [lse])
    with pytest.raises(TypeError, match=r"^`outs`\[1\] .*pass `cupy.asnumpy\(outs\[1\]\)`$"):
        cf.merge([x, fake(x)], [lse, lse])


@pytest.mark.parametrize("name", ["scale", "softcap", "q_offset", "window", "causal"])
def test_numbers_on_a_gpu_are_not_waited_for(launches, monkeypatch, name):
    """Only there would a call have to wait; `float` and `operator.index` of CuPy would do so."""
    def wait(*_):
        raise AssertionError("the GPU was waited for")

    monkeypatch.setattr(cupy.ndarray, "get", wait, raising=False)
    x = fake(np.zeros((5, 16), np.float32))
    number = fake(np.float32(1) if name in ("scale", "softcap") else np.int64(1))
    with pytest.raises(TypeError, match=rf"^`{name}` is .*cupy"):
        cf.attention(x, x, x, **{name: (number, 0) if name == "window" else number})
    if name == "scale":
        with pytest.raises(TypeError, match=r"would have to be waited for.*`float\(scale\)`"):
            cf.attention(x, x, x, scale=number)


def test_a_subclass_of_cupy_with_a_meaning_is_refused(launches):
    class Plain(cupy.ndarray):
        """Nothing of its own."""

    class Units(cupy.ndarray):
        def __array_ufunc__(self, *args, **kwargs):
            return NotImplemented

    x = fake(np.zeros((5, 16), np.float32))
    cf.attention(Plain((5, 16), np.float32, memptr=x.data), x, x)
    assert intake.library(Plain) == "cupy" and intake.library(Units) is None
    bad = Units((5, 16), np.float32, memptr=x.data)
    with pytest.raises(TypeError, match=r"^`v` is a .*Units.*: pass `cupy.asarray\(v\)`"):
        cf.attention(x, x, bad)
    lse = fake(np.zeros(5, np.float32))
    with pytest.raises(TypeError, match=r"^`outs`\[0\] is a .*Units"):
        cf.merge([bad], [lse])


def test_explain_tells_what_is_launched(launches):
    """In both passes, with the words that change the kernels."""
    q, k, v = (fake(np.zeros((2, 4, n, 64), np.float16)) for n in (300, 500, 500))
    wide = np.float32
    for forward, backward, options in (
            ({}, {}, {}), ({}, {"deterministic": True}, {"causal": True}),
            ({"out_dtype": wide}, {"grad_dtype": wide}, {}),
            ({}, {}, {"bias": fake(np.zeros(500, np.float64))}),
            ({"out": fake(np.zeros((2, 4, 300, 64), np.float16))},
             {"dk": fake(np.zeros((2, 4, 500, 64), np.float16))}, {"window": (7, 0)})):
        launches.clear()
        out, lse = cf.attention(q, k, v, return_lse=True, **forward, **options)
        cf.attention_backward(out, q, k, v, out, lse, **backward, **options)
        lines = cf.explain(q, k, v, return_lse=True, **forward, **backward, **options).split("\n")
        explained = [line.strip().partition(":")[0] for line in lines if " threads, " in line]
        assert len(explained) == len(launches)
        for entry, name in zip(explained, launches.names, strict=True):
            assert name.startswith(f"{entry}_"), (entry, name)


def test_arrays_that_a_gpu_cannot_read(launches):
    raw = np.zeros(321, np.uint8)
    odd = fake(raw[1:].view(np.float32).reshape(5, 16))
    with pytest.raises(ValueError, match="`v` starts at an address"):
        cf.attention(*(fake(np.zeros((5, 16), np.float32)) for _ in "qk"), odd)
    record = np.zeros((5, 16), np.dtype([("x", "f4"), ("y", "u2")]))["x"]
    with pytest.raises(ValueError, match="`q` has strides"):
        cf.attention(fake(record), *(fake(np.zeros((5, 16), np.float32)) for _ in "kv"))
    assert launches == []


@pytest.mark.parametrize("name", "qk")
def test_a_sequence_too_long_for_32_bits_is_refused(launches, name):
    short = fake(np.zeros((1, 16), np.float32))
    long = fake(np.broadcast_to(np.float32(0), (2**30, 16)))
    q, k = (long, short) if name == "q" else (short, long)
    with pytest.raises(ValueError, match=rf"`{name}` has 1073741824 rows.*at most 1073741823"):
        cf.attention(q, k, k)
    assert launches == []


def test_an_old_gpu_is_named(monkeypatch):
    from cupy.cuda import runtime

    properties = {"name": b"Old 1", "major": 7, "minor": 5, "multiProcessorCount": 40,
                  "sharedMemPerBlockOptin": 65536}
    monkeypatch.setattr(runtime, "getDeviceProperties", lambda number: properties)
    device.gpu.cache_clear()
    x = fake(np.zeros((5, 16), np.float32))
    with pytest.raises(NotImplementedError, match=r"Old 1, with compute capability 7.5.*NumPy"):
        cf.attention(x, x, x)
    properties |= {"major": 12, "minor": 0, "sharedMemPerBlockOptin": 101376}
    assert device.gpu(0).arch == 120 and device.gpu(0).smem == 101376
    device.gpu.cache_clear()


class Foreign:
    """A GPU array of another library."""

    def __init__(self, x, typestr="<f4"):
        self.shape = x.shape
        self.__cuda_array_interface__ = {"shape": x.shape, "typestr": typestr, "version": 3,
                                         "data": (x.ctypes.data, False)}


class ForeignDlpack:
    """The same with DLPack."""

    def __init__(self, x):
        self.x = x

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **_):
        raise BufferError("not today")


def test_arrays_of_other_libraries(launches, monkeypatch):
    x = np.zeros((5, 16), np.float32)
    monkeypatch.setattr(cupy, "is_available", lambda: True)
    monkeypatch.setattr(cupy, "asarray", lambda foreign: fake(x))
    monkeypatch.setattr(cupy, "from_dlpack", lambda foreign: foreign.__dlpack__())
    out = cf.attention(Foreign(x), fake(x), Foreign(x))
    assert isinstance(out, cupy.ndarray)
    assert launches[-1][3]["q"]["address"] == x.ctypes.data
    with pytest.raises(TypeError, match=r"`k` comes through __cuda_array_interface__.*bfloat16"):
        cf.attention(fake(x), Foreign(x, "<V2"), fake(x))
    with pytest.raises(TypeError, match="`v` cannot be taken in through DLPack: not today"):
        cf.attention(fake(x), fake(x), ForeignDlpack(x))
    monkeypatch.setattr(cupy, "from_dlpack", lambda foreign: fake(x))
    cf.attention(fake(x), fake(x), ForeignDlpack(x))
    assert launches[-1][3]["v"]["address"] == x.ctypes.data
    with pytest.raises(TypeError, match="`q` is on a GPU, but `k` is in CPU memory"):
        cf.attention(Foreign(x), x, x)


def test_no_cupy_and_no_device(monkeypatch):
    foreign = Foreign(np.zeros((5, 16), np.float32))
    monkeypatch.setattr(cupy, "is_available", lambda: False)
    with pytest.raises(NotImplementedError, match=r"`q` is on a GPU.*no CUDA device.*NumPy"):
        cf.attention(foreign, foreign, foreign)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(NotImplementedError, match=r"`q` is on a GPU.*not installed.*cuda13x"):
        cf.attention(foreign, foreign, foreign)

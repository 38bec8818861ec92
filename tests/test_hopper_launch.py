"""The launch of the kernel for sm_90a, on pretended arrays: its parameters and its tensor maps."""

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from cuda_on_cpu.harness import HostMap
from fake_cupy import H200, fake, pretended_gpu

import cupy_flash as cf
from cupy_flash.backends.cuda import tensor_maps


@pytest.fixture
def launches(monkeypatch):
    """Records of what is launched; `made` counts the maps."""
    made = []

    class CountedMap(HostMap):
        def __call__(self, address):
            made.append(address)
            return super().__call__(address)

    monkeypatch.setattr(tensor_maps, "MapMaker", CountedMap)
    with pretended_gpu(monkeypatch, replace(H200, targets=("90a",))) as records:
        records.made = made
        yield records


def arrays(B=4, Hq=8, Hk=8, N=1000, d=64, dtype=ml_dtypes.bfloat16, skip=0):
    """q, k, v that begin `skip` elements behind a border of 16 bytes."""
    def one(H):
        whole = np.zeros(B * H * N * d + skip + 8, dtype)
        start = -whole.ctypes.data % 16 // whole.itemsize + skip
        return fake(whole[start:][:B * H * N * d].reshape(B, N, H, d).swapaxes(1, 2))

    return one(Hq), one(Hk), one(Hk)


def words(struct, name):
    return struct[name].tobytes()


def test_maps_say_where_arrays_lie(launches):
    q, k, v = arrays(N=4000)
    out = cf.attention(q, k, v, causal=True)
    (name, grid, block, struct, shared), = launches
    assert name.startswith("forward_sm90") and grid == (132,) and block == (512,)
    assert shared == 205824 and struct["tasks"] == 32 * 21
    assert struct["out"]["address"] == out.data.ptr
    assert (struct["pack"], struct["section"]) == (1, 32)
    assert struct["unit"] == np.float32(np.log2(np.e) / 8) and struct["lazy_2"] == 8
    q_map, k_map, out_map = (np.frombuffer(words(struct, f"{x}_map"), np.uint64)
                             for x in ("q", "k", "out"))
    assert q_map[:12].tolist() == [q.data.ptr, 64, 8, 4000, 4, 128, 8 * 128, 32000 * 128,
                                   64, 1, 64, 1]
    assert k_map[:12].tolist() == [k.data.ptr, 64, 4000, 8, 4, 8 * 128, 128, 32000 * 128,
                                   64, 128, 1, 1]
    assert out_map[:12].tolist() == [out.data.ptr, *q_map[1:10], 16, 1]


def test_maps_are_made_once_for_the_same_addresses(launches):
    first, second = arrays(), arrays()
    out = [cf.attention(*given) for given in (first, first, second, first, second)]
    assert launches.made == [x.data.ptr for x in (*first, *out[:2], *second, *out[2:])]
    maps = [words(record[3], "v_map") for record in launches]
    assert maps[0] == maps[1] == maps[3] != maps[2] == maps[4]
    assert len({words(record[3], "out_map") for record in launches}) == 5


def test_threads_make_maps_at_once(monkeypatch):
    """The driver's function runs without the GIL: each call needs memory of its own."""
    def encode(place, element, rank, address, *_):
        time.sleep(0.001)
        ctypes.memmove(place.value, (ctypes.c_uint64 * 16)(*[address.value] * 16), 128)
        return 0

    monkeypatch.setattr(tensor_maps, "_driver",
                        lambda: SimpleNamespace(cuTensorMapEncodeTiled=encode))
    make = tensor_maps.MapMaker("float16", (64, 9, 2, 1), (128, 1152, 2304), (64, 9, 1, 1))
    with ThreadPoolExecutor(8) as pool:
        for address, found in zip(range(16, 16 * 65, 16), pool.map(make, range(16, 16 * 65, 16)),
                                  strict=True):
            assert np.frombuffer(found, np.uint64).tolist() == [address] * 16


def test_unaligned_arrays_get_the_other_plan(launches):
    q, k, v = arrays()
    odd = arrays(skip=1)
    cf.attention(q, k, v)
    cf.attention(odd[0], k, v)
    cf.attention(q, k, odd[2])
    cf.attention(q, k, v, out=odd[0])
    assert [name.startswith("forward_sm90") for name in launches.names] == [
        True, False, False, False]
    assert launches[3][3]["out"]["address"] == odd[0].data.ptr
    assert "k does not begin on a border of 16 bytes" in cf.explain(q, odd[1], v)


def test_rows_need_not_be_whole_16_bytes(launches):
    q, k, v = (x[..., :60] for x in arrays(d=64))
    out = cf.attention(q, k, v)
    name, *_, struct, _ = launches[0]
    assert name.startswith("forward_sm90") and out.strides[1] == 120 and name.endswith("narrow1")
    q_map, v_map = (np.frombuffer(words(struct, f"{x}_map"), np.uint64) for x in "qv")
    assert q_map[1] == v_map[1] == 60 and q_map[5] == 128
    assert not any(words(struct, "out_map"))


def test_the_group_of_a_key_head_shares_tiles(launches):
    q, k, v = arrays(B=8, Hq=16, Hk=2, N=72, d=128)
    cf.attention(q, k, v)
    struct = launches[0][3]
    assert struct["pack"] == 8 and struct["tasks"] == 8 * 2 * 5
    for name, rows in (("q_map", 8), ("out_map", 2)):
        box = np.frombuffer(words(struct, name), np.uint64)[8:12]
        assert box.tolist() == [64, 8, rows, 1]

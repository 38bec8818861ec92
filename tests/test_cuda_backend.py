"""The CUDA backend up to the launch, on CuPy arrays over host memory; no GPU is needed."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from operator import ne
from types import SimpleNamespace

import cupy
import numpy as np
import pytest
from cases import CASES, inputs
from fake_cupy import H200, fake

import cupy_flash as cf
from cupy_flash import arrays, bind, device
from cupy_flash.axes import four_axes
from cupy_flash.backends.cuda import launch, params, source, structs
from cupy_flash.backends.cuda.unit import headers_of, unit
from cupy_flash.bind import Options, bind_backward, bind_forward
from cupy_flash.plan import make_plan
from cupy_flash.plan.cuda import kernel_of

SOME = [case for case in CASES if case.dtype in ("bfloat16", "float64") or case.precision]


def move(x):
    """The `Inputs` as CuPy arrays."""
    options = {name: fake(value) if isinstance(value, np.ndarray) else value
               for name, value in x.options.items()}
    return type(x)(*(fake(a) for a in x[:-1]), options)


def test_structs_are_laid_out_as_a_compiler_does():
    """Sizes are compared in each unit; here the places of a few fields, by C++'s rules."""
    found = structs.structs()
    places = {name: {field: place for field, (_, place, *_) in dtype.fields.items()}
              for name, dtype in found.items()}
    assert places["Tensor"] == dict(zip(("address", "b", "h", "n", "c", "kind"),
                                        range(0, 48, 8), strict=True))
    assert places["ForwardParams"]["l_partial"] == found["ForwardParams"].itemsize - 8
    hopper, behind = places["ForwardSm90Params"], found["ForwardParams"].itemsize
    assert hopper["pack"] == behind and hopper["most"] == behind + 28
    for name in ("ForwardSm90Params", "BackwardSm90Params"):
        maps = [place for field, place in places[name].items() if field.endswith("_map")]
        assert maps[0] % 64 == 0 and maps == [*range(maps[0], found[name].itemsize, 128)]
        base = found[name.replace("Sm90", "")]
        assert {field: places[name][field] for field in base.names} == places[
            name.replace("Sm90", "")]


def test_the_unit_is_names_and_numbers():
    problem, *_ = bind_forward(*(np.zeros((3, 40), np.float32) for _ in "qkv"), Options())
    for direction in ("forward", "backward"):
        for one in make_plan(direction, problem, H200).launches:
            name, text = unit(one.entry, one.config, one.smem_bytes)
            header = kernel_of(one.entry).header
            assert text.startswith(f"// sources sha256: {source.digest(header)}\n")
            assert f'#include "{header}"' in text and text.count(f"{name}(") == 1
            assert headers_of([name]) == (header,)
            assert (source.folder() / header).is_file()
            assert f"smem_bytes == {one.smem_bytes}," in text and "tf32x3" in name
            assert "d = 48, d_v = 48" in text or "backward" in one.entry or one.entry == "combine"


def test_an_edited_source_is_another_unit(monkeypatch):
    problem, *_ = bind_forward(*(np.zeros((3, 40), np.float32) for _ in "qkv"), Options())
    one = make_plan("forward", problem, H200).launches[0]
    before = unit(one.entry, one.config, one.smem_bytes)[1]
    unit.cache_clear()
    monkeypatch.setattr(source, "digest", lambda *headers: "0" * 64)
    assert unit(one.entry, one.config, one.smem_bytes)[1] != before
    unit.cache_clear()


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.id)
def test_the_kept_struct_is_the_packed_one(case, launches):
    """The first call packs from scratch, the second writes addresses over what is kept."""
    for _ in range(2):
        y = move(inputs(case))
        out, lse = cf.attention(y.q, y.k, y.v, return_lse=True, **y.options)
        problem, arrays = bind_forward(y.q, y.k, y.v, Options(**y.options))
        check(launches, "forward", problem, arrays.named | {"out": out, "lse": lse})
        g = cf.attention_backward(y.dout, y.q, y.k, y.v, out, lse, dlse=y.dlse, **y.options)
        problem, arrays = bind_backward(y.dout, y.q, y.k, y.v, out, lse, Options(**y.options),
                                           dlse=y.dlse)
        grads = {name: x for name, x in g._asdict().items() if x is not None}
        check(launches, "backward", problem, arrays.named | grads)


def check(launches, direction, problem, arrays):
    """The recorded launches are those of the plan, with the struct that `pack` makes."""
    plan = make_plan(direction, problem, H200)
    assert len(launches) == len(plan.launches)
    longest = max((record[3] for record in launches), key=lambda struct: struct.nbytes, default=())
    for one, (name, grid, block, struct, shared) in zip(plan.launches, launches, strict=True):
        assert name == unit(one.entry, one.config, one.smem_bytes)[0]
        assert (grid, block, shared) == ((one.tasks,), (one.threads,), one.smem_bytes)
        names = ("out_partial", "lse_partial", "l_partial")
        if direction == "backward":
            names = ("state", "dq_sums", "dk_sums", "dv_sums", "normalisers", "dbias_sums",
                     "dq_parts")
        addresses = {name: longest[name] for name in names if name in longest.dtype.names}
        packed = params.pack(plan, one, four_axes(problem, arrays), addresses)
        assert struct.tobytes() == packed.tobytes()[:struct.nbytes]
        wanted = {buffer.name for buffer in plan.workspace}
        assert {name for name, address in addresses.items() if address} == wanted
    launches.clear()


def test_a_struct_follows_its_arrays(launches):
    """Same layouts, other memory: nothing of the first call may be left."""
    for _ in range(3):
        q, k, v = (fake(np.zeros((2, 3, n, 16), np.float16)) for n in (5, 7, 7))
        out = cf.attention(q, k, v)
        struct = launches[-1][3]
        assert [struct[name]["address"] for name in ("q", "k", "v", "out")] == [
            x.data.ptr for x in (q, k, v, out)]


def test_an_lse_that_nobody_asked_for_is_not_allocated(launches):
    x = fake(np.zeros((2, 3, 5, 16), np.float16))
    cf.attention(x, x, x)
    assert launches[-1][3]["lse"]["address"] == 0
    _, lse = cf.attention(x, x, x, return_lse=True)
    assert launches[-1][3]["lse"]["address"] == lse.data.ptr


@pytest.mark.parametrize("N, together", [(64, True), (4096, False)])
def test_results_share_memory_only_where_they_are_small(N, together, launches):
    x = fake(np.zeros((2, N, 16), np.float16))
    out, lse = cf.attention(x, x, x, return_lse=True)
    results = [out, lse, *cf.attention_backward(out, x, x, x, out, lse)[:3]]
    for i, one in enumerate(results):
        for other in results[i + 1 :]:
            assert not arrays._overlap(arrays._addresses(one), arrays._addresses(other))
    assert (out.data.mem is lse.data.mem) == together


def test_kernels_read_the_copies(launches, monkeypatch):
    """Addresses keep the order of the arrays, although some are copied and one is renamed."""
    monkeypatch.setattr(bind, "dense_copy", lambda x: copies.setdefault(x.shape, fake(
        np.zeros(x.shape, x.dtype.type))))
    monkeypatch.setattr(bind, "on_device_of", lambda x: nullcontext())
    slopes, lens = fake(np.zeros(3, np.float32)), fake(np.zeros(2, np.int32))
    for _ in range(2):
        copies = {}
        k, v = fake(np.zeros((2, 3, 7, 16), np.float16)), fake(np.zeros((2, 3, 7, 24), np.float16))
        q = fake(np.zeros((2, 3, 5, 32), np.float16)[..., ::2])
        out = cf.attention(q, k, v, alibi_slopes=slopes, kv_lens=lens)
        struct = launches[-1][3]
        assert struct["q"]["address"] == copies[q.shape].data.ptr != q.data.ptr
        for name, x in {"k": k, "v": v, "slopes": slopes, "out": out}.items():
            assert struct[name]["address"] == x.data.ptr, name
        assert struct["kv_lens"] == lens.data.ptr


def test_threads_do_not_mix_their_calls(launches):
    def call(_):
        x = fake(np.zeros((2, 3, 5, 16), np.float16))
        return x, cf.attention(x, x, x)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(call, range(400)))
    structs = [record[3] for record in launches]
    found = {tuple(struct[name]["address"] for name in ("q", "k", "v", "out"))
             for struct in structs}
    assert len(launches) == 400
    assert found == {(*[x.data.ptr] * 3, out.data.ptr) for x, out in results}


def test_each_device_has_its_own_plan(launches, monkeypatch):
    gpus = [replace(H200, number=number) for number in (0, 1)]
    monkeypatch.setattr(device, "gpu", gpus.__getitem__)
    monkeypatch.setattr(launch, "get_device_id", lambda: 1)
    monkeypatch.setattr(cupy.cuda, "Device", lambda number: nullcontext())
    for number in (0, 1, 0, 1):
        x = fake(np.zeros((2, 3, 5, 16), np.float16), device=number)
        cf.attention(x, x, x)
    assert [key[2] for key in launch.prepared] == gpus and len(launches) == 4


def test_a_struct_is_a_call_s_own(launches):
    """Two threads may fill the structs of one plan at once."""
    x, y = (fake(np.zeros((2, 3, 5, 16), np.float16)) for _ in "xy")
    cf.attention(x, x, x)
    (kept,) = launch.prepared.values()
    template, addresses = kept.template, dict.fromkeys("qkv", x.data.ptr)
    one = template.fill(addresses, 0)
    before = one[:]
    template.fill(addresses | {"q": y.data.ptr}, 4096)
    one[template.tasks] = 77
    assert sum(map(ne, one, before)) == 1
    assert template.fill(addresses, 0) == before


@pytest.mark.parametrize("offset, width", [(0, 16), (1, 2), (2, 4), (4, 8), (8, 16), (12, 8)])
def test_loads_are_as_wide_as_the_addresses_allow(offset, width, launches):
    raw = np.zeros(3 * 4096, np.float16)
    raw = raw[-raw.ctypes.data % 16 // 2 :]
    q, k = (fake(raw[i * 2048 :][:1024].reshape(2, 8, 64)) for i in range(2))
    v = fake(raw[4096 + offset :][:1024].reshape(2, 8, 64))
    for _ in range(2):
        cf.attention(q, k, v)
        assert launches[-1][3]["vector_bytes"] == width
    cf.attention(q, k, fake(raw[4096:][:1024].reshape(2, 8, 64)))
    assert launches[-1][3]["vector_bytes"] == 16


@pytest.mark.parametrize("columns, width", [(64, 16), (20, 8), (18, 4), (7, 2)])
def test_a_load_never_leaves_its_row(columns, width, launches):
    wide = np.zeros((2, 8, 64), np.float16)
    wide = np.zeros(2048, np.float16)[-wide.ctypes.data % 16 // 2 :][:1024].reshape(2, 8, 64)
    x = fake(wide[..., :columns])
    cf.attention(x, x, x)
    assert launches[-1][3]["vector_bytes"] <= width


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_results_keep_the_memory_order(order, launches):
    shape = (2, 3, 40)
    memory = np.zeros([shape[axis] for axis in order] + [16], np.float32)
    x = memory.transpose(*np.argsort(order), 3)
    want, want_lse = cf.attention(x, x, x, return_lse=True)
    out, lse = cf.attention(fake(x), fake(x), fake(x), return_lse=True)
    assert isinstance(out, cupy.ndarray) and isinstance(lse, cupy.ndarray)
    assert (out.shape, out.strides, out.dtype) == (want.shape, want.strides, want.dtype)
    assert (lse.shape, lse.dtype) == (want_lse.shape, want_lse.dtype)
    (struct,) = (record[3] for record in launches)
    assert tuple(struct["out"])[1:5] == want.strides


@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_every_number_of_axes(ndim, launches):
    q, k, v = (np.zeros((2, 3, n, d)[4 - ndim :], np.float16)
               for n, d in ((5, 16), (7, 16), (7, 8)))
    bias = np.zeros((5, 1), np.float32)
    out, lse = cf.attention(fake(q), fake(k), fake(v), bias=fake(bias), return_lse=True)
    want, want_lse = cf.attention(q, k, v, bias=bias, return_lse=True)
    assert (out.shape, lse.shape) == (want.shape, want_lse.shape)
    *grads, dsink = cf.attention_backward(out, fake(q), fake(k), fake(v), out, lse, bias=fake(bias))
    assert dsink is None and [g.shape for g in grads] == [x.shape for x in (q, k, v, bias)]
    assert [g.dtype for g in grads] == [x.dtype for x in (q, k, v, bias)]
    struct = launches[-1][3]
    assert tuple(struct["bias"])[1:] == (0, 0, 4, 0, 2)
    for name, x in (("q", q), ("dk", k), ("dv", v), ("dbias", bias)):
        assert tuple(struct[name])[5 - x.ndim : 5] == x.strides, name
    assert tuple(struct["lse"])[4 - want_lse.ndim : 4] == want_lse.strides


def test_given_buffers_are_filled(launches):
    q = fake(np.zeros((3, 5, 16), np.float16))
    out = fake(np.zeros((3, 5, 32), np.float16)[..., ::2])
    assert cf.attention(q, q, q, out=out) is out
    where, _, *strides, _ = tuple(launches[-1][3]["out"])
    assert (where, *strides) == (out.data.ptr, 320, 64, 4)
    dk = fake(np.zeros((3, 5, 16), np.float16))
    lse = fake(np.zeros((3, 5), np.float32))
    grads = cf.attention_backward(q, q, q, q, q, lse, dk=dk)
    assert grads.dk is dk and launches[-1][3]["dk"]["address"] == dk.data.ptr


def test_overlaps_are_found_without_reading(launches):
    memory = np.zeros((4, 5, 16), np.float16)
    q, k = fake(memory[:2]), fake(memory[2:])
    with pytest.raises(ValueError, match="`out` overlaps `k`"):
        cf.attention(q, k, k, out=fake(memory[2:]))
    with pytest.raises(ValueError, match="`out` overlaps `q`"):
        cf.attention(q, k, k, out=fake(memory[1:3]))
    with pytest.raises(ValueError, match="`out` has strides"):
        cf.attention(q, k, k, out=fake(np.broadcast_to(memory[:1], (2, 5, 16))))
    interleaved = np.zeros((2, 5, 32), np.float16)
    cf.attention(fake(interleaved[..., :16]), k, k, out=fake(interleaved[..., 16:]))
    assert launches.names == ["forward_sm80_float16_d16_128x64_blocks2_keep_Q1"]


def test_lengths_are_not_read(launches):
    """They may be wrong, or not yet be written: the kernels clamp them."""
    q = fake(np.zeros((2, 1, 5, 16), np.float32))
    lens = np.int32([99, -3])
    cf.attention(q, q, q, kv_lens=fake(lens), q_lens=fake(lens))
    struct = launches[-1][3]
    assert struct["kv_lens"] == struct["q_lens"] == lens.ctypes.data


def test_a_repeated_call_binds_and_plans_nothing_anew(launches, monkeypatch):
    x = fake(np.zeros((2, 3, 5, 16), np.float16))
    cf.attention(x, x, x, causal=True)
    for module, name in ((params, "pack"), (launch, "four_axes"), (arrays, "_addresses")):
        monkeypatch.setattr(module, name, None)
    y = fake(np.ones((2, 3, 5, 16), np.float16))
    cf.attention(y, y, y, causal=True)
    assert launches[-1][3]["q"]["address"] == y.data.ptr
    with pytest.raises(TypeError):
        cf.attention(y, y, y[..., :8], causal=True)


def test_explain_needs_no_kernel(launches):
    x = fake(np.zeros((2, 3, 300, 64), np.float16))
    text = cf.explain(x, x, fake(np.zeros((2, 3, 300, 64), np.float16, order="F")), causal=True)
    for part in ("forward:", "backward:", "a pretended H200", "backward_sm80: Br 64, Bc 128"):
        assert part in text, part
    assert launches == []


def test_empty_problems(launches):
    for Nq, Nk, B in ((0, 5, 2), (5, 0, 2), (5, 5, 0)):
        q, k = (fake(np.zeros((B, 2, n, 16), np.float32)) for n in (Nq, Nk))
        out, lse = cf.attention(q, k, k, return_lse=True)
        grads = cf.attention_backward(q, q, k, k, out, lse)
        assert out.shape == q.shape and grads.dk.shape == k.shape
        assert all(min(grid) > 0 for _, grid, *_ in launches)


def test_the_arrays_device_is_entered(launches, monkeypatch):
    entered = []

    class Device:
        def __init__(self, number):
            self.number = number

        def __enter__(self):
            entered.append(self.number)

        def __exit__(self, *_):
            entered.append("left")

    monkeypatch.setattr(launch, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=Device)))
    monkeypatch.setattr(launch, "get_device_id", lambda: 3)
    x = fake(np.zeros((5, 16), np.float32))
    cf.attention(x, x, x)
    assert entered == [0, "left"] and len(launches) == 1

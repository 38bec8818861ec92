"""Plans for GPUs: pure functions of a problem and a device, checked without either."""

from dataclasses import replace
from itertools import product
from math import ceil

import pytest
from problems import problem_of
from units import SMEM

from cupy_flash.device import GpuDevice
from cupy_flash.plan import cuda_backward_sm80, cuda_forward_sm80, cuda_wmma, make_plan
from cupy_flash.plan.cuda import SPLIT_KEYS, kernel_of
from cupy_flash.plan.kernel import Offer, Refusal, kind_of
from cupy_flash.problem import Mask

ENTRIES = ("forward_wmma", "dkdv_wmma", "dq_wmma", "dbias_wmma")
DTYPES = (("float16", None), ("bfloat16", None), ("float32", "tf32"), ("float32", "tf32x3"),
          ("float64", None))
FUSED = ["backward_preprocess", "backward_sm80", "backward_postprocess"]
H200 = GpuDevice(0, "H200", 90, 132, 227 * 1024)


def problem(**changes):
    """A bfloat16 problem of moderate size."""
    return problem_of(**{
        "batch": 2, "heads_q": 4, "heads_k": 2, "Nq": 1000, "Nk": 3000, "d": 64, "d_v": 64,
        "dtype": "bfloat16", "out_dtype": "bfloat16", "precision": None, "scale": 0.125,
        "softcap": 0.0, "mask": Mask(), **changes})


@pytest.mark.parametrize("kib", [99, 163, 227])
@pytest.mark.parametrize("dtype, precision", DTYPES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_head_dim_has_a_tile_within_the_limit(entry, dtype, precision, kib):
    device = replace(H200, smem=kib * 1024)
    for d in range(1, 257):
        for d_v in {d, 1, 256}:
            p = problem(d=d, d_v=d_v, dtype=dtype, precision=precision, bias_shape=(1, 1, 1, 1))
            config, smem, _, reason, _ = kernel_of(entry).offer(p, device)
            assert smem == cuda_wmma.smem_bytes(entry, config) <= device.smem
            assert cuda_wmma.accumulator_registers(entry, config) <= 64
            assert d <= config.d < d + 16 and d_v <= config.d_v < d_v + 16
            assert config.d % 16 == config.d_v % 16 == 0
            step = 8 if dtype == "float64" else 16
            assert config.Br % step == config.Bc % step == 0 and reason


@pytest.mark.parametrize("kib", [16, 48, 64])
def test_what_fits_nowhere_is_said(kib):
    device = replace(H200, smem=kib * 1024)
    wide = problem(d=256, d_v=250, dtype="float64")
    with pytest.raises(NotImplementedError) as error:
        make_plan("forward", wide, device)
    smallest = min(
        cuda_wmma.smem_bytes("forward_wmma", cuda_wmma.config_of("forward_wmma", wide, tile))
        for tile in cuda_wmma.FORWARD.rows["float64"])
    for part in ("`q`", "256", "250", "float64", f"{smallest:,}", f"{device.smem:,}", "NumPy"):
        assert part in str(error.value), part


def test_a_smaller_limit_never_gets_a_larger_tile():
    for entry in ENTRIES:
        for dtype, precision in DTYPES:
            for d in (16, 64, 128, 256):
                p = problem(d=d, d_v=d, dtype=dtype, precision=precision, bias_shape=(1, 1, 1, 1))
                sizes = [kernel_of(entry).offer(p, replace(H200, smem=kib * 1024)).smem_bytes
                         for kib in sorted(set(SMEM.values()))]
                assert sizes == sorted(sizes)


def test_each_row_of_the_table_can_be_chosen():
    chosen = set()
    for arch, kib in SMEM.items():
        device = GpuDevice(0, "x", arch, 100, kib * 1024)
        for dtype, precision in DTYPES:
            for d in range(16, 257, 16):
                for entry in ENTRIES:
                    p = problem(d=d, d_v=d, dtype=dtype, precision=precision,
                                bias_shape=(1, 1, 1, 1))
                    c, _, _, reason, _ = kernel_of(entry).offer(p, device)
                    chosen.add((c.Br, c.Bc, c.warps, reason))
    assert {tuple(tile) for kernel in cuda_wmma.KERNELS for rows in kernel.rows.values()
            for tile in rows} == chosen


@pytest.mark.parametrize("kib", [99, 163, 227])
@pytest.mark.parametrize("dtype, precision", DTYPES)
def test_forward_stays_in_registers_where_a_row_serves(dtype, precision, kib):
    """Up to d = 256, in float64 not in 99 KiB, and never beyond what a block can have."""
    device = replace(H200, smem=kib * 1024)
    for d in range(1, 257):
        for d_v in {d, 1, 256}:
            p = problem(d=d, d_v=d_v, dtype=dtype, precision=precision)
            offer = cuda_forward_sm80.FORWARD.offer(p, device)
            if isinstance(offer, Refusal):
                assert dtype == "float64" and kib == 99 and d > 224 and d_v > 192
                assert f"{d} and {d_v}" in offer.reason
            else:
                config, smem, _, reason, _ = offer
                assert smem == cuda_forward_sm80.smem_bytes(config) <= device.smem and reason
                parts = 1 + dict(config.constants)["pairs"]
                assert d <= config.d < d + 16
                assert d_v <= config.d_v < d_v + 16 * (parts if dtype == "float64" else 1)
                assert config.Br * parts % (16 * config.warps) == config.Bc % 16 == 0
                assert config.d_v % (16 * parts) == 0


def test_each_row_in_registers_can_be_chosen():
    chosen = set()
    for kib in SMEM.values():
        for dtype, precision in DTYPES:
            for d in range(16, 257, 16):
                p = problem(d=d, d_v=d, dtype=dtype, precision=precision)
                offer = cuda_forward_sm80.FORWARD.offer(p, replace(H200, smem=kib * 1024))
                if isinstance(offer, Offer):
                    chosen.add((kind_of(dtype, precision), offer.reason))
    assert chosen == {(kind, row.reason) for kind, rows in cuda_forward_sm80.ROWS.items()
                      for row in rows}


@pytest.mark.parametrize("change", [
    {"has_mask": True}, {"has_alibi": True}, {"softcap": 2.0}, {"bias_shape": (1, 1, 1, 3000)},
    {"scale": 0.0}, {"scale": -1.0}, {"scale": 1e30}, {},
], ids=str)
def test_scores_are_finished_before_the_softmax_where_they_are_more_than_products(change):
    launch = make_plan("forward", problem(**change), H200).launches[0]
    assert launch.entry == "forward_sm80"
    assert dict(launch.config.constants)["scaled"] == bool(change)


def test_the_general_kernel_serves_the_rest_and_says_why():
    device = replace(H200, smem=99 * 1024)
    plan = make_plan("forward", problem(dtype="float64", d=250, d_v=250), device)
    assert plan.launches[0].entry == "forward_wmma"
    assert "250" in next(x.reason for x in plan.refusals if x.entry == "forward_sm80")
    assert f"not forward_sm80: {plan.refusals[-1].reason}" in str(plan)


def test_options_are_compiled_in_when_asked_for():
    def options(**changes):
        return make_plan("forward", problem(**changes), H200).launches[0].config.options

    positions = Mask(left=5, right=0, q_offset=3)
    assert not options() and not options(mask=positions, has_kv_lens=True, has_q_lens=True)
    given = {"mask": {"has_mask": True}, "softcap": {"softcap": 2.0}, "alibi": {"has_alibi": True},
             "bias": {"bias_shape": (1, 1, 1, 3000), "dbias_dtype": "bfloat16"}}
    for name, change in given.items():
        assert options(**change) == (name,)
    assert options(**given["mask"], **given["bias"], **given["softcap"], **given["alibi"]) == (
        "mask", "bias", "alibi", "softcap")


def test_numbers_are_no_part_of_a_unit():
    """What changes from call to call must not compile anew."""
    one = make_plan("forward", problem(), H200).launches[0].config
    for change in ({"scale": 3.0}, {"Nq": 77, "Nk": 5000}, {"batch": 1, "heads_q": 8}, {"d": 50},
                   {"mask": Mask(right=0)}, {"out_dtype": "float32"}):
        assert make_plan("forward", problem(**change), H200).launches[0].config == one, change


def test_idle_multiprocessors_get_splits_of_the_keys():
    decode = problem(batch=1, heads_q=8, heads_k=2, Nq=1, Nk=65536)
    plan = make_plan("forward", decode, H200)
    forward, combine = plan.launches
    assert (forward.entry, combine.entry) == ("forward_sm80", "combine")
    assert forward.splits == combine.splits > 1 and forward.tasks == 2 * forward.splits
    assert H200.sms <= forward.tasks <= 2 * H200.sms
    keys = ceil(decode.Nk / forward.splits / forward.config.Bc) * forward.config.Bc
    assert (forward.splits - 1) * keys < decode.Nk <= forward.splits * keys
    assert keys >= SPLIT_KEYS
    sizes = {buffer.name: buffer.extent for buffer in plan.workspace}
    rows = forward.splits * 8
    assert sizes == {"out_partial": rows * 64, "lse_partial": rows, "l_partial": rows}
    assert len(make_plan("forward", problem(Nq=5000), H200).launches) == 1
    assert len(make_plan("forward", replace(decode, Nk=600), H200).launches) == 1


@pytest.mark.parametrize("Nk", [*range(500, 5000, 77), 65536, 10**6 + 1])
def test_no_split_is_empty(Nk):
    decode = problem(batch=1, heads_q=1, heads_k=1, Nq=1, Nk=Nk)
    launch = make_plan("forward", decode, H200).launches[0]
    tiles = ceil(Nk / launch.config.Bc)
    per_split = ceil(ceil(Nk / launch.splits) / launch.config.Bc)
    assert (launch.splits - 1) * per_split < tiles <= launch.splits * per_split


def test_backward_has_one_writer_for_each_gradient():
    plan = make_plan("backward", problem(bias_shape=(1, 4, 1000, 1), dbias_dtype="float32",
                                         deterministic=True), H200)
    assert [x.entry for x in plan.launches] == [
        "normalise", "backward_preprocess", "dkdv_wmma", "dq_wmma", "dbias_wmma"]
    assert [(b.name, b.extent, b.dtype) for b in plan.workspace] == [
        ("normalisers", 16000, "float32"), ("state", 16384, "float32")]
    rows, dkdv, dq, dbias = plan.launches[1:]
    assert rows.tasks == 8 * 16 and dkdv.tasks == 4 * 47 and dq.tasks == 4 * 32
    assert dbias.tasks == 4 * 16
    one_writer = make_plan("backward", problem(deterministic=True), H200)
    assert [x.entry for x in one_writer.launches] == [
        "backward_preprocess", "dkdv_wmma", "dq_wmma"]
    assert "atomic additions" in str(one_writer)


def test_the_fused_backward_sums_dq_in_workspace():
    plan = make_plan("backward", problem(), H200)
    prepare, fused, finish = plan.launches
    assert [x.entry for x in plan.launches] == FUSED
    assert fused.smem_bytes == cuda_backward_sm80.smem_bytes(fused.config) <= H200.smem
    assert fused.tasks == 4 * ceil(3000 / fused.config.Bc)
    assert prepare.tasks == finish.tasks == 4 * ceil(2000 / fused.config.Br)
    rows = 4 * ceil(2000 / fused.config.Br) * fused.config.Br
    assert {b.name: (b.extent, b.dtype) for b in plan.workspace} == {
        "state": (2 * rows, "float32"), "dq_sums": (rows * fused.config.d, "float32")}


@pytest.mark.parametrize("features", [False, True])
@pytest.mark.parametrize("kib", [99, 163, 227])
@pytest.mark.parametrize("dtype, precision", DTYPES)
def test_the_fused_backward_serves_where_a_row_fits(dtype, precision, kib, features):
    device = replace(H200, smem=kib * 1024)
    widest = {"float32": 128 if features and kib == 99 else 256,
              "float64": 256 if kib > 99 else 64 if features else 128}.get(
                  dtype, 64 if kib == 99 else 128 if features else 256)
    for d in range(1, 257):
        for d_v in {d, 1, 256}:
            p = problem(d=d, d_v=d_v, dtype=dtype, precision=precision, has_mask=features)
            offer = cuda_backward_sm80.BACKWARD.offer(p, device)
            if isinstance(offer, Refusal):
                assert max(d, d_v) > widest and "such wide heads" in offer.reason
                continue
            config, smem, _, reason, _ = offer
            assert smem == cuda_backward_sm80.smem_bytes(config) <= device.smem and reason
            assert d <= config.d and d_v <= config.d_v <= 256 and config.d <= 256
            assert config.d % 16 == config.d_v % 16 == 0
            # Of dQ, a warp has whole fragments in each of its passes.
            columns = config.d // cuda_backward_sm80.warps_across(config)
            two = columns >= 64 and (dict(config.constants)["parts"] > 1 or precision == "tf32x3")
            assert columns % (32 if two else 16) == 0


def test_each_row_of_the_fused_backward_can_be_chosen():
    chosen = set()
    for kib in SMEM.values():
        for dtype, precision in DTYPES:
            for d, features in product(range(16, 257, 16), (False, True)):
                p = problem(d=d, d_v=d, dtype=dtype, precision=precision, has_mask=features)
                offer = cuda_backward_sm80.BACKWARD.offer(p, replace(H200, smem=kib * 1024))
                if isinstance(offer, Offer):
                    chosen.add((kind_of(dtype, precision), offer.reason))
    assert chosen == {(kind, row.reason) for kind, rows in cuda_backward_sm80.TILES.items()
                      for row in rows}


@pytest.mark.parametrize("rows", cuda_backward_sm80.TILES.values(),
                         ids=cuda_backward_sm80.TILES)
def test_reasons_tell_rows_apart(rows):
    assert len({row.reason for row in rows}) == len(rows)


@pytest.mark.parametrize("dtype, d, kib, features, tile", [
    ("tf32", 192, 227, False, (32, 64, 8, 2, 1, 2)),
    ("tf32", 256, 227, False, (32, 64, 8, 2, 1, 1)),
    ("tf32x3", 256, 227, False, (32, 32, 8, 2, 2, 2)),
    ("tf32", 192, 163, False, (32, 32, 8, 2, 2, 2)),
    ("tf32x3", 256, 163, False, (32, 32, 8, 2, 2, 1)),
    ("tf32", 256, 99, False, (16, 16, 4, 2, 2, 1)),
    ("tf32x3", 192, 99, False, (16, 32, 4, 2, 1, 1)),
    ("tf32x3", 128, 99, True, (32, 32, 4, 1, 2, 1)),
    ("tf32", 256, 227, True, (32, 64, 8, 1, 2, 1)),
    ("tf32x3", 256, 163, True, (32, 32, 4, 1, 2, 1)),
    ("float64", 192, 227, False, (32, 32, 8, 2, 2, 1)),
    ("float64", 160, 163, False, (32, 16, 4, 2, 2, 1)),
    ("float64", 256, 227, False, (16, 32, 8, 2, 2, 1)),
    ("float64", 256, 163, False, (16, 16, 4, 2, 2, 1)),
    ("float64", 128, 99, False, (16, 16, 4, 2, 2, 1)),
    ("float64", 192, 227, True, (32, 32, 8, 1, 4, 1)),
    ("float64", 256, 227, True, (16, 32, 8, 1, 4, 1)),
    ("float64", 256, 163, True, (16, 16, 4, 1, 4, 1)),
    ("tf32", 256, 99, True, None),
    ("float64", 256, 99, False, None),
    ("float64", 192, 99, False, None),
], ids=str)
def test_tiles_of_wide_heads(dtype, d, kib, features, tile):
    dtype, precision = ("float32", dtype) if "tf32" in dtype else (dtype, None)
    p = problem(d=d, d_v=d, dtype=dtype, precision=precision, has_mask=features)
    offer = cuda_backward_sm80.BACKWARD.offer(p, replace(H200, smem=kib * 1024))
    if tile is None:
        assert isinstance(offer, Refusal)
    else:
        c = offer.config
        form = [dict(c.constants)[name] for name in ("roles", "parts", "stages")]
        assert (c.Br, c.Bc, c.warps, *form) == tile


@pytest.mark.parametrize("change, kib, why", [
    ({"deterministic": True}, 227, "no order"),
    ({"d": 200, "d_v": 200, "dtype": "float64"}, 99, "wide heads"),
    ({"d": 200, "has_mask": True}, 227, "serve no options"),
], ids=str)
def test_the_general_backward_serves_the_rest_and_says_why(change, kib, why):
    plan = make_plan("backward", problem(**change), replace(H200, smem=kib * 1024))
    assert "dkdv_wmma" in [x.entry for x in plan.launches]
    assert why in next(x.reason for x in plan.refusals if x.entry == "backward_sm80")
    assert why in str(plan)


@pytest.mark.parametrize("change, forward, backward", [
    ({"batch": 0}, [], []),
    ({"heads_q": 0, "heads_k": 0}, [], []),
    ({"heads_q": 0}, [], ["backward_sm80"]),
    ({"Nq": 0}, [], ["backward_sm80"]),
    ({"Nk": 0}, ["forward_sm80"], ["backward_preprocess", "backward_postprocess"]),
    ({"Nk": 0, "deterministic": True}, ["forward_sm80"],
     ["backward_preprocess", "dq_wmma"]),
    ({"batch": 0, "bias_shape": (1, 1, 1000, 3000)}, [], ["dbias_wmma"]),
    ({"Nk": 0, "bias_shape": (1, 1, 1000, 1)}, ["forward_sm80"],
     ["normalise", "backward_preprocess", "backward_postprocess", "dbias_wmma"]),
    ({"Nk": 0, "bias_shape": (1, 1, 1000, 0)}, ["forward_sm80"],
     ["normalise", "backward_preprocess", "backward_postprocess"]),
], ids=str)
def test_nothing_is_launched_for_nothing(change, forward, backward):
    """But what exists is written: gradients without contributions are zeroed by their kernel."""
    for direction, entries in (("forward", forward), ("backward", backward)):
        plan = make_plan(direction, problem(**change), H200)
        assert [launch.entry for launch in plan.launches] == entries
        assert all(launch.tasks > 0 for launch in plan.launches)


def test_workspace_stays_linear():
    for N in (2**10, 2**17):
        p = problem(batch=1, heads_q=1, heads_k=1, Nq=N, Nk=N)
        assert make_plan("backward", p, H200).workspace_bytes == 4 * N * (64 + 2)
        one_writer = replace(p, deterministic=True)
        assert make_plan("backward", one_writer, H200).workspace_bytes == 4 * N * 2
        forward = make_plan("forward", p, H200).workspace_bytes
        assert forward <= 2 * H200.sms * 64 * (64 + 1) * 4


def test_a_plan_says_what_it_does_and_why():
    text = str(make_plan("backward", problem(copied=("k",)), H200))
    for part in ("cuda 0, H200, sm_90, 132", "copied", "backward_sm80: Br 64, Bc 128",
                 "blocks of 128", "bytes shared; dK and dV of 32 keys",
                 "workspace state: 65,536 bytes"):
        assert part in text, part

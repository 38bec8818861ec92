"""The kernels for sm_90a without a GPU: what ptxas makes of them, and when they are chosen."""

import struct
from dataclasses import replace

import nvrtc
import pytest
from test_plan_cuda import H200
from test_plan_cuda import problem as small_problem

from cupy_flash.backends.cuda.unit import unit
from cupy_flash.plan import cuda_forward_sm90, make_plan
from cupy_flash.plan.cuda_forward_sm90 import ROWS
from cupy_flash.problem import UNLIMITED, Mask

HOPPER = replace(H200, targets=("90a",))
# Bytes of spilled registers, of any compiler: at the ends of tiles, not in the loop over keys.
SPILLED = {192: 192, 128: 64}
# With options some are in it, most with both mask and bias. With one option calls take two fifths
# to four fifths of the time that they took with a branch for each and fewer spills (H200).
SPILLED_WITH_OPTIONS = 640
WIDTHS = [(row.d, row.d_v) for row in ROWS] + [(80, 80), (96, 96)]


def problem(**changes):
    """One with tiles for every multiprocessor."""
    return small_problem(**{"batch": 8, **changes})


def compile_row(d, d_v, dtype="bfloat16", **changes):
    """(launch, cubin, log) for head dims."""
    p = problem(**{"d": d, "d_v": d_v, "dtype": dtype, "out_dtype": dtype, **changes})
    (launch,) = make_plan("forward", p, HOPPER).launches
    assert launch.entry == "forward_sm90"
    cubin, log = nvrtc.compile(unit(launch.entry, launch.config, launch.smem_bytes)[1], "90a")
    assert cubin is not None, log
    return launch, cubin, log


@pytest.mark.parametrize("d, d_v", WIDTHS)
def test_every_row_compiles_as_it_is_meant(d, d_v):
    """No warning that products wait for each other or registers stay; exponentials beside P V."""
    launch, cubin, log = compile_row(d, d_v)
    config = launch.config
    assert "C75" not in log, log
    found = nvrtc.resources(log)
    assert max(found["spill_stores"], found["stack"]) <= SPILLED[config.Br], found
    assert found["static_smem"] == 0
    beside = exponentials_beside_products(cubin)
    assert beside >= config.Bc // 2, f"{beside} of {config.Bc // 2} exponentials before the wait"


def test_float16_compiles_too():
    *_, log = compile_row(128, 128, "float16")
    assert "C75" not in log


def test_results_in_float32_compile_too():
    for d, d_v in WIDTHS:
        launch, _, log = compile_row(d, d_v, out_dtype="float32")
        assert "_wide1" in launch_name(launch) and "C75" not in log
        assert nvrtc.resources(log)["spill_stores"] <= SPILLED[launch.config.Br]


@pytest.mark.parametrize("d, d_v", WIDTHS)
def test_bias_and_mask_compile_too(d, d_v):
    launch, _, log = compile_row(d, d_v, bias_shape=(1, 1, 1000, 3000), has_mask=True)
    assert "_mask" in launch_name(launch) and launch.config.options and "C75" not in log
    assert launch.config.Br == 128 and nvrtc.resources(log)["spill_stores"] <= SPILLED_WITH_OPTIONS


@pytest.mark.parametrize("out_dtype, less", [("bfloat16", 1), ("float32", 1), ("bfloat16", 2)])
def test_results_by_pairs_or_one_by_one_compile_too(out_dtype, less):
    for d, d_v in WIDTHS:
        launch, _, log = compile_row(d, d_v - less, out_dtype=out_dtype)
        assert f"_narrow{3 - less}" in launch_name(launch) and "C75" not in log
        assert nvrtc.resources(log)["spill_stores"] <= SPILLED[launch.config.Br]


@pytest.mark.parametrize("d_v, out_dtype, row, narrow", [
    (64, "bfloat16", 128, 0), (64, "bfloat16", 144, 0), (60, "bfloat16", 120, 1),
    (60, "bfloat16", 128, 1), (64, "bfloat16", 136, 1), (62, "bfloat16", 124, 1),
    (64, "bfloat16", -128, 1), (61, "bfloat16", 126, 2), (64, "bfloat16", 130, 2),
    (62, "float32", 248, 0), (61, "float32", 256, 2)])
def test_results_are_stored_as_wide_as_rows_allow(d_v, out_dtype, row, narrow):
    out = ("out", (8, 4, 256, d_v), (1024 * row, 256 * row, row, 2), out_dtype, True)
    p = problem(d=64, d_v=d_v, out_dtype=out_dtype, layouts=(out,))
    config = cuda_forward_sm90.FORWARD.offer(p, HOPPER).config
    assert dict(config.constants)["narrow"] == narrow
    assert cuda_forward_sm90.tiled(config) == (narrow == 0 and out_dtype == "bfloat16")


def launch_name(launch):
    return unit(launch.entry, launch.config, launch.smem_bytes)[0]


@pytest.mark.parametrize("d, d_v", WIDTHS)
def test_softcap_and_alibi_compile_too(d, d_v):
    launch, _, log = compile_row(d, d_v, softcap=10.0, has_alibi=True)
    assert launch.config.options and "C75" not in log
    assert nvrtc.resources(log)["spill_stores"] <= SPILLED_WITH_OPTIONS


def test_the_build_that_stops_endless_waits_compiles():
    (launch,) = make_plan("forward", problem(), HOPPER).launches
    _, text = unit(launch.entry, launch.config, launch.smem_bytes)
    cubin, log = nvrtc.compile("#define CF_TRAP_AFTER 1000000\n" + text, "90a")
    assert cubin is not None and all(
        name in cubin for name in (b"waits for ever", b"k_full", b"v_empty", b"work_full")), log


def exponentials_beside_products(cubin):
    """Exponentials between the wait for S and the wait for acc, in the loop over keys."""
    count, open_group, most = 0, False, 0
    for low, high in struct.iter_unpack("<QQ", kernel_text(cubin)):
        if low & 0xFFF == 0x308 and high >> 8 & 0xFF == 8:      # MUFU.EX2
            count += 1
        if low & 0xFFF == 0x9C5 and low >> 32 & 0x8000:         # WARPGROUP.DEPBAR
            if high >> 8 & 7 == 1:                              # all but the last group
                count, open_group = 0, True
            elif open_group:
                most, open_group = max(most, count), False
    return most


def kernel_text(cubin):
    """The instructions of the one kernel in an ELF file."""
    start, = struct.unpack_from("<Q", cubin, 0x28)
    size, number, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(number)]
    strings = headers[names][4]
    (text,) = [cubin[offset:offset + length] for name, _, _, _, offset, length in headers
               if cubin[strings + name:].startswith(b".text.")]
    return text


def test_the_check_sees_exponentials_behind_the_wait():
    wait = struct.pack("<QQ", 0x00008000000079C5, 0x000FE40000010000)
    first = struct.pack("<QQ", 0x00008000000079C5, 0x000FE40000010100)
    exponential = struct.pack("<QQ", 0x0000000D000D7308, 0x000E620000000800)

    def count(code):
        return exponentials_beside_products(elf_of(code))

    assert count(first + 5 * exponential + wait) == 5
    assert count(first + wait + 5 * exponential) == 0
    assert count(first + 2 * exponential + wait + 3 * exponential) == 2


def elf_of(code):
    """As much of an ELF file around instructions as `kernel_text` reads."""
    names = b"\0.text.f\0"
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, 64 + len(code) + len(names))
    struct.pack_into("<HHH", header, 0x3A, 64, 2, 1)
    sections = b"".join(struct.pack("<IIQQQQ", *section).ljust(64, b"\0") for section in (
        (1, 1, 0, 0, 64, len(code)), (0, 3, 0, 0, 64 + len(code), len(names))))
    return bytes(header) + code + names + sections


@pytest.mark.parametrize("d, d_v", [*WIDTHS, (8, 8), (64, 128), (136, 64), (248, 8)])
def test_every_head_dim_has_a_row_that_fits(d, d_v):
    config, smem, _, reason, _ = cuda_forward_sm90.FORWARD.offer(problem(d=d, d_v=d_v), HOPPER)
    assert reason
    assert smem == cuda_forward_sm90.smem_bytes(config) <= HOPPER.smem
    assert config.warps == 4 * (config.Br // 64 + 1)


@pytest.mark.parametrize("changes, words", [
    ({"dtype": "float32", "precision": "tf32", "out_dtype": "float32"}, "16 bits"),
    ({"layouts": (("q", (2, 4, 10, 60), (4800, 1200, 120, 2), "bfloat16", True),)},
     "strides of q"),
    ({"layouts": (("k", (2, 2, 10, 20), (16000, 800, 80, 4), "bfloat16", True),),
      "copied": ("k",)}, "strides of k"),
    ({"Nq": 3}, "rows"), ({"Nk": 0}, "rows"),
    ({"batch": 1, "heads_q": 1, "heads_k": 1}, "idle"),
    ({"layouts": (("v", (2, 2, 3000, 64), (8, 8, 72, 2), "bfloat16", True),)}, "strides of v"),
    ({"layouts": (("q", (2, 4, 10, 64), (0, 8000, 160, 2), "bfloat16", True),)}, "strides of q"),
])
def test_what_it_cannot_do_goes_elsewhere_and_is_said(changes, words):
    plan = make_plan("forward", problem(**changes), HOPPER)
    assert all(launch.entry != "forward_sm90" for launch in plan.launches)
    assert plan.refusals[0].entry == "forward_sm90" and words in plan.refusals[0].reason


@pytest.mark.parametrize("changes", [{"has_mask": True}, {"bias_shape": (1, 1, 1, 3000)}])
def test_bias_and_mask_are_read_beside_the_products(changes):
    (launch,) = make_plan("forward", problem(**changes), HOPPER).launches
    constants = dict(launch.config.constants)
    assert launch.entry == "forward_sm90" and constants["scaled"] == 1
    (plain,) = make_plan("forward", problem(Nq=3000), HOPPER).launches
    assert dict(plain.config.constants)["scaled"] == 0 and plain.config.Br == 192
    (launch,) = make_plan("forward", problem(**changes, Nq=3000), HOPPER).launches
    assert launch.config.Br == 128


def test_other_gpus_do_not_get_it():
    plan = make_plan("forward", problem(), H200)
    assert plan.launches[0].entry == "forward_sm80"
    assert "not forward_sm90: it needs sm_90a" in str(plan)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_arrays_begin_on_borders(name):
    plan = make_plan("forward", problem(unaligned=("mask", name)), HOPPER)
    assert plan.launches[0].entry == "forward_sm80"
    assert f"{name} does not begin on a border of 16 bytes" in plan.refusals[0].reason
    for changes in ({"unaligned": ("mask",)}, {"unaligned": (name,), "copied": (name,)}):
        (launch,) = make_plan("forward", problem(**changes), HOPPER).launches
        assert launch.entry == "forward_sm90"


@pytest.mark.parametrize("N, mask, Br", [(1024, Mask(), 192), (1024, Mask(right=0), 128),
                                         (256, Mask(), 128), (16384, Mask(right=0), 192),
                                         (2048, Mask(right=0), 128), (8192, Mask(right=0), 192),
                                         (16384, Mask(right=0, q_offset=-16000), 128)])
def test_short_rows_get_tiles_that_they_fill(N, mask, Br):
    p = problem(Nq=N, Nk=N, mask=mask)
    assert cuda_forward_sm90.FORWARD.offer(p, HOPPER).config.Br == Br


@pytest.mark.parametrize("group, Nq, pack", [(1, 50, 1), (4, 50, 4), (4, 128, 1), (4, 90, 4),
                                             (3, 50, 1), (64, 5, 64), (8, 1000, 1)])
def test_heads_share_a_tile_if_that_makes_fewer(group, Nq, pack):
    p = problem(heads_q=group, heads_k=1, Nq=Nq)
    assert cuda_forward_sm90.pack_of(p, 128) == pack


def test_sections_keep_keys_in_the_cache():
    causal = Mask(right=0)
    assert cuda_forward_sm90.section_of(problem(), 1) == 0
    assert cuda_forward_sm90.section_of(problem(mask=Mask(right=UNLIMITED)), 1) == 0
    assert cuda_forward_sm90.section_of(problem(mask=causal), 1) == 32
    long = problem(mask=causal, Nk=2**16, heads_q=32, heads_k=16)
    assert cuda_forward_sm90.section_of(long, 1) == 4 and cuda_forward_sm90.section_of(long, 2) == 2

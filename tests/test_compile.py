"""The CUDA kernels under NVRTC, for every architecture, without a GPU."""

import json
import re

import nvrtc
import pytest
import units

from cupy_flash.plan import cuda_simt
from cupy_flash.plan.cuda_wmma import KERNELS

MORE_REGISTERS = 8
MOST_SPILLED = 448          # bytes; paid outside the innermost loops, most by 3xTF32 with features
MORE_BY_ANOTHER = 256       # a compiler of another version than the table's may spill so much more


@pytest.fixture(scope="module")
def table():
    """The committed table of resources; what another compiler than its own may need."""
    read = json.loads(units.TABLE.read_text())
    if read["nvrtc"] == nvrtc.version():
        return read["units"]
    return {key: {"registers": 255, "static_smem": 0,
                  **{name: found[name] + MORE_BY_ANOTHER
                     for name in ("stack", "spill_stores", "spill_loads")}}
            for key, found in read["units"].items()}


@pytest.fixture(scope="module")
def measured():
    """What ptxas says of the sample of units: {key: resources, or a log with the complaint}."""
    return dict(units.measure_all(units.sample()))


def complaints(measured, table):
    """What is wrong with the units, a line each."""
    for key, found in measured.items():
        if isinstance(found, str):
            yield f"{key} does not compile cleanly: {found}"
        elif key not in table:
            yield f"{key} is not in the table: run python tests/units.py"
        else:
            known = table[key]
            if found["static_smem"] > 0:
                yield f"{key} has static shared memory, which the planner does not count: {found}"
            if found["registers"] > known["registers"] + MORE_REGISTERS:
                yield f"{key} needs more registers than the table says: {found}, {known}"
            if found["spill_stores"] > known["spill_stores"] or found["stack"] > known["stack"]:
                yield f"{key} spills more than the table says: {found}, {known}"


def test_the_sample_compiles_and_needs_what_the_table_says(measured, table):
    assert "\n".join(complaints(measured, table)) == ""


def test_complaints_are_made(table):
    key, known = next(iter(table.items()))
    worse = [{**known, "registers": known["registers"] + MORE_REGISTERS + 1},
             {**known, "spill_stores": known["spill_stores"] + 4},
             {**known, "stack": known["stack"] + 8}, {**known, "static_smem": 16}, "error: no"]
    for found in worse:
        assert len(list(complaints({key: found}, table))) == 1, found
    assert len(list(complaints({"sm_1 unknown": known}, table))) == 1
    assert list(complaints({key: known}, table)) == []


def test_the_sample_has_every_row_and_every_architecture():
    sample = units.sample()
    assert {one.arch for one in sample} == set(units.SMEM)
    tiles = {f"_{tile.Br}x{tile.Bc}" for kernel in KERNELS for rows in kernel.rows.values()
             for tile in rows}
    names = [one.name for one in sample]
    assert all(any(tile in name for name in names) for tile in tiles)
    assert any("_mask_bias_alibi_softcap" in name for name in names)


@pytest.mark.parametrize("kernel", (cuda_simt.FORWARD, cuda_simt.DQ, cuda_simt.DKDV),
                         ids=lambda kernel: kernel.entry)
def test_the_sample_has_every_row_for_narrow_heads(kernel):
    names = [one.name for one in units.sample() if one.entry == kernel.entry]
    for dtype, rows in kernel.rows.items():
        for row in rows:
            sizes = 32 * row.warps * row.own, row.walked
            tile = "x".join(map(str, sizes if kernel.owns == "rows" else sizes[::-1]))
            together = f"_together{row.together}" if kernel.owns == "keys" else ""
            wanted = re.compile(rf"{kernel.entry}_{dtype}_\w*_{tile}_chunk{row.chunk}"
                                rf"_blocks{row.blocks}(_scaled\d)?{together}")
            assert any(wanted.match(name) for name in names), wanted.pattern


def test_kernels_for_narrow_heads_spill_nothing():
    """Whole rows in registers are all that they have."""
    table = json.loads(units.TABLE.read_text())["units"]
    found = {key: found for key, found in table.items() if "_simt_" in key}
    assert len(found) > 100
    assert {key for key, one in found.items() if one["spill_stores"] or one["spill_loads"]} == set()


def test_the_table_is_up_to_date(table):
    assert {one.key for one in units.sample()} <= set(table)
    assert set(table) <= {one.key for arch in units.SMEM for one in units.all_units(arch).values()}


def test_no_kernel_spills_much():
    table = json.loads(units.TABLE.read_text())["units"]
    worst = max(table.items(), key=lambda item: item[1]["spill_stores"])
    assert worst[1]["spill_stores"] <= MOST_SPILLED, worst
    assert all(found["static_smem"] == 0 for found in table.values())


def test_a_wrong_size_does_not_compile():
    """The planner's shared memory and the kernel's are compared by the compiler."""
    one = next(iter(units.all_units(90).values()))
    size = int(one.text.split("smem_bytes == ")[1].split(",")[0])
    cubin, log = nvrtc.compile(one.text.replace(f"== {size},", f"== {size + 16},"), 90)
    assert cubin is None and "disagree on the shared memory" in log


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "tf32", "tf32x3", "float64"])
def test_products_of_the_general_kernels(kind):
    """The tier is what its name says, but for TF32: see cuda_src/ptx/mma.cuh."""
    one = next(u for u in units.all_units(90).values()
               if u.entry == "dkdv_wmma" and f"_{kind}_" in u.name)
    ptx = nvrtc.ptx(one.text, 90)
    if kind.startswith("tf32"):
        assert "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32" in ptx and "wmma.mma" not in ptx
    else:
        types = {"float16": ".f32.f32", "bfloat16": ".bf16.bf16", "float64": ".f64.f64"}[kind]
        assert "wmma.mma.sync" in ptx and types in ptx

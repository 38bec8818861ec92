"""The pure parts of the benchmarks: cells, answers, ratios, what is skipped, the pages."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cupy_flash import device, reference
from cupy_flash.backends.cuda import source

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import RESULTS, cpu, data, pages, records  # noqa: E402
from bench.cells import FAMILIES, Cell, select  # noqa: E402
from bench.data import bound, sets  # noqa: E402
from bench.pair import Found  # noqa: E402
from bench.plans import sources_of, stale  # noqa: E402
from bench.records import finished, geometric_mean, line, newest, ratios, reason  # noqa: E402
from bench.truth import answers, errors, known, of_head  # noqa: E402

HOPPER = device.GpuDevice(0, "a pretended H200", 90, 132, 227 * 1024, targets=("90a",))


def cell(direction="forward", **changes):
    """A small cell."""
    fields = {"family": "16-bit", "dtype": "float64", "B": 2, "Hq": 4, "Hk": 2, "Nq": 70, "Nk": 70,
              "d": 8, "d_v": 8}
    return Cell(direction=direction, **(fields | changes))


def test_every_cell_has_a_name_of_its_own():
    names = [one.name for one in select()]
    assert len(names) == len(set(names)) == sum(len(select([name])) for name in FAMILIES)


def test_cells_of_committed_records_are_still_there():
    lines = records.Results(RESULTS / "gpu_speed.jsonl").lines()
    assert {one["cell"] for one in lines} <= {one.name for one in select()}


def test_cells_are_selected_by_family_name_and_length():
    chosen = select(["16-bit"], lengths=(1024, 4096, 16384))
    assert len(chosen) == 2 * 2 * 2 * 3 * 3     # passes, types, masks, head dims, lengths
    assert all(one.B * one.Nq == 16384 and one.Hq * one.d == 2048 for one in chosen)
    assert {(one.direction, one.d) for one in select(only=["back*d64-", "n1x4096"])} == {
        ("backward", 64), ("forward", 128)}
    assert select(["science"], ["no such cell"]) == []


def test_work_counts_what_the_mask_leaves():
    full = cell().work
    assert full == 4 * 2 * 4 * 70 * 70 * 8
    assert cell(causal=True).work == full / 2
    assert cell("backward").work == 2.5 * full
    pairs = sum(min(i + 1, 16) for i in range(70))
    assert cell(causal=True, window=16).work == pytest.approx(full * pairs / 70**2)
    assert cell(family="decode", Nq=1).work == 8 * 2 * (4 + 2 * 70) * 16


OPTIONS = [one for one in select(["cpu-options"]) if one.direction == "backward"
           and one.dtype == "float64"]


def case_of(one):
    """Inputs of a small cell, and what the reference says, by name."""
    given, = data.make(one, np)
    q, k, v, dout, options = given
    options = {**data.words(one), **options}
    want = {**dict(zip(("out", "lse"), reference.attention(q, k, v, **options), strict=True)),
            **dict(zip(("dq", "dk", "dv"), reference.attention_backward(dout, q, k, v, **options),
                       strict=False))}
    return given, want


@pytest.mark.parametrize("one", [
    *(cell("backward", **{"B": 1, "Hq": 2, "Hk": 1} | changes) for changes in (
        {}, {"causal": True}, {"causal": True, "Nk": 90}, {"causal": True, "window": 9}, {"Hk": 2},
        {"arrays": (("bias", "bhqk"), ("alibi_slopes", "h"), ("sink", "h")), "softcap": 5},
        {"d_v": 5}, {"Nq": 1500, "Nk": 1100}, {"Nq": 1, "Nk": 64}, {"spread": 16},
        {"Nq": 1030, "Nk": 1100, "causal": True, "window": 33})),
    *(replace(one, Nq=70, Nk=70, d=8, d_v=8, Hq=4, Hk=one.Hk // 2) for one in OPTIONS)],
    ids=lambda one: one.name)
def test_answers_are_those_of_the_reference(one):
    given, want = case_of(one)
    group = one.Hq // one.Hk
    for b, head in ((0, 0), (one.B - 1, one.Hk - 1)):
        arrays, options = of_head(one, given, b, head)
        for name, x in answers(one, *arrays, np, options).items():
            rows = slice(head * group, (head + 1) * group)
            np.testing.assert_allclose(
                x, want[name][b, rows if name in ("out", "lse", "dq") else head],
                rtol=0, atol=1e-12, err_msg=f"{name} {b} {head}")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_wrong_results_are_found(direction):
    one = cell(direction, causal=True)
    given, want = case_of(one)
    results = {name: want[name] for name in data.RESULTS[direction]}
    found = known(one, given, np)

    def worst():
        return max(errors(one, results, found, np).values(), key=lambda x: (np.isnan(x), x))

    assert worst() < bound(one)
    for x in results.values():
        for spoiled in (0, np.nan):
            kept, x[-1, -1, -1] = x[-1, -1, -1].copy(), spoiled
            assert not worst() <= bound(one)
            x[-1, -1, -1] = kept
    next(iter(results.values()))[0, -1, -1, -1] = np.nan    # in a head whose answers are not known
    assert not worst() <= bound(one)


def test_ours_is_called_with_what_a_cell_says():
    """The results of every option, forward and backward, on the CPU path."""
    import cupy_flash as cf

    for forward in select(["cpu-options"], ["forward*float64*"]):
        one = replace(forward, Nq=70, Nk=70, d=8, d_v=8)
        given, want = case_of(one)
        for cell in (one, replace(one, direction="backward")):
            got = dict(zip(data.names(cell), data.ours(cf, cell, [given])(3), strict=True))
            for name in got.keys() & want.keys():
                np.testing.assert_allclose(got[name], want[name], rtol=0, atol=1e-11,
                                           err_msg=f"{cell.name} {name}")
    assert data.names(cell) == ("dq", "dk", "dv", "dsink")


def test_inputs_are_those_of_the_cell():
    one = cell(dtype="bfloat16", spread=16, arrays=(("bias", "1hq1"), ("kv_lens", "b"),
                                                    ("mask", "b11k"), ("alibi_slopes", "h")))
    first, second = data.make(one, np, 2)
    assert first.q.dtype.name == first.options["bias"].dtype.name == "bfloat16"
    assert not np.array_equal(first.q, second.q)
    assert first.options["bias"].shape == (1, 4, 70, 1)
    assert first.options["mask"].shape == (2, 1, 1, 70)
    assert list(first.options["kv_lens"]) == [17, 54] == one.kv_lens
    norms = np.linalg.norm(first.dout.astype(np.float64), axis=-1)
    assert 2**10 < norms.max() / norms.min() < 2**20


def test_sets_of_inputs_outgrow_the_cache():
    one = cell()
    nbytes = 8 * 2 * (4 * 70 * 8 + 2 * 70 * 16)
    assert sets(one, nbytes) == 2
    assert sets(one, nbytes + 1) == 3
    assert sets(one, 100 * nbytes) == 32
    assert sets(one, 10) == 1


TIMES = {"ours": [2.0, 4.0, 2.0, 2.0, 2.0], "a": [3.0, 6.0, 3.0, 3.0, 2.9], "b": [2.2] * 5}


def test_ratios_compare_times_of_the_same_round():
    assert ratios(TIMES) == {"a": [1.5, 1.5, 1.5, 1.5, 1.45], "b": [1.1, 0.55, 1.1, 1.1, 1.1]}
    one = line(cell(), TIMES, {"c": "is not installed"})
    assert (one["best"], one["ratio"], one["rounds"]) == ("b", 1.1, 5)
    assert one["ratios"] == {"a": 1.5, "b": 1.1}
    assert one["ratio_range"] == [0.55, 1.1]
    assert one["ours"] == {"ms": 2.0, "rate": round(cell().work / 2e9, 2), "spread": 1.0}
    assert one["peers"]["b"]["spread"] == 0
    alone = line(cell(), {"ours": [1.0] * 5}, {})
    assert (alone["best"], alone["ratio"], alone["ratios"]) == (None, None, {})
    failed = line(cell(), {}, {"ours": "NotImplementedError: no"})
    assert (failed["ours"], failed["peers"], failed["ratio"]) == (None, {}, None)


KERNELS = ["combine_bfloat16_d16", "forward_sm80_bfloat16_d64_128x64"]


def entry(one, times=TIMES, sources=None, gpu="GPU A", **fields):
    """A line as the results file has it."""
    return json.loads(json.dumps(line(one, times, {}) | {
        "gpu": gpu, "kernels": KERNELS, "sources": sources or sources_of(KERNELS),
        "cuda": 13020, "cupy": "14", "torch": "2", "cudnn": 91900,
        "driver_version": "580", "date": "2030-01-01", "commit": "abc"} | fields))


def test_finished_cells_are_those_of_this_gpu_and_these_kernels():
    one, two = cell(), cell("backward")
    lines = [entry(one), entry(two, sources="old"), entry(two, gpu="GPU B")]
    assert finished(lines, "GPU A") == {one.name}
    assert finished(lines, "GPU B") == {two.name}
    assert finished([], "GPU A") == set()


def test_a_cell_without_a_peer_that_is_installed_now_is_not_finished(monkeypatch):
    """A backward table once lacked the fastest peer, which had not been installed for that run."""
    forward, backward = cell(), cell("backward")
    lines = [entry(forward, missing={"fa4": "cannot do this"}),
             entry(backward, missing={"fa4": "flash_attn.cute is not installed"})]
    monkeypatch.setattr(records, "find_spec", lambda module: None)
    assert set(records.absent()) == set(records.MODULES)
    assert finished(lines, "GPU A") == {forward.name, backward.name}
    monkeypatch.setattr(records, "find_spec", lambda module: module)
    assert records.absent() == {}
    assert finished(lines, "GPU A") == {forward.name}


def test_a_run_that_needs_a_peer_does_not_start_without_it(monkeypatch):
    from bench import speed

    monkeypatch.setattr(records, "find_spec", lambda module: None)
    with pytest.raises(SystemExit, match=r"--need fa4: .* is not installed"):
        speed.main(SimpleNamespace(need=["fa4"]))


def test_only_its_own_sources_make_a_line_stale(monkeypatch, tmp_path):
    """A kernel's digest is that of the headers it includes."""
    shutil.copytree(source.folder(), tmp_path / "cuda_src")
    functions = source.folder, source.names, source.included, source.digest
    monkeypatch.setattr(source, "folder", lambda: tmp_path / "cuda_src")
    portable, hopper = entry(cell()), entry(cell(), kernels=["forward_sm90_bfloat16_d64"])
    hopper["sources"] = sources_of(hopper["kernels"])
    lines = (portable, hopper)
    assert [*map(stale, lines)] == [False, False]
    try:
        for edited, found in (("sm90/store.cuh", [False, True]),
                              ("sm80/online.cuh", [True, True]), ("base.cuh", [True, True])):
            with (tmp_path / "cuda_src" / edited).open("a") as file:
                file.write("static_assert(true);  // edited\n")
            for function in functions[1:]:
                function.cache_clear()
            assert [*map(stale, lines)] == found
    finally:
        monkeypatch.undo()
        for function in functions:
            function.cache_clear()


def test_the_newest_line_of_a_cell_counts():
    lines = [entry(cell(), commit="1"), entry(cell("backward")), entry(cell(), commit="2"),
             entry(cell(), gpu="GPU B")]
    assert [(x["gpu"], x["direction"], x["commit"]) for x in newest(lines)] == [
        ("GPU A", "forward", "2"), ("GPU A", "backward", "abc"), ("GPU B", "forward", "abc")]


def test_the_page_calls_what_is_stale_stale():
    lines = [entry(one) for one in select(["16-bit"], ["n1024-d64"])]
    assert "stale" not in pages.speed(lines).lower()
    lines[3]["sources"] = "0" * 16
    assert f"**Stale**: 1 of {len(lines)} cells" in pages.speed(lines)


def test_the_page_has_means_minima_and_every_cell():
    one, two = select(["16-bit"], ["forward-full-*d64-*bfloat16"], [1024, 4096])
    slower = {**TIMES, "a": [1.0] * 5}
    text = pages.speed([entry(two, slower), entry(one)])
    best = geometric_mean([1.1, 0.5])
    assert f"| 16-bit | forward | bfloat16 | the best of a, b | 2 | {best:.2f} | 0.50 |" in text
    rows = [row for row in text.splitlines() if row.startswith("| 64 | ")]
    assert len(rows) == 2
    assert f"| {one.length} |" in rows[0]       # in the order of the cells, not of the lines
    assert f"| {two.length} |" in rows[1]
    assert rows[1].endswith("| 0.50 (0.25 to 0.50) |")
    assert any("lowest 0.500" in text for text in pages.summaries([entry(two, slower), entry(one)]))
    failed = entry(one, {})
    assert "| - |" in pages.speed([failed])
    assert pages.speed([]).startswith("# Speed on a GPU")


def test_a_page_of_options_names_them():
    forward, backward = select(["options"], ["*tf32x3-mask_11qk*"])
    text = pages.speed([entry(forward), entry(backward)])
    assert "| 64 | full mask_11qk | 4096 | 1 | 8 |" in text


def test_the_table_of_a_cpu_has_rates_and_means_of_long_cells():
    lines = []
    for one, ms in ((cell(Nq=512, Nk=512), 8.0), (cell(Nq=2048, Nk=2048), 4.0),
                    (cell(Nq=2048, Nk=2048, arrays=(("mask", "11qk"),)), 9.0)):
        found = Found()
        found.times = {"torch": [ms, ms, 2 * ms], "ours": [2.0] * 3}
        lines.append(cpu.record(one, found, "2.0"))
    text = pages.cpu(lines)
    rates = f"{cell(Nq=512, Nk=512).flops / 2e6:.0f} | {cell(Nq=512, Nk=512).flops / 8e6:.0f}"
    assert f"| float64 | 8 | 512 x 512 | full | forward | {rates} | 4.00 (4.00 to 6.00) |" in text
    assert "| full mask_11qk | forward |" in text
    assert "- float64 forward, N = 2048 and 8192: geometric mean 3.00, lowest 2.00" in text


def test_the_pages_are_those_of_the_committed_records():
    for path, name, page in pages.PAGES.values():
        lines = records.Results(RESULTS / name).lines()
        assert (ROOT / path).read_text() == page(lines), "write it again: python -m bench tables"


def test_reasons_are_short_and_belong_to_no_machine():
    folder = "/".join(["", "home", "someone", "lib"])
    assert reason(ValueError(f"no {folder}/x.py\nhere")) == "ValueError: no x.py here"
    notes = [UserWarning("Flash attention kernel not used because: (Triggered internally at x)"),
             UserWarning("d must be even (Triggered internally at x\n y)")]
    assert reason(RuntimeError("no kernel"), notes) == "d must be even"
    assert len(reason(ValueError("x" * 1000))) == 240


def test_portable_cells_are_planned_without_what_one_gpu_has(monkeypatch):
    from bench.plans import _portable, device_of

    monkeypatch.setattr(device, "gpu", lambda number: HOPPER)
    _portable.cache_clear()
    ours, portable = (select([family])[0] for family in ("16-bit", "portable"))
    assert portable.name == f"{ours.name}-portable" and portable.problem == ours.problem
    for cell, targets in ((ours, ("90a",)), (portable, ()), (ours, ("90a",))):
        with device_of(cell.portable):
            assert device.gpu(0).targets == targets
            assert device.gpu(0) is device.gpu(0)
    _portable.cache_clear()


def test_the_kernels_of_every_family_and_of_drawn_problems_are_known(monkeypatch):
    """Without a GPU: they are compiled before they are needed, and a line names their sources."""
    pytest.importorskip("cupy")
    from bench import fuzz
    from bench.speed import kernels_of

    monkeypatch.setattr(device, "gpu", lambda number: HOPPER)
    for family in FAMILIES:
        assert kernels_of(select([family])[0]), family
    drawn = [fuzz.draw(0, index, plain)[0] for index in range(4) for plain in (False, True)]
    assert all(len(fuzz.tile_of(case, HOPPER)) == 2 for case in drawn)
    for plain in (False, True):
        assert fuzz.needed(SimpleNamespace(count=4, seed=0, plain=plain))


@pytest.mark.parametrize("wide", [False, True])
def test_drawn_problems_of_every_kind_run_and_are_right(monkeypatch, wide):
    """On the CPU path, by the way that those of a GPU go."""
    from answers import judge
    from cases import KINDS
    from numerics import DRAWS

    from bench import fuzz

    monkeypatch.setattr(device, "gpu", lambda number: HOPPER)
    drawn = [case for case, is_wide in map(fuzz.draw, [0] * 120, range(120))
             if is_wide == wide and case.Nq * case.Nk < 20000]
    for kind in KINDS:
        case = next(case for case in drawn if fuzz.kind_of(case) == kind)
        answers, floor, found = fuzz.expected(case, wide)
        judge(case.id, found, *answers, floor, DRAWS)
        assert (found["out"].dtype == case.dtype) != (wide and kind in ("float16", "bfloat16"))

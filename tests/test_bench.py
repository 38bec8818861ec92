"""The pure parts of the speed benchmark: cells, answers, ratios, what is skipped, the page."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cupy_flash import device, reference
from cupy_flash.backends.cuda import source

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))

import speed_lines  # noqa: E402
from speed_cells import FAMILIES, Cell, select  # noqa: E402
from speed_data import answers, bound, errors, sets  # noqa: E402
from speed_lines import (  # noqa: E402
    finished,
    geometric_mean,
    line,
    newest,
    ratios,
    reason,
    sources_of,
    stale,
)
from speed_table import summaries, table  # noqa: E402

HOPPER = device.GpuDevice(0, "a pretended H200", 90, 132, 227 * 1024, targets=("90a",))


def cell(direction="forward", **changes):
    """A small cell."""
    fields = {"family": "16-bit", "dtype": "float64", "B": 2, "Hq": 4, "Hk": 2, "Nq": 70, "Nk": 70,
              "d": 8, "d_v": 8}
    return Cell(direction=direction, **(fields | changes))


def test_every_cell_has_a_name_of_its_own():
    names = [one.name for one in select()]
    assert len(names) == len(set(names)) == sum(len(select([name])) for name in FAMILIES)


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


@pytest.mark.parametrize("changes", [
    {}, {"causal": True}, {"causal": True, "Nk": 90}, {"causal": True, "window": 9}, {"Hk": 2},
    {"d_v": 5}, {"Nq": 1500, "Nk": 1100}, {"Nq": 1, "Nk": 64},
    {"Nq": 1030, "Nk": 1100, "causal": True, "window": 33},
], ids=str)
def test_answers_are_those_of_the_reference(changes):
    one = cell(**{"B": 1, "Hq": 2, "Hk": 1} | changes)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape) for shape in one.shapes)
    dout = rng.standard_normal((*q.shape[:3], one.d_v))
    window = (one.window - 1, 0) if one.window else None
    options = {"causal": one.causal, "window": window}
    want = {"out": reference.attention(q, k, v, **options)[0],
            **dict(zip(("dq", "dk", "dv"), reference.attention_backward(dout, q, k, v, **options),
                       strict=False))}
    group = one.Hq // one.Hk
    got = answers(one, q[0, :group], k[0, 0], v[0, 0], dout[0, :group], np)
    for name, x in got.items():
        whole = want[name][0]
        np.testing.assert_allclose(x, whole[:group] if name in ("out", "dq") else whole[0],
                                   rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_wrong_results_are_found(direction):
    one = cell(direction, causal=True)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape) for shape in one.shapes)
    dout = rng.standard_normal(q.shape)
    out, _ = reference.attention(q, k, v, causal=True)
    dq, dk, dv, _ = reference.attention_backward(dout, q, k, v, causal=True)
    results = {"forward": [out], "backward": [dq, dk, dv]}[direction]
    known = {(b, h): answers(one, q[b, 2 * h:2 * h + 2], k[b, h], v[b, h], dout[b, 2 * h:2 * h + 2],
                             np) for b, h in ((0, 0), (1, 1))}

    def worst():
        return max(errors(one, results, known, np).values(), key=lambda x: (np.isnan(x), x))

    assert worst() < bound(one)
    for x in results:
        for spoiled in (0, np.nan):
            kept, x[-1, -1, -1] = x[-1, -1, -1].copy(), spoiled
            assert not worst() <= bound(one)
            x[-1, -1, -1] = kept
    results[0][0, -1, -1, -1] = np.nan          # in a head whose answers are not known
    assert not worst() <= bound(one)


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
    assert one["ours"] == {"ms": 2.0, "rate": round(cell().work / 2e9, 2), "spread": 1.0,
                           "times": TIMES["ours"]}
    assert one["peers"]["b"]["spread"] == 0
    alone = line(cell(), {"ours": [1.0] * 5}, {})
    assert (alone["best"], alone["ratio"], alone["ratios"]) == (None, None, {})
    failed = line(cell(), {}, {"ours": "NotImplementedError: no"})
    assert (failed["ours"], failed["peers"], failed["ratio"]) == (None, {}, None)


KERNELS = ["delta_bfloat16_d64", "forward_sm80_bfloat16_d64_128x64"]


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
    monkeypatch.setattr(speed_lines, "find_spec", lambda module: None)
    assert set(speed_lines.absent()) == set(speed_lines.MODULES)
    assert finished(lines, "GPU A") == {forward.name, backward.name}
    monkeypatch.setattr(speed_lines, "find_spec", lambda module: module)
    assert speed_lines.absent() == {}
    assert finished(lines, "GPU A") == {forward.name}


def test_a_run_that_needs_a_peer_does_not_start_without_it(monkeypatch):
    import run

    monkeypatch.setattr(speed_lines, "find_spec", lambda module: None)
    with pytest.raises(SystemExit, match=r"--need fa4: .* is not installed"):
        run.run(SimpleNamespace(need=["fa4"]), None)


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
    assert "stale" not in table(lines).lower()
    lines[3]["sources"] = "0" * 16
    assert f"**Stale**: 1 of {len(lines)} cells" in table(lines)


def test_the_page_has_means_minima_and_every_cell():
    one, two = select(["16-bit"], ["forward-full-*d64-*bfloat16"], [1024, 4096])
    slower = {**TIMES, "a": [1.0] * 5}
    text = table([entry(two, slower), entry(one)])
    best = geometric_mean([1.1, 0.5])
    assert f"| 16-bit | forward | bfloat16 | the best of a, b | 2 | {best:.2f} | 0.50 |" in text
    rows = [row for row in text.splitlines() if row.startswith("| 64 | ")]
    assert len(rows) == 2
    assert f"| {one.length} |" in rows[0]       # in the order of the cells, not of the lines
    assert f"| {two.length} |" in rows[1]
    assert rows[1].endswith("| 0.50 (0.25 to 0.50) |")
    assert any("lowest 0.500" in text for text in summaries([entry(two, slower), entry(one)]))
    failed = entry(one, {})
    assert "| - |" in table([failed])
    assert table([]).startswith("# Speed on a GPU")


def test_the_page_in_the_docs_is_that_of_the_committed_lines():
    page, lines = ROOT / "docs/performance.md", ROOT / "bench/results/gpu_speed.jsonl"
    if page.exists() or lines.exists():
        found = [json.loads(text) for text in lines.read_text().splitlines()]
        assert page.read_text() == table(found), (
            "write it again: python bench/run.py --table > docs/performance.md")


def test_reasons_are_short_and_belong_to_no_machine():
    folder = "/".join(["", "home", "someone", "lib"])
    assert reason(ValueError(f"no {folder}/x.py\nhere")) == "ValueError: no x.py here"
    notes = [UserWarning("Flash attention kernel not used because: (Triggered internally at x)"),
             UserWarning("d must be even (Triggered internally at x\n y)")]
    assert reason(RuntimeError("no kernel"), notes) == "d must be even"
    assert len(reason(ValueError("x" * 1000))) == 240


def test_portable_cells_are_planned_without_what_one_gpu_has(monkeypatch):
    from speed_device import _portable, device_of

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
    import gpu_random
    from run import kernels_of

    monkeypatch.setattr(device, "gpu", lambda number: HOPPER)
    for family in FAMILIES:
        assert kernels_of(select([family])[0]), family
    drawn = [gpu_random.draw(0, index, plain)[0] for index in range(4) for plain in (False, True)]
    assert all(len(gpu_random.tile_of(case, HOPPER)) == 2 for case in drawn)
    for plain in (False, True):
        assert gpu_random.needed(SimpleNamespace(count=4, seed=0, plain=plain))


@pytest.mark.parametrize("wide", [False, True])
def test_drawn_problems_of_every_kind_run_and_are_right(monkeypatch, wide):
    """On the CPU path, by the way that those of a GPU go."""
    import gpu_random
    from answers import judge
    from cases import KINDS
    from numerics import DRAWS

    monkeypatch.setattr(device, "gpu", lambda number: HOPPER)
    drawn = [case for case, is_wide in map(gpu_random.draw, [0] * 60, range(60))
             if is_wide == wide and case.Nq * case.Nk < 20000]
    for kind in KINDS:
        case = next(case for case in drawn if gpu_random.kind_of(case) == kind)
        answers, floor, found = gpu_random.expected(case, wide)
        judge(case.id, found, *answers, floor, DRAWS)
        assert (found["out"].dtype == case.dtype) != (wide and kind in ("float16", "bfloat16"))

"""The programs of the bench that need a GPU, as far as they go without one."""

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import nvrtc
import pytest

from cupy_flash import device

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import accuracy, clock, data, first_call, fuzz, pages, plans, records, speed  # noqa: E402
from bench.__main__ import main  # noqa: E402
from bench.cells import select  # noqa: E402
from bench.plain_kernel import KERNEL  # noqa: E402
from bench.truth import answers, of_head  # noqa: E402

HERE = {"date": "2030-01-01", "gpu": "GPU A", "driver_version": "580", "cuda": 13020,
        "cupy": "14", "commit": "abc", "cuda_src": "0123"}
H200 = device.GpuDevice(0, "a pretended H200", 90, 132, 227 * 1024, targets=("90a",))


@pytest.fixture
def here(monkeypatch):
    """A machine with a GPU, as far as records say."""
    for module in (records, fuzz, speed):
        monkeypatch.setattr(module, "provenance", lambda place: HERE)
    monkeypatch.setattr(device, "gpu", lambda number: H200)
    monkeypatch.setattr(plans, "_portable", lambda number: replace(H200, targets=()))
    monkeypatch.setattr(plans, "compiling", lambda *_: contextlib.nullcontext())


def lines_of(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


class Clock:
    """Every call takes a millisecond, each peer's two."""

    def __init__(self, milliseconds):
        self.order = []

    def pace(self, side):
        if side.errors is None:
            raise MemoryError("all gone")
        return clock.Pace(3)

    def round(self, side, pace):
        self.order.append(side.call(0))
        return side.call(0)


@pytest.fixture
def measured(here, monkeypatch, tmp_path):
    """A function that runs `speed` with these sides and words: (status, lines)."""
    side = {name: clock.Side(lambda i, ms=ms: ms, errors={"out": 1e-3})
            for name, ms in (("ours", 1.0), ("a", 2.0), ("b", 1.5))}
    made = []
    torch = SimpleNamespace(cuda=SimpleNamespace(empty_cache=lambda: None,
                                                 synchronize=lambda: None))

    def sides(cell, given):
        if cell.direction == "backward" and cell.d == 256:
            return {}, {"ours": "NotImplementedError: no"}
        return dict(side), {"fa3": "flash_attn3_jax is not installed"}

    peers = SimpleNamespace(make=lambda cell: made.append(cell) or cell, sides=sides,
                            versions=lambda: {"torch": "2", "cudnn": 9})
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "bench.peers", peers)
    monkeypatch.setattr("bench.peers", peers, raising=False)
    monkeypatch.setattr(clock, "GpuClock", Clock)
    monkeypatch.setattr(clock, "Monitor", lambda: contextlib.nullcontext(
        SimpleNamespace(since=lambda start: None)))
    monkeypatch.setattr("cupy.get_default_memory_pool",
                        lambda: SimpleNamespace(free_all_blocks=lambda: None))
    out = tmp_path / "speed.jsonl"

    def run(*words):
        made.clear()
        return main(["speed", *words, "--out", str(out)]), lines_of(out), list(made)

    return run


def test_speed_writes_a_line_a_cell_and_goes_on_where_it_stopped(measured, capsys):
    words = ("--cells", "16-bit", "--only", "causal-n1024-d64*bfloat16")
    status, lines, made = measured(*words)
    assert status == 0 and len(lines) == 2 and len(made) == 1       # both passes share inputs
    assert (lines[0]["ratio"], lines[0]["best"], lines[0]["rounds"]) == (1.5, "b", 5)
    assert lines[0]["kernels"] and not plans.stale(lines[0])
    assert lines[0]["ours"]["calls"] == 3 and lines[0]["torch"] == "2"
    assert "| 16-bit | forward | bfloat16 | the best of a, b | 1 | 1.50 | 1.50 |" in (
        pages.speed(lines))
    assert measured(*words)[1] == lines and "nothing is left" in capsys.readouterr().out
    assert len(measured(*words, "--again")[1]) == 4


def test_speed_says_when_ours_fails_and_stops_with_the_time(measured, capsys):
    status, lines, _ = measured("--cells", "16-bit", "--only", "causal-n1024-d256*bfloat16")
    assert status == 1 and [bool(one["ours"]) for one in lines] == [True, False]
    measured("--cells", "16-bit", "--only", "full-n1024*bfloat16", "--minutes", "0")
    assert "time is up: 6 cells are left" in capsys.readouterr().out


def test_every_second_round_goes_backwards():
    timer = Clock(1)
    sides = {name: clock.Side(lambda i, name=name: name, errors=errors)
             for name, errors in (("a", {}), ("b", {}), ("c", None))}
    times, paces, failed = speed.in_turn(timer, sides, 3)
    assert timer.order == ["a", "b", "b", "a", "a", "b"]
    assert times == {"a": ["a"] * 3, "b": ["b"] * 3} and paces.keys() == {"a", "b"}
    assert failed == {"c": "MemoryError: all gone"}


def test_other_cells_have_kernels_too(here):
    for family in ("options", "shapes", "small-d", "rows"):
        for cell in select([family]):
            assert speed.kernels_of(cell), cell.name


def test_a_run_of_random_problems_is_a_line_and_goes_on(here, tmp_path):
    path = tmp_path / "random.jsonl"
    path.write_text(json.dumps({"seed": 0, "plain": False, "cuda_src": "older"}) + "\n")
    run = fuzz.Run(path, 1, False)
    units = {"forward": ["f"], "backward": ["b", "c"]}
    for index, out, dq in ((0, 0.5, 0.1), (1, 0.25, 3.0)):
        run.add({"index": index, "units": units, "case": {"Nq": index}, "fault": None,
                 "apart": {"out": out, "lse": 0.0, "dq": dq}})
    run.add({"index": 2, "units": units, "case": {"Nq": 2}, "fault": "AssertionError: far",
             "apart": {}})
    run.write()
    run = fuzz.Run(path, 1, False)
    older, line = lines_of(path)
    assert older["seed"] == 0 and line == run.fields and line["next"] == 3
    assert line["units"]["f"] == {"problems": 3, "worst": 0.5, "result": "out", "index": 0,
                                  "case": {"Nq": 0}}
    assert line["units"]["b"] == line["units"]["c"]
    assert (line["units"]["b"]["worst"], line["units"]["b"]["index"]) == (3.0, 1)
    assert line["faults"] == [{"index": 2, "case": {"Nq": 2}, "fault": "AssertionError: far"}]
    assert fuzz.Run(path, 1, True).fields["next"] == fuzz.Run(path, 2, False).fields["next"] == 0


@pytest.mark.parametrize("only", ["causal-n1500-d64-*bfloat16", "full-n1500-d64-*tf32x3*bias",
                                  "full-n1500-d64-*float64-rows", "h8kv2-float16"])
def test_rows_are_judged_one_by_one(only):
    """What a plain program returns passes; a row that is off does not, however small it is."""
    cell = replace(select(["rows"], [f"backward*{only}"])[0], Nq=300, Nk=300)
    (one,) = data.make(cell, np)
    want, plain = (accuracy.heads(cell, one, np, way) for way in (answers, accuracy.plain_program))
    for name in ("out", "dq", "dk", "dv"):
        dtype = data.dtype_of(cell.dtype)
        assert want[name].shape == plain[name].shape
        assert not np.array_equal(want[name], plain[name])
        found = plain[name].astype(dtype)
        largest, _ = accuracy.factors(found[None], want[name], plain[name])
        assert 0 < largest <= 1.5
        smallest = np.argsort(np.linalg.norm(found.reshape(-1, found.shape[-1]).astype(float),
                                             axis=1))[20:40]
        found.reshape(-1, found.shape[-1])[smallest] *= dtype.type(1.5)
        assert accuracy.factors(found[None], want[name], plain[name])[0] > 10


def test_late_maxima_come_late():
    q, k, *_ = accuracy.inputs(np, "late maxima", 60, np.dtype(np.float32))
    assert np.array_equal(k[..., -5:, :], 3 * q[..., 20:25, :])
    assert of_head(select(["rows"])[0], SimpleNamespace(q=q, k=k, v=k, dout=q, options={}), 0,
                   0)[0][1].shape == (60, 64)


def test_the_plain_kernel_compiles():
    for name, d, d_v in (("float", 3, 1), ("double", 8, 8)):
        signature = f"const {name}*, const {name}*, const {name}*, {name}*, int, int, {name}"
        cubin, log = nvrtc.compile(
            f"{KERNEL}template __global__ void plain<{name}, {d}, {d_v}, 4>({signature});\n", 80)
        assert cubin is not None, log


def test_first_calls_are_records_that_the_tables_read(here, monkeypatch, tmp_path):
    seconds = iter(range(1, 1000))

    def fresh(code, *words, **env):
        if code == first_call.ON_GPU:
            return {"kernels": {"k": next(seconds)}, "calls": {"forward": 1.0, "backward": 2.0}}
        return next(seconds)

    monkeypatch.setattr(first_call, "fresh", fresh)
    monkeypatch.setattr(first_call, "overhead", lambda direction: {"direction": direction})
    for place in ("cpu", "gpu"):
        assert main(["first-call", "--on", place, "--out", str(tmp_path / place)]) == 0
        assert main(["first-call", "--on", place, "--out", str(tmp_path / place)]) == 0
    cpu, gpu = (lines_of(tmp_path / place) for place in ("cpu", "gpu"))
    assert len(cpu) == 9 and cpu[0]["cached_s"] - cpu[0]["cold_s"] == 3     # median of five
    assert {"dtype", "direction", "date"} <= cpu[0].keys() and cpu[-1]["import_s"]
    assert len(gpu) == 4 * 3 * 2 + 2
    assert len(gpu[0]["kernels"]["k"]) == 3 and len(gpu[1]["kernels"]["k"]) == 1
    assert gpu[0]["calls"] == {"forward": [1.0] * 3, "backward": [2.0] * 3}

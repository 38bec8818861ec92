"""Old against new: two trees in two processes, rounds that end with the time, what is said."""

import ctypes
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import compare, data, pair, worker  # noqa: E402
from bench.__main__ import COMMANDS, main, parser_of  # noqa: E402
from bench.cells import Cell, select  # noqa: E402
from bench.pair import Found, Pair, distance, rounds  # noqa: E402

# A package that computes attention the plain way; {changes} makes another commit of it.
PACKAGE = '''
import time
from types import SimpleNamespace
import numpy as np
__version__ = "{version}"
def attention(q, k, v, *, causal=False, return_lse=False, **options):
    time.sleep({seconds})
    {before}
    S = q @ k.swapaxes(-1, -2) * q.shape[-1]**-0.5
    if causal:
        S = np.where(np.tri(*S.shape[-2:], dtype=bool), S, -np.inf).astype(q.dtype)
    P = np.exp(S - S.max(-1, keepdims=True))
    out = P @ v / P.sum(-1, keepdims=True) * q.dtype.type({factor})
    return (out, P.sum(-1)) if return_lse else out
def attention_backward(dout, q, k, v, out, lse, **options):
    return SimpleNamespace(dq=q, dk=k, dv=v, dbias=options.get("bias"))
'''


def make_tree(folder, version="0", seconds=0.0, factor=1, before=""):
    """A tree whose package sleeps, is wrong by a factor, or fails."""
    (folder / "cupy_flash").mkdir(parents=True)
    (folder / "cupy_flash" / "__init__.py").write_text(PACKAGE.format(
        version=version, seconds=seconds, factor=factor, before=before))
    return str(folder)


def cell(**changes):
    """A small cell."""
    fields = {"family": "cpu", "direction": "forward", "dtype": "float32", "B": 1, "Hq": 2, "Hk": 2,
              "Nq": 8, "Nk": 8, "d": 4, "d_v": 4}
    return Cell(**(fields | changes))


SMALL = (cell(), cell(direction="backward"), cell(causal=True, softcap=20),
         cell(arrays=(("bias", "1hqk"),), direction="backward"))


@pytest.fixture
def compared(tmp_path, monkeypatch, capsys):
    """A function that compares two trees on small cells: (status, what is printed, record)."""
    monkeypatch.setattr(compare.cells, "select", lambda *_: SMALL)

    def run(new, old=None, **options):
        trees = (make_tree(tmp_path / "old", **(old or {})), make_tree(tmp_path / "new", **new))
        words = [*trees, "--on", "cpu", "--rounds", "2", "--milliseconds", "1",
                 "--out", str(tmp_path / "out.jsonl"), *options.pop("more", ())]
        status = main(["compare", *words])
        (line,) = (tmp_path / "out.jsonl").read_text().splitlines()
        return status, capsys.readouterr().out, json.loads(line)

    return run


def test_each_side_imports_its_own_package_and_the_slower_one_is_found(compared):
    status, said, record = compared(new={"version": "2", "seconds": 0.004},
                                    old={"version": "1", "seconds": 0.001})
    assert status == 0 and "same bits in 4" in said
    assert (record["old"]["version"], record["new"]["version"]) == ("1", "2")
    assert record["old"]["commit"] == "old" and record["cpu"] and record["date"]
    assert record["old"]["sources"] != record["new"]["sources"]
    rows = {row[0]: row[1:] for row in record["cells"]}
    assert list(rows) == [one.name for one in SMALL]
    before, now, ratio, low, high, count, apart = rows[SMALL[0].name]
    assert 1 < before < 4 < now and low <= ratio <= high < 0.8 and (count, apart) == (2, {})
    assert re.search(r"cpu forward float32: 2 cells, geometric mean 0\.\d+, lowest 0\.", said)


def test_results_that_differ_are_found(compared):
    status, said, record = compared(new={"factor": 1.5})
    assert status == 1
    forward, backward, *_ = record["cells"]
    assert forward[-1]["out"] == pytest.approx(0.5 / data.BOUNDS["float32"], rel=1e-3)
    assert backward[-1] == {}           # its results are those of the old one
    assert "DIFFERENT: out" in said and "2 cells have DIFFERENT results" in said


def test_the_last_bits_are_seen_and_forgiven(compared):
    status, said, record = compared(new={"factor": 1 + 2**-22})
    assert status == 0 and 0 < record["cells"][0][-1]["out"] < 0.1
    assert "apart: out" in said and "DIFFERENT" not in said


@pytest.mark.parametrize(("before", "word"), [
    ('if options.get("softcap"): raise TypeError("no softcap")', "TypeError: no softcap"),
    ('if options.get("softcap"): raise MemoryError("all gone")', "MemoryError: all gone"),
    ('import os\n    if options.get("softcap"): os._exit(3)', "the process has ended")])
def test_what_one_side_cannot_do_leaves_the_other_cells(compared, before, word):
    status, said, record = compared(new={"before": before})
    assert status == 1 and f"new: {word}" in said
    assert [len(row) for row in record["cells"]] == [8, 8, 2, 8]


def test_what_the_old_one_could_not_do_is_no_fault(compared):
    status, said, _ = compared(old={"before": "if 'softcap' in options: raise TypeError()"}, new={})
    assert status == 0 and "1 cells cannot be compared" in said


def test_a_process_that_hangs_is_ended(compared, monkeypatch):
    monkeypatch.setattr(pair, "LONGEST", 0.8)
    status, _, record = compared(
        new={"before": 'if options.get("softcap"): time.sleep(30)'})
    assert status == 1 and record["cells"][2][1] == "new: no answer in 0.8 seconds"
    assert len(record["cells"][3]) == 8


def test_a_commit_is_unpacked(tmp_path):
    try:
        folder = compare.tree("HEAD", tmp_path / "old")
    except SystemExit as error:
        pytest.skip(f"not in git: {error}")
    assert (folder / "cupy_flash" / "__init__.py").exists() and (folder / "cuda_src").exists()
    assert re.fullmatch("[0-9a-f]{12}", compare.commit_of("HEAD"))
    with pytest.raises(SystemExit, match="is no folder"):
        compare.tree("no-such-commit", tmp_path / "new")


def test_a_package_from_elsewhere_is_refused(tmp_path):
    workers = SimpleNamespace(ask=lambda _: {"old": {"folder": str(tmp_path)}})
    with pytest.raises(SystemExit, match="imported from elsewhere"):
        compare.described(workers, {"old": tmp_path / "old"}, {"old": "old"})


class Clockwork:
    """A pair whose methods take a second each of a pretended clock."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.seen, self._seconds, self._open = 0.0, [], seconds, None
        self.workers = {"old": None, "new": None}
        monkeypatch.setattr(pair.time, "monotonic", lambda: self.now)

    def ask(self, method, *arguments, of=("old", "new")):
        if method == "open":
            self._open = arguments[0]
            self.seen.append(self._open.d)
        if method == "measure":
            self.now += self._seconds[self._open.d] / 4
            return {of[0]: {"old": 3.0, "new": 2.0}[of[0]]}
        if method == "check":
            return {"old": {"out": "bits"}, "new": {"out": "bits"}}


def test_rounds_go_over_all_cells_and_a_cut_leaves_each_with_some(monkeypatch):
    cells = [cell(d=d) for d in (1, 2, 3)]
    clockwork = Clockwork(monkeypatch, {1: 1, 2: 10, 3: 1})
    found = rounds(clockwork, cells, 20.5, 50)
    # The second cell takes longer than what is left after its first round.
    assert clockwork.seen == [1, 2, 3, *[1, 3] * 4] and clockwork.now == 20
    assert [len(found[one.name].ratios) for one in cells] == [5, 1, 5]
    assert found[cells[0].name].ratios == [1.5] * 5
    assert found[cells[0].name].times == {"old": [3.0] * 5, "new": [2.0] * 5}


def test_no_more_rounds_than_asked_for_and_none_after_the_time(monkeypatch):
    cells = [cell(d=d) for d in (3, 1, 2)]      # the largest comes last, whatever their order
    clockwork = Clockwork(monkeypatch, {1: 1, 2: 1, 3: 1})
    assert rounds(clockwork, cells, 600, 2)[cells[0].name].ratios == [1.5] * 2
    assert clockwork.seen == [1, 2, 3] * 2
    clockwork.seen.clear()
    found = rounds(clockwork, cells, 7.5, 9)
    assert clockwork.seen == [1, 2]
    said = "\n".join(compare.report(cells, found))
    assert f"1 cells have no round: {cells[0].name}" in said
    assert compare.record(found)[0] == [cells[0].name, "no round"]


def test_sides_take_turns_so_that_a_drift_cancels(monkeypatch):
    clockwork = Clockwork(monkeypatch, {4: 1})
    order, times = [], iter((1.0, 2.0, 3.0, 4.0))
    original = clockwork.ask

    def ask(method, *arguments, **options):
        if method != "measure":
            return original(method, *arguments)
        order.extend(options["of"])
        return {options["of"][0]: next(times)}

    clockwork.ask = ask
    one = Found()
    one.add_round(clockwork, cell(), first=True)
    assert order == ["old", "new", "new", "old"]
    assert one.times == {"old": [2.5], "new": [2.5]} and one.ratios == [1.0]


def test_distances_know_nan_and_infinity():
    x = np.array([3.0, 4.0, np.inf, np.nan])
    assert distance(x, x) == 0
    assert distance(x, x + np.array([0.3, 0.4, 0, 0])) == pytest.approx(0.1)
    for at, value in ((0, np.nan), (1, -np.inf), (2, 5.0), (2, -np.inf), (3, 1.0)):
        y = x.copy()
        y[at] = value
        assert distance(x, y) == np.inf, (at, value)
    assert distance(np.zeros(2), np.zeros(2)) == 0 and distance(np.zeros(2), np.ones(2)) == np.inf
    assert distance(x, x[:2]) == np.inf


def test_a_gradient_that_is_rounding_alone_is_not_compared():
    shared = cell(direction="backward", arrays=(("bias", "1hq1"),))
    digests = {"old": {"dq": 1, "dbias": 1}, "new": {"dq": 1, "dbias": 2}}
    far = {"old": {"dbias": np.zeros(2)}, "new": {"dbias": np.ones(2)}}
    workers = SimpleNamespace(ask=lambda method: {"check": digests, "samples": far}[method])
    assert pair.apart(workers, shared) == {}
    assert pair.apart(workers, replace(shared, arrays=(("bias", "1hqk"),))) == {"dbias": np.inf}


class InProcess:
    """A worker of this process that answers as one of another does."""

    def __init__(self, one):
        self._worker = one

    def ask(self, *asked):
        self._answer = worker.answer(self._worker, asked[0], asked[1:])

    def answer(self):
        return self._answer

    def stop(self, *_):
        """There is nothing to begin anew."""

    start = stop


class FakeEvent:
    """A CUDA event of the host's clock; nothing is ever done before it is waited for."""

    done = False

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass


@pytest.fixture
def pretended(launches, monkeypatch):
    """Two workers with a GPU that records what it is asked to do, and the kernels that wait."""
    import cupy
    from fake_cupy import fake

    import cupy_flash

    holds = []
    monkeypatch.setattr(cupy, "RawKernel", lambda text, name: lambda *asked: holds.append(asked))
    monkeypatch.setattr(cupy.cuda, "Event", FakeEvent)
    monkeypatch.setattr(cupy.cuda, "get_elapsed_time", lambda a, b: 1e3 * (b.at - a.at))
    for method in ("free", "wait"):
        monkeypatch.setattr(worker.Gpu, method, lambda self: None)
    monkeypatch.setattr(worker.Gpu, "sets", lambda self, cell: [
        data.Set(*map(fake, one[:4]), {name: fake(x) for name, x in one.options.items()})
        for one in data.make(cell, np, 2)])
    monkeypatch.setattr(worker.Gpu, "to_host", lambda self, x: np.frombuffer(
        (ctypes.c_char * x.nbytes).from_address(x.data.ptr), x.dtype).reshape(x.shape))
    folder = str(Path(cupy_flash.__file__).parents[1])
    workers = {name: InProcess(worker.Worker(worker.Ours(folder), worker.Gpu(), 1.0))
               for name in ("old", "new")}
    return Pair(workers), launches, holds


@pytest.mark.parametrize(("family", "only"), [
    ("16-bit", "n1024-d64-*bfloat16"), ("portable", "n1024-d64-*bfloat16"),
    ("science", "n1024-d64-*tf32x3"), ("decode", "n1x4096"), ("shapes", "n128-d64*bfloat16"),
    ("small-d", "n32768-d3v1-*float32"), ("rows", "causal-*d64-*bfloat16"),
    ("options", "b4-*-bfloat16")])
def test_cells_of_a_gpu_are_queued_and_timed_by_events(pretended, family, only):
    workers, launched, holds = pretended
    cells = [replace(one, B=min(one.B, 2), Nq=min(one.Nq, 256), Nk=min(one.Nk, 4096 // one.Nq))
             for one in select([family], [only])]
    found = rounds(workers, cells, time.monotonic() + 300, 1)
    assert {name: one.fault for name, one in found.items() if one.fault} == {}
    for one in found.values():
        assert all(len(ms) == 1 and ms[0] > 0 for ms in one.times.values())
    assert launched and len(holds) >= 6 * len(cells)
    # The stream is held while calls queue: a pace of one call without, then longer and longer.
    assert {grid for grid, *_ in holds} == {(1,)} and max(hold[2][0] for hold in holds) > 1e6
    if family == "portable":
        assert not any("sm90" in name for name in launched.names)


def test_kernels_of_each_sort_of_cell_are_compiled_once_beforehand():
    asked = []

    class Fake:
        def __init__(self, name):
            self.name = name

        def ask(self, method, cells):
            asked.append((self.name, method, cells))

        def answer(self):
            return True, None

        def stop(self, _):
            asked.append((self.name, "stop"))

    cells = select(["16-bit"], ["bfloat16"])
    compare.compile_beforehand(Fake, cells, jobs=6)
    for name in ("old", "new"):
        compiled = [one for words in asked if words[:2] == (name, "compile") for one in words[2]]
        assert len(compiled) == len({*compiled}) == 2 * 3 * 2       # passes, head dims, masks
        assert asked.count((name, "stop")) == 3


def test_every_command_can_be_parsed_as_its_module_says():
    for command in COMMANDS:
        parser, module = parser_of(command)
        examples = re.findall(rf"^    (?:\S+ )*python -m bench {command}\b([^#\n]*)",
                              module.__doc__, re.MULTILINE)
        assert examples, command
        for words in examples:
            parser.parse_args(re.findall(r"'[^']*'|\S+", words))


def test_a_wrong_command_says_which_there_are(capsys):
    assert main(["no-such-thing"]) == 1 and main([]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in COMMANDS)

"""Time an old commit and a new one in turn, and compare their results.

    python -m bench compare HEAD~3                          # with the working tree
    python -m bench compare 1ba2604 --cells speed options --only bfloat16 --minutes 4
    python -m bench compare old-folder new-folder --cells cpu --on cpu

A commit is unpacked by `git archive` into a temporary folder; where git has no history, name
folders. Each has a process of its own, which imports its cupy_flash. Every round goes over all
cells: old, new, new, old, each side's two times averaged. Results are compared bit by bit in the
first round; where they are apart, the norm of the difference is given in units of the error that
the benchmark allows against float64. A ratio is the median over the rounds of the old one's time /
the new one's: above 1 the new one is faster.

The status is 1 if a cell's results are farther apart than that, or the new one cannot do what the
old one can.
"""

import hashlib
import os
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

from . import RESULTS, ROOT, cells
from .pair import Pair, Process, rounds
from .records import Results, commit, geometric_mean, say

DEFAULTS = {"gpu": ("speed", "decode", "options", "shapes", "small-d", "rows"),
            "cpu": ("cpu", "cpu-options")}


def arguments(parser):
    """Of the command line."""
    parser.add_argument("old", help="a commit, or a folder with the package")
    parser.add_argument("new", nargs="?", default=str(ROOT),
                        help="another one; without it, the working tree")
    cells.arguments(parser, minutes=10, rounds=9, milliseconds=20)
    parser.add_argument("--on", choices=DEFAULTS, help="without it, a GPU if there is one")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)),
                        help="processes that compile kernels for a GPU beforehand")
    parser.add_argument("--out", type=Path, default=RESULTS / "compare.jsonl",
                        help="file to which the record is appended")


def main(options):
    """Compare; see above."""
    end = time.monotonic() + 60 * options.minutes
    place = options.on or ("gpu" if gpu_is_there() else "cpu")
    chosen = cells.select(options.cells or DEFAULTS[place], options.only, options.lengths)
    if not chosen:
        raise SystemExit("no cell has such a name")
    with tempfile.TemporaryDirectory() as folder:
        names = {"old": options.old, "new": options.new}
        trees = {side: tree(name, Path(folder, side)) for side, name in names.items()}

        def start(side):
            return Process("ours", trees[side], place, options.milliseconds)

        pair = Pair({side: start(side) for side in trees})
        try:
            sides = described(pair, trees, names)
            if place == "gpu":
                compile_beforehand(start, chosen, options.jobs)
            found = rounds(pair, chosen, end, options.rounds)
        finally:
            pair.stop()
    say("\n".join(["", *report(chosen, found)]))
    Results(options.out, place).add(**sides, cells=record(found))
    return int(any(one.worst > 1 or (one.fault or "").startswith("new:") for one in found.values()))


def gpu_is_there():
    """Whether CuPy is installed and finds a GPU."""
    try:
        import cupy
    except ImportError:
        return False
    return cupy.is_available()


def tree(name, folder):
    """A folder as it is, or the files of a commit in a new folder."""
    if Path(name).is_dir():
        return Path(name).resolve()
    folder.mkdir()
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", name], capture_output=True)
    if archive.returncode:
        raise SystemExit(f"{name} is no folder, and git says: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def described(pair, trees, names):
    """What the two sides are, after a look that each has imported its own package."""
    found = pair.ask("hello")
    for side, said in found.items():
        if Path(said.pop("folder")).resolve() != Path(trees[side]).resolve():
            raise SystemExit(f"{side}: cupy_flash was imported from elsewhere than {names[side]}")
        said |= {"commit": commit_of(names[side]), "sources": digest(trees[side])}
        say(f"{side}: {said['commit']}, sources {said['sources']}, {said['packages']}")
    return found


def commit_of(name):
    """A commit by its digits; of a folder, its last name and what git says of it."""
    if not Path(name).is_dir():
        command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    folder = Path(name).resolve()
    return commit(folder) if folder == ROOT or (folder / ".git").exists() else folder.name


def digest(folder):
    """Of the package and the CUDA sources in a folder."""
    found = hashlib.sha256()
    paths = sorted(path for part in ("cupy_flash", "cuda_src") for path in
                   Path(folder, part).rglob("*") if path.suffix in (".py", ".cuh", ".cu"))
    for path in paths:
        found.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def compile_beforehand(start, chosen, jobs):
    """Kernels of both sides by many processes, a cell of each sort; what is left compiles later."""
    sorts = {(one.direction, one.kind, one.d, one.d_v, one.mask[:4], one.Nq == 1, one.softcap,
              one.portable, tuple(name for name, _ in one.arrays)): one for one in chosen}
    count = max(1, min(len(sorts), jobs // 2))
    workers = [(start(side), i) for side in ("old", "new") for i in range(count)]
    for worker, i in workers:
        worker.ask("compile", [*sorts.values()][i::count])
    for worker, _ in workers:
        worker.answer()
        worker.stop(0)


def report(chosen, found):
    """All cells, then what they come to."""
    width = max(len(cell.name) for cell in chosen)
    yield from (f"{cell.name:{width}}  {found[cell.name]}" for cell in chosen)
    yield ""
    groups = {"all": chosen}
    for cell in chosen:
        groups.setdefault(f"{cell.family} {cell.direction} {cell.kind}", []).append(cell)
    yield from filter(None, (summary(name, some, found) for name, some in groups.items()))
    faults = [name for name, one in found.items() if one.fault]
    unseen = [name for name, one in found.items() if not one.times and not one.fault]
    far = [name for name, one in found.items() if one.worst > 1]
    for words, some in (("cannot be compared", faults), ("have no round", unseen),
                        ("have DIFFERENT results", far)):
        if some:
            yield f"{len(some)} cells {words}: {', '.join(some[:5])}{', ...' * (len(some) > 5)}"


def summary(name, some, found):
    """Mean and lowest ratio of some cells; None if there is none."""
    ratios = {cell.name: median(found[cell.name].ratios) for cell in some
              if found[cell.name].times}
    if not ratios:
        return None
    lowest = min(ratios, key=ratios.get)
    same = sum(not found[name].apart for name in ratios)
    return (f"{name}: {len(ratios)} cells, geometric mean {geometric_mean(ratios.values()):.3f}, "
            f"lowest {ratios[lowest]:.3f} ({lowest}), same bits in {same}")


def record(found):
    """[name, ms of the two sides, ratio, its least and largest, rounds, how far apart]."""
    rows = []
    for name, one in found.items():
        if one.times:
            ratios = one.ratios
            rows.append([name, *(round(median(ms), 5) for ms in one.times.values()),
                         *(round(x, 4) for x in (median(ratios), min(ratios), max(ratios))),
                         len(ratios), one.apart])
        else:
            rows.append([name, one.fault or "no round"])
    return rows

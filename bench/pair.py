"""Two processes that are timed in turn, round after round: old and new, or torch and ours."""

import math
import multiprocessing
import subprocess
import sys
import time
from contextlib import suppress
from statistics import median

import numpy as np

from . import ROOT
from .data import bound
from .records import say

LONGEST = 300           # seconds for one answer: what takes longer hangs
# Of a worker that goes on: what it was asked for is not to be had.
REFUSALS = ("TypeError", "ValueError", "NotImplementedError", "CannotError")


class Process:
    """A worker: `ask` what it is to do, then wait for the `answer`."""

    def __init__(self, *words, python=sys.executable):
        self._command, self._words = [python, "-m", "bench.worker"], [str(word) for word in words]
        self.start()

    def start(self):
        """Begin, or begin anew."""
        self._pipe, there = multiprocessing.Pipe()
        with there:
            self._process = subprocess.Popen(
                [*self._command, str(there.fileno()), *self._words], cwd=ROOT,
                pass_fds=[there.fileno()])

    def ask(self, method, *arguments):
        """Begin a method of the `Worker`; a process that has ended says so when it is to answer."""
        with suppress(OSError):
            self._pipe.send((method, arguments))

    def answer(self):
        """(True, value) or (False, why not)."""
        try:
            if self._pipe.poll(LONGEST):
                return self._pipe.recv()
            return False, f"no answer in {LONGEST} seconds"
        except (EOFError, OSError):
            return False, "the process has ended"

    def stop(self, patience=5):
        """End it, by force if it has not ended after so many seconds."""
        self._pipe.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Pair:
    """The workers of two sides by name; ratios are times of the first / times of the second."""

    def __init__(self, workers):
        self.workers = workers

    def ask(self, method, *arguments, of=None):
        """{name: value} of a method of both at once, or only `of` some.

        Raises RuntimeError if one of them cannot; one that is lost, or whose GPU may be, is started
        anew.
        """
        asked, found, faults = of or tuple(self.workers), {}, {}
        for name in asked:
            self.workers[name].ask(method, *arguments)
        for name in asked:
            able, value = self.workers[name].answer()
            (found if able else faults)[name] = value
            if not able and not value.startswith(REFUSALS):
                self.workers[name].stop(0)
                self.workers[name].start()
        if faults:
            raise RuntimeError("; ".join(f"{name}: {why}" for name, why in faults.items()))
        return found

    def stop(self):
        """End both."""
        for worker in self.workers.values():
            worker.stop()


def rounds(pair, cells, end, most):
    """Rounds over all cells, `most` of them, until the clock is at `end`: `Found` by name.

    The first round compares results before it times anything. A cell whose round takes longer than
    what is left is passed over. So a cut leaves all cells with some rounds; a cut of the first
    round leaves the largest without.
    """
    found = {cell.name: Found() for cell in cells}
    for number in range(most):
        for cell in sorted(cells, key=lambda one: one.flops):
            one, left = found[cell.name], end - time.monotonic()
            if one.fault or left < one.seconds or left < 0:
                continue
            begin = time.monotonic()
            try:
                one.add_round(pair, cell, first=number == 0)
            except RuntimeError as error:
                one.fault = str(error)
            one.seconds = time.monotonic() - begin
            if number == 0:
                say(f"{cell.name}  {one}")
    return found


class Found:
    """What has been seen of a cell: ms of each side in each round, and how results differ.

    apart: by result, the norm of the difference over the norm, in units of the error that is
    allowed; none where the bits are the same.
    """

    def __init__(self):
        self.times, self.apart, self.fault, self.seconds = {}, {}, None, 0.0

    def add_round(self, pair, cell, first):
        """One round: first side, second, second, first, and the two times of each averaged."""
        pair.ask("open", cell)
        try:
            if first:
                self.apart = apart(pair, cell)
            names = tuple(pair.workers)
            taken = [pair.ask("measure", of=(name,))[name] for name in (*names, *names[::-1])]
        finally:
            pair.ask("close")
        for name, one, two in zip(names, taken[:2], taken[:1:-1], strict=True):
            self.times.setdefault(name, []).append((one + two) / 2)

    @property
    def ratios(self):
        """Time of the first side / time of the second, of each round."""
        return [a / b for a, b in zip(*self.times.values(), strict=True)]

    @property
    def worst(self):
        """How far results are apart, in units of what is allowed."""
        return max(self.apart.values(), default=0.0)

    def __str__(self):
        if not self.times:
            return self.fault or "no round"
        ms, ratios = ({name: median(ms) for name, ms in self.times.items()}, self.ratios)
        return ("  ".join(f"{name} {middle:.4g} ms" for name, middle in ms.items())
                + f"  ratio {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}, "
                f"{len(ratios)} rounds)  {self.bits}{'; then ' + self.fault if self.fault else ''}")

    @property
    def bits(self):
        """In words, how results differ."""
        if not self.apart:
            return "same bits"
        words = ", ".join(f"{name} {far:.2g}" for name, far in self.apart.items())
        return f"{'DIFFERENT' if self.worst > 1 else 'apart'}: {words} of the error allowed"


def apart(pair, cell):
    """See `Found`. A bias that all keys share changes no weight: its gradient is rounding alone."""
    first, second = pair.ask("check").values()
    nothing = {"dbias"} if "k" not in dict(cell.arrays).get("bias", "k") else set()
    different = [name for name in first if first[name] != second[name] and name not in nothing]
    if not different:
        return {}
    a, b = pair.ask("samples").values()
    return {name: distance(a[name], b[name]) / bound(cell) for name in different}


def distance(a, b):
    """Norm of the difference over norm; infinite unless NaN and infinities are the same."""
    finite = np.isfinite(a)
    if a.shape != b.shape or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return math.inf
    a, b = a[finite], b[finite]
    difference, size = float(np.linalg.norm(b - a)), float(np.linalg.norm(a))
    if not difference:
        return 0.0
    return difference / size if size and math.isfinite(difference) else math.inf

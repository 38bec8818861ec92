"""Two processes that are timed in turn, round after round: old and new, or ours and torch."""

import math
import multiprocessing
import subprocess
import sys
import time
from statistics import median

import numpy as np

from . import ROOT
from .data import bound

LONGEST = 300           # seconds for one answer: what takes longer hangs


class Lost(Exception):
    """A process that has ended, or does not answer."""


class Process:
    """A worker: `ask` what it is to do, then wait for the `answer`."""

    def __init__(self, *words, python=sys.executable):
        self._command = [python, "-m", "bench.worker"]
        self._words = [str(word) for word in words]
        self.start()

    def start(self):
        """Begin, or begin anew."""
        self._pipe, there = multiprocessing.Pipe()
        with there:
            self._process = subprocess.Popen(
                [*self._command, str(there.fileno()), *self._words],
                pass_fds=[there.fileno()], cwd=ROOT)

    def ask(self, method, *arguments):
        """Begin a method of the `Worker`."""
        try:
            self._pipe.send((method, arguments))
        except OSError as error:
            raise Lost("the process has ended") from error

    def answer(self):
        """(True, value) or (False, why not)."""
        try:
            if self._pipe.poll(LONGEST):
                return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise Lost("the process has ended") from error
        raise Lost(f"no answer in {LONGEST} seconds")

    def stop(self, patience=5):
        """End it, by force if it has not ended after so many seconds."""
        self._pipe.close()
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Pair:
    """The workers of two sides by name, the first of which ratios are relative to."""

    def __init__(self, workers):
        self.workers = workers

    def ask(self, method, *arguments, of=None):
        """{name: value} of a method of both at once, or only `of` some.

        Raises RuntimeError if one of them cannot; a worker that is lost, or whose GPU may be, is
        started anew.
        """
        found, faults = {}, {}
        of = of or tuple(self.workers)
        for name in of:
            self._try(faults, name, "ask", method, *arguments)
        for name in of:
            if name not in faults:
                done = self._try(faults, name, "answer")
                if done and not done[0]:
                    faults[name] = done[1]
                elif done:
                    found[name] = done[1]
        for name, why in faults.items():
            if not why.startswith(("TypeError", "ValueError", "NotImplementedError",
                                   "CannotError")):
                self.workers[name].stop(0)
                self.workers[name].start()
        if faults:
            raise RuntimeError("; ".join(f"{name}: {why}" for name, why in faults.items()))
        return found

    def _try(self, faults, name, method, *arguments):
        try:
            return getattr(self.workers[name], method)(*arguments)
        except Lost as error:
            faults[name] = str(error)

    def stop(self):
        """End both."""
        for worker in self.workers.values():
            worker.stop()


def rounds(pair, cells, minutes, most, say):
    """Rounds over all cells until the time is up or each has `most`; a `Found` of each by name.

    The first round compares results before it times anything. A cell whose round takes longer than
    what is left is passed over; a cut leaves all cells with some rounds unless the first is cut.
    """
    found, end = {cell.name: Found() for cell in cells}, time.monotonic() + 60 * minutes
    for number in range(most):
        for cell in cells:
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
        first, second = self.times.values()
        return [a / b for a, b in zip(first, second, strict=True)]

    @property
    def worst(self):
        """How far results are apart, in units of what is allowed."""
        return max(self.apart.values(), default=0.0)

    def __str__(self):
        if self.fault:
            return self.fault
        if not self.times:
            return "no round"
        middle = "  ".join(f"{name} {median(ms):.4g} ms" for name, ms in self.times.items())
        ratios = self.ratios
        spread = f"({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} rounds)"
        return f"{middle}  ratio {median(ratios):.3f} {spread}  {self.bits}"

    @property
    def bits(self):
        """In words, how results differ."""
        if not self.apart:
            return "same bits"
        words = ", ".join(f"{name} {far:.2g}" for name, far in self.apart.items())
        return f"{'DIFFERENT' if self.worst > 1 else 'apart'}: {words} of the error allowed"


def apart(pair, cell):
    """See `Found`."""
    first, second = pair.ask("check").values()
    different = [name for name in first if first[name] != second[name]]
    if not different:
        return {}
    a, b = pair.ask("samples").values()
    return {name: distance(a[name], b[name]) / bound(cell) for name in different}


def distance(a, b):
    """Norm of the difference over norm; infinite unless NaN and infinities are the same."""
    finite = np.isfinite(a)
    if a.shape != b.shape or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return math.inf
    a, difference = a[finite], b[finite] - a[finite]
    if not np.isfinite(difference).all():
        return math.inf
    if not difference.any():
        return 0.0
    size = float(np.linalg.norm(a))
    return float(np.linalg.norm(difference)) / size if size else math.inf

"""Interrupt the CPU path at random moments, and look for memory that it should not touch.

    python -m bench interrupts --count 1000

An interrupt is a signal whose handler raises, somewhere in a forward or backward pass, with or
without buffers of the caller's own, on 1, 2 or 8 threads; half of the time a second one follows 0
to 50 ms after the first. Then the arrays of the call are dropped, fresh ones are filled with 7, and
after a while every 7 must still be one. A process does `BATCH` of them; one that dies is counted.
"""

import json
import os
import signal
import subprocess
import sys
import time
from argparse import SUPPRESS
from dataclasses import replace

import numpy as np

from . import ROOT
from .records import say

BATCH = 20
THREADS = (1, 2, 8)


class Interrupt(Exception):
    """What the signal's handler raises."""


class Signals:
    """One signal after a while, and perhaps a second one after the first."""

    def __init__(self):
        self.second, self.raised, self.over = 0.0, 0, False
        signal.signal(signal.SIGALRM, self._handle)

    def start(self, first, second):
        self.second, self.over = second, False
        signal.setitimer(signal.ITIMER_REAL, max(first, 1e-6))

    def stop(self):
        self.second = 0.0
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _handle(self, number, frame):
        if self.over:
            return
        self.raised += 1
        signal.setitimer(signal.ITIMER_REAL, self.second)
        self.second = 0.0
        raise Interrupt


def call(rng, N, heads, backward, own):
    """A call on arrays that live no longer than it."""
    import cupy_flash as cf

    q, k, v, dout = (rng.standard_normal((1, heads, N, 32), dtype=np.float32) for _ in range(4))
    if not backward:
        cf.attention(q, k, v, out=np.empty_like(q) if own else None)
        return
    buffers = {name: np.empty_like(q) for name in ("dq", "dk", "dv")} if own else {}
    cf.attention_backward(dout, q, k, v, v, np.full((1, heads, N), 5, np.float32), **buffers)


def changed_elements(rng, signals):
    """Interrupt one call; how many elements of fresh arrays are changed afterwards."""
    problem = (int(rng.integers(600, 1800)), int(rng.integers(1, 4)), bool(rng.integers(2)),
               bool(rng.integers(2)))
    start = time.perf_counter()
    call(rng, *problem)
    first = rng.uniform(0.02, 1.1) * (time.perf_counter() - start)
    second = int(rng.integers(2)) * rng.uniform(1e-6, 0.05)
    fresh = []
    try:
        try:
            signals.start(first, second)
            call(rng, *problem)
        except Interrupt:
            pass
        fill(fresh, problem)
        time.sleep(0.06)
    except Interrupt:
        pass
    signals.over = True     # not by a call: on a busy machine the second signal would come in it
    signals.stop()
    fill(fresh, problem)
    time.sleep(0.02)
    return sum(int((x != 7).sum()) for x in fresh)


def fill(fresh, problem):
    """Add to `fresh` until it holds as many arrays as a call has, and some more."""
    while len(fresh) < 12:
        fresh.append(np.full((1, problem[1], problem[0], 32), 7, np.float32))


def work(seed, count, threads):
    """A process: what came of `count` interrupted calls."""
    from cupy_flash import device

    cpu = replace(device.cpu(), threads=threads)
    device.cpu = lambda: cpu
    rng, changed = np.random.default_rng(seed), 0
    for backward in (False, True):
        call(rng, 300, 2, backward, False), call(rng, 700, 1, backward, False)   # compiled
    signals = Signals()
    for _ in range(count):
        changed += changed_elements(rng, signals)
    return {"calls": count, "raised": signals.raised, "changed": changed}


def run(seed, count, threads):
    """`work` in a process of its own; None if it died."""
    command = [sys.executable, "-m", "bench", "interrupts", "--work", *map(str, (seed, count,
                                                                               threads))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        print(f"{command}: exit {done.returncode}\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout)


def survey(count, seed=0, batch=BATCH):
    """Totals over `count` interrupted calls; `died`: processes that did not end well."""
    totals = {"calls": 0, "raised": 0, "changed": 0, "died": 0}
    while totals["calls"] < count:
        size = min(batch, count - totals["calls"])
        found = run(seed, size, THREADS[seed % len(THREADS)])
        seed += 1
        if found is None:
            found = {"calls": size, "died": 1}
        for name, value in found.items():
            totals[name] += value
    return totals


def arguments(parser):
    """Of the command line."""
    parser.add_argument("--count", type=int, default=1000, help="calls to interrupt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=int, nargs=3, help=SUPPRESS)


def main(options):
    """Say what came of all, or be one of the processes; 1 if anything was touched."""
    if options.work:
        say(json.dumps(work(*options.work)))
        return 0
    found = survey(options.count, options.seed)
    say(", ".join(f"{name} {n:,}" for name, n in found.items()), f"; {os.cpu_count()} processors",
        sep="")
    return int(found["changed"] + found["died"] > 0)

"""Times of calls: queued on the stream of CuPy and torch, or one after the other on a CPU.

A kernel that only waits holds the stream until all calls of a round are queued: no time of the host
is in the result, however short the calls are. On a CPU a round has as many untimed calls before
the timed ones: they outlast the threads that OpenMP of another process keeps spinning for
milliseconds after its calls.
"""

import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

MOST_CALLS = 400
MOST_HELD = 100             # calls behind the waiting kernel: a stream takes about 1,000 launches
CYCLES_PER_MS = 2_500_000   # no GPU is faster, so the kernel waits at least as long as asked
HOLD = r"""
extern "C" __global__ void hold(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}
"""


@dataclass
class Side:
    """One implementation at one cell.

    call: number of the call -> its results, for the sets of inputs in turn.
    tensors: results -> torch tensors (B, heads, N, width).
    wait: waits for results on a stream of another library; None: they are on the common stream.
    errors: of each result, see `truth.errors`.
    """

    call: Callable[[int], Any]
    tensors: Callable[[Any], tuple] = tuple
    wait: Callable[[Any], Any] | None = None
    errors: dict | None = None


@dataclass
class Pace:
    """How one side is timed: calls a round, and ms that the stream is held while they queue."""

    calls: int
    hold: float = 0.0
    slow_host: bool = False


class HostClock:
    """Times calls that return when they are done."""

    def __init__(self, milliseconds):
        self._ms = milliseconds

    def pace(self, side):
        """How many calls make up a round, from how long one takes."""
        self._by_host(side, 1)
        return Pace(_calls(self._ms / self._by_host(side, 1), MOST_CALLS))

    def round(self, side, pace):
        """ms per call."""
        self._by_host(side, pace.calls)
        return self._by_host(side, pace.calls)

    def _by_host(self, side, calls):
        """ms per call by the clock of the host."""
        begin = time.perf_counter()
        for i in range(calls):
            side.call(i)
        return 1e3 * (time.perf_counter() - begin) / calls


class GpuClock:
    """Times sides on the current stream."""

    def __init__(self, milliseconds):
        import cupy

        self._ms, self._cuda = milliseconds, cupy.cuda
        self._hold = cupy.RawKernel(HOLD, "hold")
        self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()

    def pace(self, side):
        """Look how long a call takes, on the GPU and on the host."""
        if side.wait:
            self._by_host(side, 1)
            taken = self._by_host(side, 2)
            return Pace(_calls(self._ms / taken, MOST_CALLS))
        self._queue(side, 1, 0)
        taken, host, _ = self._queue(side, 3, 5)
        slow = host > taken / 2
        calls = _calls(self._ms / taken, MOST_HELD if slow else MOST_CALLS)
        return Pace(calls, 0.5 + (1.5 * calls * host if slow else 0), slow)

    def round(self, side, pace):
        """ms per call; held longer if the host was too slow to queue them all."""
        if side.wait:
            return self._by_host(side, pace.calls)
        for _ in range(3):
            taken, _, held = self._queue(side, pace.calls, pace.hold)
            if held or not pace.slow_host:
                break
            pace.hold *= 2
        return taken

    def _queue(self, side, calls, hold):
        """ms per call of the GPU, of the host, and whether the stream was held to the last call."""
        self._hold((1,), (1,), (int(hold * CYCLES_PER_MS),))
        self._start.record()
        begin = time.perf_counter()
        for i in range(calls):
            side.call(i)
        host = 1e3 * (time.perf_counter() - begin)
        held = not self._start.done
        self._end.record()
        self._end.synchronize()
        return self._cuda.get_elapsed_time(self._start, self._end) / calls, host / calls, held

    def _by_host(self, side, calls):
        """ms per call of a library with streams of its own, queued likewise."""
        self._cuda.Device().synchronize()
        begin = time.perf_counter()
        for i in range(calls):
            result = side.call(i)
        side.wait(result)
        return 1e3 * (time.perf_counter() - begin) / calls


def _calls(wanted, most):
    return int(min(most, max(1, round(wanted))))


class Monitor:
    """Clock, power and temperature of the GPU, asked of nvidia-smi ten times a second."""

    FIELDS = ("clocks.sm", "power.draw", "temperature.gpu")
    NAMES = ("sm_mhz", "watts", "celsius")

    def __enter__(self):
        self._seen = []
        self._process = smi(f"--query-gpu={','.join(self.FIELDS)}", "--loop-ms=100")
        if self._process:
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_):
        if self._process:
            self._process.terminate()

    def _read(self):
        for line in self._process.stdout:
            try:
                self._seen.append((time.perf_counter(), *map(float, line.split(","))))
            except ValueError:          # "[N/A]", or words about what is wrong
                continue

    def since(self, start):
        """[lowest, median, highest] of each since `start`; None where nothing was seen."""
        rows = [row[1:] for row in self._seen if row[0] >= start]
        return {name: [min(column), median(column), max(column)]
                for name, column in zip(self.NAMES, zip(*rows, strict=True), strict=False)} or None


def smi(*arguments):
    """A process of nvidia-smi that looks at the first GPU of CuPy; None without the program."""
    import cupy

    place = cupy.cuda.runtime.deviceGetPCIBusId(0)
    try:
        return subprocess.Popen(["nvidia-smi", f"--id={place}", "--format=csv,noheader,nounits",
                                 *arguments], stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        return None

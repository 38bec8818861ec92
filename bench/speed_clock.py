"""Times of calls that are queued on the stream of CuPy and torch, and what the GPU does meanwhile.

A kernel that only waits holds the stream until all calls of a round are queued: no time of the host
is in the result, however short the calls are.
"""

import gc
import subprocess
import threading
import time
from dataclasses import dataclass
from statistics import median

import cupy as cp
import torch
from speed_lines import reason

MOST_CALLS = 400
MOST_HELD = 100             # calls behind the waiting kernel: a stream takes about 1,000 launches
FEWEST_ROUNDS = 5
CYCLES_PER_MS = 2_500_000   # no GPU is faster, so the kernel waits at least as long as asked
HOLD = r"""
extern "C" __global__ void hold(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}
"""


@dataclass
class Pace:
    """How one side is timed: calls a round, and ms that the stream is held while they queue."""

    calls: int
    hold: float = 0.0
    slow_host: bool = False


class Clock:
    """Times sides in turn, each on the one stream, round after round."""

    def __init__(self, rounds, milliseconds):
        streams = cp.cuda.get_current_stream().ptr, torch.cuda.current_stream().cuda_stream
        if streams[0] != streams[1]:
            raise SystemExit(f"CuPy and torch work on different streams, {streams}")
        self._rounds, self._ms = max(FEWEST_ROUNDS, rounds), milliseconds
        self._hold = cp.RawKernel(HOLD, "hold")
        self._start, self._end = cp.cuda.Event(), cp.cuda.Event()

    def compare(self, sides):
        """ms per call of each round, the sides' paces, and reasons of those that failed, by name.

        Every second round goes through the sides backwards, lest one always follows the same other.
        """
        paces, failed = {}, {}
        for name, side in sides.items():
            try:
                paces[name] = self._pace(side)
            except Exception as error:      # out of memory, say, once there are many calls
                failed[name] = reason(error)
        times = {name: [] for name in paces}
        gc.collect()
        gc.disable()
        try:
            for i in range(self._rounds):
                for name in list(paces)[::-1 if i % 2 else 1]:
                    times[name].append(self._round(sides[name], paces[name]))
        finally:
            gc.enable()
        return times, paces, failed

    def _pace(self, side):
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

    def _round(self, side, pace):
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
        return cp.cuda.get_elapsed_time(self._start, self._end) / calls, host / calls, held

    def _by_host(self, side, calls):
        """ms per call of a library with streams of its own, queued likewise."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for i in range(calls):
            result = side.call(i)
        side.wait(result)
        return 1e3 * (time.perf_counter() - begin) / calls


def _calls(wanted, most):
    return int(min(most, max(1, round(wanted))))


class Monitor:
    """Clock, power and temperature of the GPU, asked of nvidia-smi ten times a second."""

    FIELDS = ("clocks.sm", "power.draw", "temperature.gpu", "driver_version")
    NAMES = ("sm_mhz", "watts", "celsius")

    def __enter__(self):
        self._seen, self.driver = [], None
        number = torch.cuda.get_device_properties(0).uuid
        command = ["nvidia-smi", f"--id=GPU-{number}", f"--query-gpu={','.join(self.FIELDS)}",
                   "--format=csv,noheader,nounits", "--loop-ms=100"]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except FileNotFoundError:
            self._process = None
            return self
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_):
        if self._process:
            self._process.terminate()

    def _read(self):
        for line in self._process.stdout:
            *numbers, driver = (word.strip() for word in line.split(","))
            try:
                self._seen.append((time.perf_counter(), *map(float, numbers)))
            except ValueError:          # "[N/A]", or words about what is wrong
                continue
            self.driver = driver

    def since(self, start):
        """[lowest, median, highest] of each since `start`; None where nothing was seen."""
        rows = [row[1:] for row in self._seen if row[0] >= start]
        return {name: [min(column), median(column), max(column)]
                for name, column in zip(self.NAMES, zip(*rows, strict=True), strict=False)} or None

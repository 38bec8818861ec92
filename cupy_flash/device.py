"""Where a problem runs: the facts about a device that a plan depends on."""

import os
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Device:
    """A device as the planner sees it.

    Attributes
    ----------
    kind : str
        ``"cpu"``.
    threads : int
        Threads that share the work: ``$NUMBA_NUM_THREADS`` if set, otherwise the processors that
        this process may use.
    """

    kind: str
    threads: int

    def __str__(self):
        return f"{self.kind}, {self.threads} thread{'s' if self.threads != 1 else ''}"


@cache
def cpu():
    """The CPU of this process."""
    wanted = os.environ.get("NUMBA_NUM_THREADS")
    if wanted:
        return Device("cpu", max(1, int(wanted)))
    if hasattr(os, "sched_getaffinity"):
        return Device("cpu", len(os.sched_getaffinity(0)))
    return Device("cpu", os.cpu_count() or 1)

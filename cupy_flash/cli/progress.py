"""A progress bar for whatever takes more than two seconds."""

import sys
import time

_WIDTH = 30


class Progress:
    """A bar on stderr; silent for short work and wherever nobody watches.

    Nothing is written before `delay` seconds have passed, nor at all when the stream is no
    terminal: log files and pipes stay clean. Leaving the `with` block wipes the bar.

    Parameters
    ----------
    total : int
        How many steps the work has.
    label : str
        What is being done, shown before the bar.
    stream : file object, optional
        Where to write; `sys.stderr` without it.
    delay : float, optional
        Seconds of silence at the start.

    Examples
    --------
    >>> with Progress(len(cases), "checking") as progress:
    ...     for case in cases:
    ...         check(case)
    ...         progress.step()
    """

    def __init__(self, total, label, *, stream=None, delay=2.0):
        self._stream = sys.stderr if stream is None else stream
        self._total, self._label, self._delay = total, label, delay
        self._done, self._shown, self._start = 0, False, time.monotonic()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._shown:
            self._stream.write("\r\033[K")
            self._stream.flush()

    def step(self):
        """Count one more step as done, and redraw."""
        self._done += 1
        if self._stream.isatty() and time.monotonic() - self._start >= self._delay:
            filled = _WIDTH * self._done // max(self._total, 1)
            bar = "#" * filled + "." * (_WIDTH - filled)
            self._stream.write(f"\r\033[K{self._label} [{bar}] {self._done}/{self._total}")
            self._stream.flush()
            self._shown = True

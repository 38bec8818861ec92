"""A progress bar for whatever takes more than two seconds."""

import sys
import threading
import time

from cupy_flash import console

_WIDTH = 30


class Progress:
    """A bar on stderr; silent for short work and wherever nobody watches.

    Nothing is written before `delay` seconds have passed, nor at all when the stream is no
    terminal: log files and pipes stay clean. The bar appears even while the first step takes its
    time. Leaving the `with` block wipes it.

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
        self._done, self._start = 0, time.monotonic()
        self._watched = _is_terminal(self._stream)
        self._over, self._lock = threading.Event(), threading.Lock()

    def __enter__(self):
        if self._watched:
            threading.Thread(target=self._appear, daemon=True).start()
        return self

    def __exit__(self, *_):
        with self._lock:
            self._over.set()
            console.wipe()

    def step(self):
        """Count one more step as done, and redraw."""
        self._done += 1
        if self._watched and time.monotonic() - self._start >= self._delay:
            self._draw()

    def print(self, text):
        """Print a line of results to standard output, above the bar."""
        with console.above_bar():
            print(text, flush=True)

    def _appear(self):
        """Draw the bar once the silence is over."""
        if not self._over.wait(self._delay):
            self._draw()

    def _draw(self):
        """Draw the bar as it is now, unless the work is over."""
        filled = _WIDTH * self._done // max(self._total, 1)
        bar = "#" * filled + "." * (_WIDTH - filled)
        with self._lock:
            if not self._over.is_set():
                console.draw(self._stream, f"{self._label} [{bar}] {self._done}/{self._total}")


def _is_terminal(stream):
    """Whether somebody watches; a stream may be None or closed."""
    try:
        return stream.isatty()
    except (AttributeError, OSError, ValueError):
        return False

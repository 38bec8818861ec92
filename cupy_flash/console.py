"""What is said on standard error: lines, and at most one progress bar below them.

A notice is never worth a failed call: where standard error is closed, full or not there at all, it
is dropped, and it never goes to standard output, which belongs to the caller's results.
"""

import os
import sys
import threading
import warnings
from contextlib import contextmanager
from functools import cache

_WIPE = "\r\033[K"
_lock = threading.RLock()
_bar = None                 # (stream, text) of the bar that is drawn now


def say(text):
    """Write a line to standard error, above the bar if one is drawn."""
    with above_bar():
        _write(sys.stderr, text + "\n")


def draw(stream, text):
    """Draw the bar `text`, without a newline, in the place of the one there is."""
    global _bar
    with _lock:
        _write(stream, _WIPE + text)
        _bar = stream, text


def wipe():
    """Take the bar away."""
    global _bar
    with _lock:
        if _bar is not None:
            _write(_bar[0], _WIPE)
        _bar = None


@cache
def warn_once(message):
    """Give a RuntimeWarning, the first time that this process has the message."""
    try:
        with above_bar():
            warnings.warn(message, RuntimeWarning, stacklevel=3)
    except Warning:         # which is what the caller asked for: `python -W error`
        raise
    except Exception:       # of standard error
        pass


@contextmanager
def above_bar():
    """A context without the bar, for whatever is to be written; the bar is back behind it."""
    with _lock:
        bar = _bar
        wipe()
        try:
            yield
        finally:
            if bar is not None:
                draw(*bar)


def _write(stream, text):
    """Write and flush. A stream may be None, closed, full, or of a library that raises anything."""
    try:
        stream.write(text)
        stream.flush()
    except Exception:
        pass


def _forget():
    """A forked child has none of the threads that may hold the lock, and no bar of its own."""
    global _lock, _bar
    _lock, _bar = threading.RLock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

"""The threads of the CPU path: safe for forks, signals, Dask and eight callers at once.

Numba's own threading layers abort the process when two threads enter them, or break forked
children. A `concurrent.futures` pool takes locks, on which a signal handler that computes would
wait for the call it interrupted, and refuses to work while the interpreter ends.

There is nothing to wait for here: a caller invites idle threads and begins. Who comes, helps; an
invitation that nobody takes up, because no thread could be started, all are busy or the interpreter
ends, costs speed alone. What happens in between is said in `team`.
"""

import os
from _thread import start_new_thread
from queue import SimpleQueue
from threading import get_ident, main_thread
from time import monotonic, sleep

from .team import CANCEL, GATE, INSIDE, LINE, OPEN, close, raise_kept, shared_words

_PATIENCE = 60      # seconds that a thread waits for a caller whose kernel is still compiled
_invitations = SimpleQueue()
_threads = []       # one entry for each: a list, because `append` needs no lock


def run(kernel, params, slabs, arrays):
    """The kernel once per slab; the workers, the caller among them, take tasks from one counter.

    Whichever way the call is left, no thread computes any more. Threads hold `arrays`, all that the
    addresses in `params` point to.
    """
    shared = shared_words(len(slabs), get_ident() == main_thread().ident)
    call = [(kernel, params, slabs, shared, arrays)]
    try:
        _invite(call, len(slabs) - 1)
        kernel(params, slabs[0], shared, 0)
        raise_kept(shared)
        if len(call) > 1:
            raise call[1]
    except BaseException:
        close(shared)
        raise
    finally:
        call.clear()


def _invite(call, helpers):
    """Ask for so many helpers, or as many as there are threads."""
    try:
        while len(_threads) < helpers:
            # Two callers at once may start one too many: no harm. Python's `Thread.start` would
            # wait for the new thread, which while the interpreter ends never comes.
            start_new_thread(_work, (_invitations,))
            _threads.append(None)
    except RuntimeError:
        pass        # no thread is to be had: fewer work
    for worker in range(1, 1 + min(helpers, len(_threads))):
        _invitations.put((call, worker))


def _work(invitations):
    """A thread: takes up invitations for ever."""
    while True:
        _help(*invitations.get())


def _help(call, worker):
    """Be that worker of a call, unless it is over."""
    try:
        kernel, params, slabs, shared, _arrays = call[0]
    except IndexError:
        return
    try:
        if _opened(call, shared):
            kernel(params, slabs[worker], shared, worker)
    except BaseException as error:      # out of memory: the caller raises it
        call.append(error)
        shared[CANCEL] = 1
        shared[INSIDE + LINE * worker] = 0


def _opened(call, shared):
    """Wait until the caller is in its kernel, compiled by then; False if it will not come."""
    pause, start = 1e-5, monotonic()
    while call and not shared[GATE] and monotonic() - start < _PATIENCE:
        sleep(pause)
        pause = min(2 * pause, 1e-2)
    return shared[GATE] == OPEN


def _forget_threads():
    """A forked child has none of its parent's threads."""
    global _invitations
    _invitations = SimpleQueue()
    _threads.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)

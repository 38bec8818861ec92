"""The threads of the CPU path in trouble: interrupts, no threads, the interpreter's end."""

import functools
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from numba import njit

from cupy_flash.backends.cpu import cache, pool, team

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from bench import interrupts  # noqa: E402

SHARED_CACHE = cache.cache_folder().parents[1]      # kernels that other tests compiled

# A problem for which all threads are called, in forward and backward.
PRELUDE = """
    import dataclasses, itertools, os, signal, sys, threading, time
    import numpy as np
    import cupy_flash as cf
    from cupy_flash import device
    x = np.random.default_rng(0).standard_normal((1, 3, 400, 64), dtype=np.float32)

    cpu = device.cpu()

    def use(threads):
        # No function of this program: at its end one would go when `device` does, with the globals.
        device.cpu = itertools.repeat(dataclasses.replace(cpu, threads=threads)).__next__

    def bits():
        out, pullback = cf.attention_vjp(x, x, x)
        return b"".join(a.tobytes() for a in (out, *pullback(out)[:3]))
"""


def run_python(*pieces):
    """Standard output of a fresh interpreter that runs `PRELUDE` and these pieces of code."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(SHARED_CACHE)}
    code = "\n".join(map(textwrap.dedent, (PRELUDE, *pieces)))
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True,
                          timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr, done.stderr
    return done.stdout


def test_interrupted_calls_write_nothing_afterwards():
    """A sample of what `python -m bench interrupts` does a thousand times."""
    totals = interrupts.survey(42, batch=14)
    assert totals["raised"] >= 30
    assert (totals["changed"], totals["died"]) == (0, 0)


LONG = """
    sizes = {"forward": (30000, 30000, 64), "backward": (30000, 30000, 64), "row": (1, 2**24, 1)}
    signal.signal(signal.SIGALRM, signal.default_int_handler)       # as Ctrl-C
    for name, (Nq, Nk, d) in sizes.items():
        q, k = np.ones((Nq, d), np.float32), np.ones((Nk, d), np.float32)
        call = ((lambda: cf.attention_backward(q, q, k, k, q, q[:, 0].copy()))
                if name == "backward" else lambda: cf.attention(q, k, k))
        small = np.ones((8, d), np.float32)                         # compiled before it is timed
        cf.attention(small, small, small)
        cf.attention_backward(small, small, small, small, small, small[:, 0].copy())
        for threads in (1, 2):
            use(threads)
            start = time.perf_counter()
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            try:
                call()
                print("finished")
            except KeyboardInterrupt:
                late = time.perf_counter() - start - 0.2
                print(f"{late:.3f}")
"""


def test_an_interrupt_is_noticed_in_the_middle_of_a_task():
    """Within 0.2 s; with room for a busy machine. The whole calls take many seconds."""
    late = run_python(LONG).split()
    assert len(late) == 6
    assert all(word == "finished" or float(word) < 1 for word in late), late
    assert "finished" not in late[:4]


def test_a_signal_handler_may_compute():
    run_python("""
        use(3)
        want, found = bits(), []
        signal.signal(signal.SIGALRM, lambda *_: found.append(bits()))
        big = np.ones((12000, 64), np.float32)
        while not found:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            cf.attention(big, big, big)
        assert found == [want]
    """)


def test_threads_that_cannot_be_started_cost_no_result():
    """Each of the seven is refused in turn, with all that follow; and each alone."""
    run_python("""
        import _thread
        want, real = bits(), _thread.start_new_thread
        from cupy_flash.backends.cpu import pool
        pool._threads.clear()

        def attempt(position, only):
            asked = 0
            def start(*arguments):
                nonlocal asked
                asked += 1
                if asked == position or asked > position and not only:
                    raise RuntimeError("can't start new thread")
                return real(*arguments)
            pool.start_new_thread = start
            use(8)
            assert bits() == want and bits() == want

        for position in range(1, 8):
            for only in (False, True):
                child = os.fork()
                if not child:
                    try:
                        attempt(position, only)
                        os._exit(0)
                    finally:
                        os._exit(1)
                assert os.waitpid(child, 0)[1] == 0, (position, only)
    """)


ENDS = {
    "atexit": "import atexit; atexit.register(call)",
    "del": """
        class Last:
            def __del__(self, call=call):
                call()
        last = Last()
    """,
    "a thread that outlives the main one": """
        def late():
            threading.main_thread().join()
            call()
        threading.Thread(target=late).start()
    """,
}


# When Python gets to `__del__`, it imports nothing any more: a library used then for the first time
# cannot load Numba.
@pytest.mark.parametrize(("end", "used"), [
    (end, used) for end in ENDS for used in (True, False) if used or end != "del"])
def test_calls_at_the_end_of_the_interpreter(end, used):
    output = run_python("""
        import hashlib
        def call(print=print, hash=hashlib.sha256):
            print(hash(bits()).hexdigest(), flush=True)
        use(4)
    """, "call()" if used else "", ENDS[end])
    assert len(output.split()) == 1 + used
    assert set(output.split()) == {digest()}


@functools.cache
def digest():
    """That of the results, computed in peace."""
    return run_python("import hashlib; print(hashlib.sha256(bits()).hexdigest())").strip()


@pytest.fixture
def threads(monkeypatch):
    """A pool of its own."""
    monkeypatch.setattr(pool, "_threads", [])
    monkeypatch.setattr(pool, "_invitations", SimpleQueue())


def test_what_a_helper_raises_reaches_the_caller(threads):
    """Memory may run out in any of the workers."""
    def kernel(params, slab, shared, worker):
        if worker:
            shared[team.INSIDE + team.LINE * worker] = 1
            raise MemoryError
        shared[team.GATE] = team.OPEN
        while not shared[team.CANCEL]:
            time.sleep(0.001)

    with pytest.raises(MemoryError):
        pool.run(kernel, None, [None] * 3, ())


def test_a_caller_that_fails_waits_for_its_helpers(threads):
    inside = []

    def kernel(params, slab, shared, worker):
        if worker:
            shared[team.INSIDE + team.LINE * worker] = 1
            inside.append(True)
            while not shared[team.CANCEL]:
                time.sleep(0.001)
            time.sleep(0.05)
            inside.pop()
            shared[team.INSIDE + team.LINE * worker] = 0
            return
        shared[team.GATE] = team.OPEN
        while not inside:
            time.sleep(0.001)
        raise MemoryError

    with pytest.raises(MemoryError):
        pool.run(kernel, None, [None] * 2, ())
    assert inside == []


@njit(nogil=True)
def slow(params, slab, shared, worker):
    """The caller goes as soon as the helper has come; that one is done some 50 ms later."""
    if not team.enter(shared, worker):
        return
    if worker == 0:
        while team.read(shared, team.INSIDE + team.LINE) == 0:
            team.nap()
    else:
        for _ in range(700):
            team.nap()
        params[0] = 1
    team.leave(shared, worker)


def test_a_call_ends_when_all_helpers_are_done(threads):
    params = np.zeros(1)
    pool.run(slow, params, [params, params], ())
    assert params[0] == 1


def test_nobody_comes_after_the_caller_has_gone(threads, monkeypatch):
    """An invitation that is taken up too late; it holds no array of the call."""
    came = []

    def kernel(params, slab, shared, worker):
        came.append(worker)
        shared[team.GATE] = team.OPEN

    late = SimpleQueue()
    monkeypatch.setattr(pool, "start_new_thread", lambda *_: None)
    monkeypatch.setattr(pool, "_invitations", late)
    pool.run(kernel, None, [None] * 2, (np.zeros(3),))
    call, worker = late.get()
    assert call == []
    pool._help(call, worker)
    assert came == [0]

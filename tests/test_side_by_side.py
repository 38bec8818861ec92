"""Kernels are compiled in several threads, or one after another where there are no threads."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cupy_flash.backends.cuda.side_by_side import side_by_side

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("count", range(4))
def test_results_come_in_order(count):
    assert side_by_side(divmod, [(n, 3) for n in range(count)]) == [divmod(n, 3)
                                                                    for n in range(count)]


def test_calls_run_at_once():
    barrier = threading.Barrier(4, timeout=30)
    assert side_by_side(lambda n: (barrier.wait(), n)[1], [(n,) for n in range(4)]) == [0, 1, 2, 3]


def slow_square(n):
    """So slow that a thread is not idle again when the next is asked for."""
    time.sleep(0.1)
    return n * n


@pytest.mark.parametrize("refused", range(1, 4))
def test_threads_that_cannot_be_started(monkeypatch, refused):
    start, asked = threading.Thread.start, []

    def reluctant(self):
        asked.append(self)
        if len(asked) >= refused:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", reluctant)
    assert side_by_side(slow_square, [(n,) for n in range(4)]) == [0, 1, 4, 9]
    assert len(asked) >= refused


def test_an_error_of_the_function_is_raised():
    def fail(n):
        if n == 2:
            raise RuntimeError("does not compile")
        return n

    with pytest.raises(RuntimeError, match="does not compile"):
        side_by_side(fail, [(0,), (1,), (2,)])


@pytest.mark.parametrize("imported", ["", "import concurrent.futures.thread"])
@pytest.mark.parametrize("end", [
    "import atexit; atexit.register(call)",
    "class Last:\n    def __del__(self, call=call): call()\nlast = Last()",
    "threading.Thread(target=lambda: (threading.main_thread().join(), call())).start()",
], ids=["atexit", "del", "thread"])
def test_the_end_of_the_interpreter(end, imported):
    code = f"""
import threading
from cupy_flash.backends.cuda.side_by_side import side_by_side
{imported}
def call(side_by_side=side_by_side, print=print):
    print(side_by_side(pow, [(2, 3), (3, 2), (5, 1)]), flush=True)
{end}
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[8, 9, 5]\n", "")

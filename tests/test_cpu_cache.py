"""The files in which compiled CPU kernels are kept: damaged ones, and processes that need one."""

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numba.core.errors import TypingError

from cupy_flash.backends.cpu import cache, jit

ROOT = Path(__file__).parents[1]


def double(x):
    for i in range(x.size):
        x[i] *= 2


def call(dtype=np.float64):
    """Compute with a small kernel, as a process does that has compiled nothing yet."""
    x = np.ones(3, dtype)
    jit.kernel(double)(x)
    assert np.all(x == 2)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of kernels of this test."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    cache.warn_once.cache_clear()
    return cache.cache_folder()


def files(folder):
    """The files of kernels, whatever lies beside them."""
    return [path for path in sorted(folder.iterdir()) if path.suffix != ".lock"]


def test_the_first_call_says_that_it_compiles_and_the_next_process_does_not(folder, capsys):
    call()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "compiling the CPU kernel double for float64" in said
    assert python("call()", folder).communicate() == ("", "")


def test_a_folder_that_cannot_be_written_costs_a_warning_and_no_result(tmp_path, monkeypatch):
    blocked = tmp_path / "file"         # where the folder should be: this stops root as well
    blocked.write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(blocked))
    with pytest.warns(RuntimeWarning, match="cannot write compiled kernels") as warned:
        call()
        call(np.float32)
    assert len(warned) == 1 and "Set NUMBA_CACHE_DIR" in str(warned[0].message)


def zeros(path, start, end):
    """Zeros from `start` to `end`, as parts of the file."""
    data = bytearray(path.read_bytes())
    start, end = (int(len(data) * part) for part in (start, end))
    data[start:end] = bytes(end - start)
    path.write_bytes(data)


def replace_by_folder(path):
    path.unlink()
    path.mkdir()
    (path / "not ours").write_text("")


DAMAGES = {
    "half of it": lambda path: path.write_bytes(path.read_bytes()[:path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "zeros": lambda path: zeros(path, 0, 1),
    "zeros in machine code": lambda path: zeros(path, 0.5, 0.6),
    "zeros at the end": lambda path: zeros(path, 0.9, 1),
    "something else pickled": lambda path: path.write_bytes(b"\x80\x04]\x94."),
    "a folder": replace_by_folder,
    "a link to nowhere": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_a_miss_with_one_warning(damage, folder, capsys):
    call()
    call(np.float32)
    for path in files(folder):
        damage(path)
    with pytest.warns(RuntimeWarning, match="is damaged; it is compiled anew") as warned:
        call()
        call(np.float32)
    assert len(warned) == 1
    assert capsys.readouterr().err.count("compiling the CPU kernel double") == 4
    call()                                          # with what is there now, and without a word
    call(np.float32)
    assert capsys.readouterr().err == ""


def test_a_file_that_cannot_be_read_is_a_miss(folder, monkeypatch, capsys):
    """As with the permissions of somebody else; whoever runs this may be allowed to read all."""
    call()
    read, discard, refused = Path.read_bytes, cache._discard, files(folder)

    def read_bytes(path):
        if path in refused:
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    monkeypatch.setattr(cache, "_discard", lambda path: (discard(path), refused.clear()))
    with pytest.warns(RuntimeWarning, match="is damaged"):
        call()
    capsys.readouterr()
    call()
    assert capsys.readouterr().err == "" and not refused


def test_what_numba_cannot_read_is_a_miss(folder, monkeypatch, capsys):
    """A content that is as it was written, but of another kind."""
    call()
    (path,) = files(folder)
    content = b"\x80\x04]\x94."                     # an empty list
    path.write_bytes(cache._DIGEST(content).digest() + content)
    with pytest.warns(RuntimeWarning, match="is damaged"):
        call()
    call()
    assert capsys.readouterr().err.count("compiling") == 2


def test_a_warning_that_is_an_error_leaves_nothing_damaged(folder, recwarn):
    call()
    (path,) = files(folder)
    path.write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="is damaged"):
            call()
    call()
    assert not recwarn


def test_kernels_in_a_folder_that_cannot_be_written_are_used(folder, monkeypatch, capsys):
    """As in an image that somebody has warmed up."""
    call()
    capsys.readouterr()

    def refuse(*_, **__):
        raise PermissionError(30, "Read-only file system")

    for owner, name in ((Path, "mkdir"), (Path, "write_bytes"), (os, "open")):
        monkeypatch.setattr(owner, name, refuse)
    call()
    assert capsys.readouterr().err == ""
    with pytest.warns(RuntimeWarning, match="cannot write compiled kernels"):
        call(np.float32)


def python(code, folder, **options):
    """A process that has imported Numba and this file."""
    code = "from test_cpu_cache import *\n" + textwrap.dedent(code)
    env = {**os.environ, "NUMBA_CACHE_DIR": str(folder.parents[1]),
           "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    return subprocess.Popen([sys.executable, "-c", code], env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


# Children that have imported Numba need a kernel at the same moment.
TOGETHER = """
    import multiprocessing
    def child(barrier):
        barrier.wait()
        call()
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(4)
    children = [fork.Process(target=child, args=(barrier,)) for _ in range(4)]
    for one in children: one.start()
    for one in children: one.join()
    assert not any(one.exitcode for one in children)
"""


def test_four_processes_compile_once(folder):
    said = python(TOGETHER, folder).communicate()[1]
    assert said.count("compiling the CPU kernel double") == 1, said
    assert said.count("waiting for another process, which compiles the CPU kernel double") <= 3
    assert len(files(folder)) == 1


def refuse(*_):
    """`flock` on a file system that knows no locks."""
    raise OSError(37, "No locks available")


@pytest.mark.parametrize("flock", [None, refuse], ids=["system", "file system"])
def test_where_there_are_no_locks_each_process_compiles(flock, folder, monkeypatch, capsys):
    monkeypatch.setattr(cache, "fcntl", flock and SimpleNamespace(
        LOCK_EX=2, LOCK_NB=4, LOCK_UN=8, flock=flock))
    call()
    call()
    assert capsys.readouterr().err.count("compiling") == 1 and len(files(folder)) == 1


@pytest.fixture
def holder(folder):
    """A process that holds the lock of the kernel, as one that compiles does."""
    call()
    (path,) = files(folder)
    kernel = path.read_bytes()
    path.unlink()
    process = python(f"""
        import fcntl, time
        lock = open({str(path.with_suffix(".lock"))!r}, "w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        print("held", flush=True)
        time.sleep(60)
    """, folder)
    assert process.stdout.readline() == "held\n"
    process.finish = lambda: path.write_bytes(kernel)
    yield process
    process.kill()
    process.communicate()


def test_the_lock_of_a_killed_process_is_free(folder, holder, monkeypatch, capsys):
    def kill(seconds):
        holder.send_signal(signal.SIGKILL)
        holder.wait()

    monkeypatch.setattr(cache.time, "sleep", kill)
    capsys.readouterr()
    call()
    waiting, compiling = capsys.readouterr().err.splitlines()
    assert "waiting for another process" in waiting and "compiling" in compiling


def test_a_stopped_process_is_not_waited_for_for_ever(folder, holder, monkeypatch, capsys):
    monkeypatch.setattr(cache, "_TIMEOUT", 0.2)
    capsys.readouterr()
    call()
    assert "compiling" in capsys.readouterr().err


def test_waiting_ends_when_the_kernel_is_there(holder, monkeypatch, capsys):
    """Whoever waits does not queue for the lock then."""
    monkeypatch.setattr(cache.time, "sleep", lambda seconds: holder.finish())
    capsys.readouterr()
    call()
    assert "compiling" not in capsys.readouterr().err and holder.poll() is None


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")   # a fork is what is tested
def test_a_forked_child_does_not_hold_the_lock_on(folder, holder):
    """It has a copy of the descriptor, and may live longer than whoever compiles."""
    with cache._locked(folder / "another.kernel", ""):
        child = os.fork()
        if child == 0:
            os._exit(len(cache._held))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(cache._held) == 1
    assert not cache._held


def test_a_compilation_that_fails_gives_the_lock_back(folder):
    """As one does that Ctrl-C ends."""
    def nothing(x):
        return x.nothing

    for _ in range(2):
        with pytest.raises(TypingError, match="nothing"):
            jit.kernel(nothing)(np.ones(3))
        (lock,) = folder.glob("*.lock")
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

"""Compiled kernels on disk: a file each, which one process makes while the others wait for it.

Numba has a cache of its own. It believes whatever lies in its files, its index loses an entry or
confuses two when processes save at once, and nobody waits for a compilation that is under way.
"""

import functools
import hashlib
import os
import pickle
import sys
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

import llvmlite
import numba
from numba.core import caching
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from ... import device
from ...console import say, warn_once
from ...plan.cpu import micro_kernel

try:
    import fcntl
except ImportError:         # Windows: processes do not wait for each other there
    fcntl = None

SOURCES = Path(__file__).parent
SIZES = SOURCES.parents[1] / "plan" / "cpu.py"      # of what planner and kernels must agree on

# Seconds to wait for a process that compiles, which may have been stopped (Ctrl-Z) for good. All
# kernels for a type take half a minute, on a busy machine some minutes.
_TIMEOUT = 600.0
_POLL = 0.05
_DIGEST = hashlib.sha256

_mutex = threading.RLock()      # threads of this process that want to compile
_held = set()                   # descriptors of lock files


@functools.cache
def source_digest():
    """Digest of all files that the kernels are made of, 16 hexadecimal digits."""
    digest = _DIGEST()
    for path in (*sorted(SOURCES.glob("*.py")), SIZES):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder():
    """Where compiled kernels are kept; None where no home folder is known either."""
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    if not base:
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    return Path(base) / "cupy_flash" / source_digest()


class KernelCache(caching.NullCache):
    """The compiled forms of one kernel, as a Numba dispatcher asks for them.

    The folder's name covers all sources, a file's name what else the machine code depends on. A
    file is the digest of its content and the content: what is cut off, or was never written to the
    disk before the power failed, is no kernel, and is replaced.
    """

    def __init__(self, name):
        self._name = name

    @contextmanager
    def exclusive(self, signature, context):
        """A context in which this thread may compile: no other does, here or elsewhere."""
        with _mutex:
            path = self._path(signature, context)
            if path is None or _content(path) is not None:
                yield
            else:
                with _locked(path, _description(self._name, signature)):
                    yield

    def load_overload(self, sig, target_context):
        """The compiled kernel of a signature, or None after a notice that it will be compiled."""
        target_context.refresh()
        path = self._path(sig, target_context)
        try:
            content = None if path is None else _content(path)
            if content is not None:
                return CompileResult._rebuild(target_context, *pickle.loads(content))
            damaged = path is not None and os.path.lexists(path)
        except Exception:       # whatever pickle and LLVM make of what they do not understand
            damaged = True
        if damaged:
            _discard(path)
        say(f"cupy_flash: compiling {_description(self._name, sig)} (some seconds, once per "
            "machine)")
        return None

    def save_overload(self, sig, data):
        """Keep a compiled kernel, if there is a place for it."""
        path = self._path(sig, data.target_context)
        if path is None:
            warn_once("cupy_flash: compiled kernels are not kept, as no home folder is known; "
                      "every process compiles anew. Set NUMBA_CACHE_DIR or XDG_CACHE_HOME to a "
                      "folder that can be written to.")
            return
        content = dumps(data._reduce())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, _DIGEST(content).digest() + content)
        except OSError as error:
            warn_once(f"cupy_flash: cannot write compiled kernels to {path.parent} ({error}); "
                      "every process compiles anew. Set NUMBA_CACHE_DIR to a folder that can be "
                      "written to.")

    def _path(self, signature, context):
        """The file of a compiled kernel."""
        folder = cache_folder()
        if folder is None:
            return None
        key = (signature, context.codegen().magic_tuple(), micro_kernel(device.cpu()),
               numba.__version__, llvmlite.__version__, sys.implementation.cache_tag)
        return folder / f"{self._name}-{_DIGEST(repr(key).encode()).hexdigest()[:32]}.kernel"


def _description(name, signature):
    """What is compiled, in words."""
    bits = next((t.dtype.bitwidth for t in signature
                 if getattr(t, "dtype", None) in numba.types.real_domain), "")
    return f"the CPU kernel {name} for float{bits} arithmetic"


def _content(path):
    """What was kept in a file, None if it is not there or not as it was written."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    size = _DIGEST().digest_size
    content = data[size:]
    return content if data[:size] == _DIGEST(content).digest() else None


def _discard(path):
    """Take away what is damaged. It may be a folder, and no kernel of ours: that is kept."""
    try:
        path.unlink()
    except OSError:
        with suppress(OSError):
            path.rename(path.with_name(f"{path.name}.{uuid.uuid4().hex}.damaged"))
    warn_once(f"cupy_flash: a compiled kernel in {path.parent} is damaged; it is compiled anew and "
              "replaced.")


def _write(path, data):
    """Write a file so that others see all of it or nothing."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


@contextmanager
def _locked(path, description):
    """Hold the lock of a kernel's file, until it is there; where there are no locks, nothing."""
    descriptor = _open_lock(path.with_suffix(".lock"))
    try:
        if descriptor is not None:
            _wait(descriptor, path, description)
        yield
    finally:
        if descriptor is not None:
            _held.discard(descriptor)
            # Not by closing alone: a forked child may have a copy of the descriptor.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _open_lock(path):
    """A descriptor of a lock file, or None. The kernel of the system unlocks for whoever dies."""
    if fcntl is None:
        return None
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    # To write, as NFS asks for; the file of another user may perhaps be read only.
    for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):
        with suppress(OSError):
            descriptor = os.open(path, flags, 0o666)
            _held.add(descriptor)
            return descriptor
    return None


def _wait(descriptor, path, description):
    """Wait until the lock is ours, the file is there, or it takes too long."""
    end, said = time.monotonic() + _TIMEOUT, False
    while time.monotonic() < end:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        except OSError:         # a file system without locks
            return
        if not said:
            say(f"cupy_flash: waiting for another process, which compiles {description}")
            said = True
        time.sleep(_POLL)
        if _content(path) is not None:
            return


def _forget():
    """A forked child has none of its parent's threads, and must not hold its locks on."""
    global _mutex
    _mutex = threading.RLock()
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

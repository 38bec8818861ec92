"""Finds the CUDA sources and names their state by a digest, of all or of one kernel's."""

import posixpath
import re
from functools import cache
from hashlib import sha256
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]
_SUFFIXES = (".cu", ".cuh")


@cache
def folder() -> Path:
    """Return the folder of the CUDA sources.

    A wheel carries it inside the package; an editable install and a bare checkout have it beside
    the package. A path is looked up, not a package resource: resources of a mapped folder are not
    found in editable installs.

    Returns
    -------
    pathlib.Path
        The first of ``cupy_flash/cuda_src`` and ``cupy_flash/../cuda_src`` that holds ``base.cuh``.

    Raises
    ------
    FileNotFoundError
        When neither does, which means that the installation is incomplete.
    """
    candidates = (_PACKAGE / "cuda_src", _PACKAGE.parent / "cuda_src")
    for candidate in candidates:
        if (candidate / "base.cuh").is_file():
            return candidate
    raise FileNotFoundError(
        "the CUDA sources of cupy_flash are missing: there is no base.cuh in "
        + " or ".join(map(str, candidates))
        + "; install the package again"
    )


@cache
def names() -> tuple[str, ...]:
    """Return the source files, sorted, as paths relative to `folder` with forward slashes."""
    root = folder()
    found = (path for path in root.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    return tuple(sorted(path.relative_to(root).as_posix() for path in found))


@cache
def included(header: str) -> tuple[str, ...]:
    """Return the header and all that it includes, directly or not, sorted, named as in `names`.

    Raises
    ------
    FileNotFoundError
        A file that is included is missing.
    """
    found, waiting = set(), [header]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _includes(name)
    return tuple(sorted(found))


def _includes(name):
    """What one file includes: beside it, as the compiler looks first, or from the folder."""
    text = (folder() / name).read_text(encoding="utf-8")
    for other in re.findall(r'^ *# *include *"(.+?)"', text, re.MULTILINE):
        beside = posixpath.normpath(posixpath.join(posixpath.dirname(name), other))
        yield beside if (folder() / beside).is_file() else other


@cache
def digest(*headers: str) -> str:
    """Return the SHA-256 over the names and the code of sources, in hexadecimal.

    Comments and blank lines do not count, for they change no kernel. CuPy's kernel cache does not
    look into included files: without this digest in the compiled text, an edited header would go
    on running as the old kernel. The result is cached, so the sources count as fixed for the life
    of the process.

    Parameters
    ----------
    *headers : str
        The sources are these and what they include; without any, all sources.
    """
    total = sha256()
    for name in sorted({x for header in headers for x in included(header)}) or names():
        content = _code((folder() / name).read_text(encoding="utf-8")).encode()
        # The length keeps a byte moved from one file's end to the next one's start visible.
        total.update(f"{name}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()


def _code(text):
    """Lines without comments; blank ones are left out. No string has two slashes in it."""
    lines = (line.partition("//")[0].rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)

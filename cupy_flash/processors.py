"""How many processors this process may use, and how wide their vectors are."""

import os
import re
from math import ceil
from pathlib import Path, PurePosixPath

_VARIABLE = "NUMBA_NUM_THREADS"


def threads(root="/"):
    """Threads that are to share the work of this process.

    Parameters
    ----------
    root : path
        Where ``proc`` and the cgroups' mount points are.

    Returns
    -------
    int
        ``$NUMBA_NUM_THREADS`` if Numba understands it. Otherwise the processors of the process's
        affinity, at most as many as the CPU quota of its cgroups pays for, rounded up.

    Raises
    ------
    ValueError
        ``$NUMBA_NUM_THREADS`` is a whole number below 1, which Numba refuses as well.

    Examples
    --------
    >>> from cupy_flash import processors
    >>> processors.threads() >= 1
    True
    """
    return _wanted() or min(_usable(), quota(root) or _usable())


def vector_bits():
    """Bits of the widest vector registers in the code that Numba makes: 128, 256 or 512.

    ``$NUMBA_CPU_FEATURES`` counts, as for Numba. Processors without AVX have 128.
    """
    from numba.core.registry import cpu_target  # only now: it takes half a second

    *_, features = cpu_target.target_context.codegen().magic_tuple()
    features = features.split(",")
    return 512 if "+avx512f" in features else 256 if "+avx2" in features else 128


def quota(root="/"):
    """Processors that the CPU quotas of this process's cgroups pay for, None without a quota."""
    limits = [limit for folder in _cgroups(Path(root)) if (limit := _limit(folder)) is not None]
    return max(1, ceil(min(limits))) if limits else None


def _wanted():
    """`$NUMBA_NUM_THREADS` as Numba reads it: what is no whole number does not count.

    Numba warns of that when it is imported.
    """
    said = os.environ.get(_VARIABLE, "")
    try:
        number = int(said)
    except ValueError:
        return None
    if number < 1:
        raise ValueError(f"the environment variable {_VARIABLE} is {said!r}, expected a whole "
                         "number above 0; or unset it to use all processors")
    return number


def _usable():
    """Processors that the scheduler may give to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cgroups(root):
    """Folders of the cgroups that rule over this process's time: its own and all above."""
    try:
        own = (root / "proc/self/cgroup").read_text()
        mounts = (root / "proc/self/mountinfo").read_text()
    except OSError:
        return
    paths = {}                          # by the type of file system: version 2, and 1 with `cpu`
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif "cpu" in controllers.split(","):
            paths["cgroup"] = path
    for line in mounts.splitlines():
        mount, _, system = line.partition(" - ")
        kind, _, options = (system.split() + [""] * 3)[:3]
        if kind in paths and (kind == "cgroup2" or "cpu" in options.split(",")):
            yield from _upwards(root, paths[kind], *map(_unescaped, mount.split()[3:5]))


def _upwards(root, path, mounted, point):
    """The folder of the cgroup `path`, and those above as far as they are mounted at `point`."""
    inside = PurePosixPath(path)
    # A container may see its own cgroup alone, at the mount point, under the name it has outside.
    inside = inside.relative_to(mounted if inside.is_relative_to(mounted) else "/")
    if ".." in inside.parts:            # above what this namespace shows
        inside = PurePosixPath()
    for part in (inside, *inside.parents):
        yield root / point.lstrip("/") / part


def _unescaped(text):
    """A path of mountinfo, in which a space is written as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _limit(folder):
    """Processors that the quota of one cgroup pays for, None without one."""
    try:
        if (folder / "cpu.max").exists():
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit, period = ((folder / f"cpu.cfs_{name}_us").read_text()
                             for name in ("quota", "period"))
        # "max" and -1: no quota.
        return int(limit) / int(period) if limit != "max" and int(limit) > 0 else None
    except (OSError, ValueError):
        return None

"""Fibers that look for races: accesses to shared memory that nothing orders."""

import ctypes
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

from . import harness

# Other compilers' sanitizers call other functions.
AVAILABLE = harness.COMPILER is not None and Path(harness.COMPILER).name == "g++"


class Race(NamedTuple):
    """Two accesses that nothing orders, of which one is a write.

    `first` and `second` are their places in the sources, ``"file.cuh:line"``, and `functions` the
    functions there; `threads`, `offset` in shared memory and `block` are those of one such pair.
    """

    entry: str
    kind: str
    first: str
    second: str
    same_warp: bool
    offset: int
    threads: tuple
    block: int
    functions: tuple


class Watched(harness.Fibers):
    """Fibers that look for races; `races` has what was found in all launches.

    Parameters
    ----------
    strict : bool
        Shuffles, votes, products and loads of fragments keep the lanes of a warp in step, but order
        none of their accesses.
    **options
        Of `Fibers`.
    """

    def __init__(self, strict=False, **options):
        super().__init__(flags=flags(), **options)
        self.strict = strict
        self.races = []

    def launch(self, launch, packed):
        """One kernel."""
        path = harness.build(launch.entry, launch.config, launch.smem_bytes, self.flags).result()
        with watch(path, launch.entry, self.strict, self.races):
            super().launch(launch, packed)


@cache
def flags():
    """For the compiler. The detector stands for the sanitizer's library, which is left out."""
    detector = harness.build_folder() / "races.o"
    subprocess.run([harness.COMPILER, "-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden",
                    "-DCF_RACES", "-c", str(harness.HERE / "races.cpp"), "-o", str(detector)],
                   check=True)
    return ("-O1", "-g1", "-fsanitize=thread", "-DCF_RACES", "-nodefaultlibs",
            f"-Wl,{detector},-lstdc++,-lm,-lgcc_s,-lc,-ldl")


class watch:
    """Within the context, the runs of a library are looked at; what is found goes to `races`."""

    def __init__(self, path, entry, strict, races):
        self.path, self.entry, self.strict, self.races = path, entry, strict, races
        self.library = harness._load(path)
        self.library.races_found.restype = ctypes.c_char_p

    def __enter__(self):
        self.library.watch_races(int(self.strict))
        return self.library

    def __exit__(self, *error):
        rows = [line.split(";") for line in self.library.races_found().decode().splitlines()]
        places = _places(self.path, sorted({code for row in rows for code in row[6:]}))
        races = {}
        for kind, same_warp, offset, first, second, block, *codes in rows:
            where, functions = zip(*(places[code] for code in codes), strict=True)
            race = Race(self.entry, kind, *where, same_warp == "1", int(offset),
                        (int(first), int(second)), int(block), functions)
            races.setdefault(race[:5], race)        # a line of the sources has several copies
        self.races += races.values()


def _places(path, codes):
    """Line and function of the addresses of a library: in the kernels, otherwise in the twins."""
    if not codes:
        return {}
    command = ["addr2line", "-a", "-C", "-f", "-i", "-e", str(path), *codes]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    places, twins, code = {}, set(), None
    lines = iter(said.splitlines())
    for line in lines:      # an address, then functions and lines in turns, the innermost first
        if line.startswith("0x"):
            code = f"{int(line, 16):x}"
            continue
        file, _, number = next(lines).partition(":")
        in_twin = Path(file).resolve().is_relative_to(harness.HERE.resolve())
        if code not in places or (code in twins and not in_twin):
            places[code] = f"{Path(file).name}:{number.split()[0]}", _bare(line)
            if in_twin:
                twins.add(code)
            else:
                twins.discard(code)
    return places


def _bare(function):
    """The name of a C++ function alone: `void cf::A<B>::f<C>(int) const` -> `f`."""
    inner = None
    while inner != function:
        inner, function = function, re.sub("<[^<>]*>", "", function)
    return function.partition("(")[0].rpartition("::")[2]

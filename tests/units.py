"""Every tile row of the CUDA kernels as units to compile, and the table of what they need.

`tests/resources.json` holds registers, spills and stack of units. To write it anew, after a kernel
or the table of tiles has changed (a GPU is not needed):

    python tests/units.py           # what the tests compile, some minutes
    python tests/units.py --all     # every row on every architecture, an hour of processor time
"""

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import nvrtc  # noqa: E402
from problems import problem_of  # noqa: E402

from cupy_flash.backends.cuda.unit import unit  # noqa: E402
from cupy_flash.device import GpuDevice  # noqa: E402
from cupy_flash.plan import make_plan  # noqa: E402
from cupy_flash.problem import Mask  # noqa: E402

TABLE = Path(__file__).parent / "resources.json"
# KiB of shared memory that a block can have, by compute capability.
SMEM = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
KINDS = (("bfloat16", None), ("float16", None), ("float32", "tf32x3"), ("float32", "tf32"),
         ("float64", None))
# Two kinds of a line share tiles: in a test one of them stands for both.
TWINS = {"float16": "bfloat16", "tf32": "tf32x3"}
# Plain, with all options, and what only a fixed order of sums leads to.
OPTIONS = ({}, {"bias_shape": (1, 1, 1, 1), "softcap": 5.0, "has_mask": True, "has_alibi": True},
           {"deterministic": True})
# A bias by itself for each way in which the fused backward kernel sums its gradient.
SUMS_OF_DBIAS = tuple({"bias_shape": shape}
                      for shape in ((1, 1, 64, 65536), (1, 1, 1, 65536), (1, 1, 64, 1)))
# Head dims (d, d_v), widest first, so that a row is compiled for the widest heads that it serves.
WIDTHS = ((256, 256), (192, 192), (128, 128), (96, 96), (64, 64), (16, 16))
# Heads so narrow that other kernels serve them, with rows of a table for few queries and for many.
NARROW = ((8, 8), (7, 7), (5, 3), (4, 2), (3, 1))
NARROW_KINDS = ("float32", "tf32x3"), ("float64", None)
FEW, MANY = 64, 65536       # queries or keys


class Unit(NamedTuple):
    """A kernel to compile."""

    arch: int
    entry: str
    name: str
    text: str

    @property
    def key(self):
        """Its line in the table."""
        return f"sm_{self.arch} {self.name}"


def device(arch):
    """A GPU of an architecture, as far as the planner looks."""
    return GpuDevice(0, f"a GPU of sm_{arch}", arch, 132, SMEM[arch] * 1024)


def all_units(arch):
    """Each row that the planner can choose on an architecture, options off and on, each kind."""
    return units_of(arch, WIDTHS) | units_of(arch, WIDTHS, True) | units_of(arch, NARROW)


@cache
def units_of(arch, widths, sums_dbias=False):
    """The same for some head dims; of those that sum dbias, kernels with a part in that."""
    found = {}
    kinds, sizes, batch = KINDS, ((FEW, MANY),), 2
    if widths is NARROW:
        kinds, sizes, batch = NARROW_KINDS, ((FEW, MANY), (MANY, MANY)), 1
    for (dtype, precision), (d, d_v), (Nq, Nk), chosen, direction in product(
            kinds, widths, sizes, SUMS_OF_DBIAS if sums_dbias else OPTIONS,
            ("forward", "backward")):
        problem = problem_of(**{
            "batch": batch, "heads_q": 1, "heads_k": 1, "Nq": Nq, "Nk": Nk, "d": d, "d_v": d_v,
            "dtype": dtype, "out_dtype": dtype, "precision": precision, "scale": 1.0,
            "softcap": 0.0, "mask": Mask(), **chosen})
        for launch in make_plan(direction, problem, device(arch)).launches:
            c = launch.config
            if sums_dbias and not dict(c.constants).get("dbias"):
                continue
            row = (launch.entry, c.element, c.precision, c.Br, c.Bc, c.warps, c.options,
                   c.constants)
            if launch.entry.endswith("_simt"):
                row = *row, c.d, c.d_v  # which are not padded
            name, text = unit(launch.entry, c, launch.smem_bytes)
            found.setdefault(row, Unit(arch, launch.entry, name, text))
    return found


def sample():
    """A part of all units that compiles in two minutes: every row once, with options and without.

    The architectures that can have a row take turns, and so do the two kinds that share it; each
    architecture gets each kernel.
    """
    candidates = {}
    for (widths, sums_dbias), arch in product(((WIDTHS, False), (WIDTHS, True), (NARROW, False)),
                                              SMEM):
        for (entry, element, precision, *tile), one in units_of(arch, widths, sums_dbias).items():
            family = TWINS.get(precision or element, precision or element)
            candidates.setdefault((entry, family, *tile), []).append(one)
    chosen = [group[i % len(group)] for i, group in enumerate(candidates.values())]
    have = {(one.arch, one.entry) for one in chosen}
    firsts = {(arch, one.entry): one for arch in SMEM for one in reversed(all_units(arch).values())}
    return chosen + [one for key, one in firsts.items() if key not in have]



def measure(one):
    """(key, what ptxas says of the unit, or the compiler's log if it does not compile)."""
    cubin, log = nvrtc.compile(one.text, one.arch)
    if cubin is None or "warning" in log:
        return one.key, log
    return one.key, nvrtc.resources(log)


def measure_all(units):
    """`measure` of many units, in as many processes as there are processors."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield from pool.map(measure, units)


def main():
    """Write the table; rows that are not measured keep what they had."""
    known = {one.key: one for arch in SMEM for one in all_units(arch).values()}
    units = list(known.values()) if "--all" in sys.argv else sample()
    before = json.loads(TABLE.read_text())["units"] if TABLE.exists() else {}
    table = {key: found for key, found in before.items() if key in known}
    for i, (key, found) in enumerate(measure_all(units)):
        if isinstance(found, str):
            raise SystemExit(f"{key} does not compile:\n{found}")
        table[key] = found
        print(f"\r{i + 1}/{len(units)}", end="", file=sys.stderr, flush=True)
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(table[key])}" for key in sorted(table))
    TABLE.write_text(f'{{"nvrtc": "{nvrtc.version()}", "units": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()

"""Compare the machine code of every kernel of two commits, without a GPU.

    python -m bench machine-code 1ba2604                 # with the working tree
    python -m bench machine-code 1ba2604 HEAD --arch 90a
    python -m bench machine-code 1ba2604 --renew
    python -m bench machine-code 1ba2604 --renamed forward_registers=forward_sm80

A change that is to leave the kernels alone (names, comments, functions moved) leaves their machine
code as it is. Each commit lists the units that its planner can ask for, those for sm_90a without
what sm_80 has too; NVRTC compiles both texts of a unit, and instructions, constants and the number
of registers are compared. Units whose sources have the same digest are not compiled. Says which
units differ and which only one commit has; returns 1 if there are any. Takes half an hour on two
cores if all sources have changed. With --renew, if nothing differs, lines of measured speeds that
were not stale at the old commit get the new digests of their sources.
"""

import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import chain, product
from pathlib import Path

from . import RESULTS, ROOT
from .compare import tree
from .records import Results

KINDS = (("bfloat16", None), ("float16", None), ("float32", "tf32x3"), ("float32", "tf32"),
         ("float64", None))
WIDTHS = ((256, 256), (192, 192), (192, 128), (128, 128), (96, 96), (64, 64), (63, 61))
# Options that lead to another kernel, or to another form of one.
OPTIONS = ({}, {"bias_shape": (1, 1, 64, 1)}, {"has_mask": True}, {"softcap": 5.0},
           {"deterministic": True}, {"out_dtype": "float32"})
SIZES = ({"batch": 1, "Nq": 64, "Nk": 65536}, {"batch": 64, "Nq": 512, "Nk": 1024})
# KiB of shared memory that a block can have.
ARCHITECTURES = {"80": 163, "90a": 227}
SPEED = RESULTS / "gpu_speed.jsonl"
# Instructions, constants and what a kernel needs: registers and stack are in .nv.info. The other
# sections have names and tables for debuggers.
COMPARED = (".text.", ".nv.info", ".nv.constant", ".nv.global", ".nv.shared")
NOTHING_STORED = 8          # the type of a section that has an extent alone


def arguments(parser):
    """Of the command line."""
    parser.add_argument("old", help="a commit, or a folder with the package")
    parser.add_argument("new", nargs="?", default=str(ROOT),
                        help="another one; without it, the working tree")
    parser.add_argument("--arch", choices=ARCHITECTURES, action="append")
    parser.add_argument("--part", type=int, default=1, metavar="N", help="every N-th unit only")
    parser.add_argument("--renew", action="store_true", help="digests of measured speeds, too")
    parser.add_argument("--renamed", action="append", default=[], metavar="OLD=NEW",
                        help="a kernel that had another name at the old commit")


def main(options):
    """Compare; see above."""
    renamed = dict(pair.split("=") for pair in options.renamed)
    with tempfile.TemporaryDirectory() as folder:
        trees = [tree(options.old, Path(folder, "old")), tree(options.new, Path(folder, "new"))]
        faults = 0
        for arch in options.arch or ARCHITECTURES:
            faults += compare(arch, *trees, options.part, renamed)
        if options.renew and not faults:
            renew(*trees)
    return int(faults > 0)


def compare(arch, old, new, part, renamed):
    """Print what differs on an architecture; returns how many units do. part: every so many."""
    texts = [ask(tree, "units", arch) for tree in (old, new)]
    texts[0] = {now_named(name, renamed): text for name, text in texts[0].items()}
    alone = sorted(texts[0].keys() ^ texts[1].keys())
    for name in alone:
        print(f"sm_{arch} {name}: only the {'old' if name in texts[0] else 'new'} commit has it")
    both = sorted(texts[0].keys() & texts[1].keys())
    changed = [name for name in both if texts[0][name] != texts[1][name]][::part]
    jobs = [(texts[i][name], arch, tree / "cuda_src") for name in changed
            for i, tree in enumerate((old, new))]
    differ = 0
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = pool.map(code_of, *zip(*jobs, strict=True)) if jobs else iter(())
        for name in changed:
            parts = different_sections(next(found), next(found))
            if parts:
                differ += 1
                print(f"sm_{arch} {name}: {', '.join(parts)} differ")
    print(f"sm_{arch}: {len(both)} units, {len(changed)} with changed sources compared, {differ} "
          f"of them with other machine code, {len(alone)} of one commit alone", flush=True)
    return differ + len(alone)


def now_named(name, renamed):
    """The name of a unit of the old commit, of whose kernels some have other names now."""
    for before, now in renamed.items():
        match = re.fullmatch(f"{before}(_(?:bfloat16|float16|tf32|float).*)", name)
        if match:
            return now + match[1]
    return name


def renew(old, new):
    """Write the digests of the new sources into the lines whose digests were the old ones."""
    lines = Results(SPEED).lines()
    for line, before, now in zip(lines, ask(old, "digests"), ask(new, "digests"), strict=True):
        if line["sources"] == before:
            line["sources"] = now
    SPEED.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


# This bench first, then the package of a folder.
IN_TREE = """
import sys
import bench
sys.path.insert(0, sys.argv[1])
from bench.machine_code import answer
answer(*sys.argv[2:])
"""


def ask(tree, *words):
    """What `answer` says of a tree, in a process that imports its package."""
    said = subprocess.run([sys.executable, "-c", IN_TREE, str(tree), *words], check=True,
                          stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    return json.loads(said)


def answer(what, *words):
    """Print, for `ask`, the units of an architecture, or the digests of the measured kernels."""
    json.dump({"units": units, "digests": digests}[what](*words), sys.stdout)


def digests():
    """Of the sources of each line's kernels."""
    from .plans import sources_of

    return [sources_of(line["kernels"]) for line in Results(SPEED).lines()]


def units(arch):
    """{name: text} of every kernel that this tree's planner can choose on an architecture alone."""
    from cupy_flash.backends.cuda.unit import unit
    from cupy_flash.device import GpuDevice
    from cupy_flash.plan import make_plan
    from cupy_flash.problem import Mask, Problem

    if "has_mask" in Problem.__dataclass_fields__:      # of older commits
        problem_of = Problem
    else:
        from problems import problem_of
    special = {"targets": ("90a",)} if arch == "90a" else {}
    if special and "targets" not in GpuDevice.__dataclass_fields__:     # of older commits
        special = {"wgmma": True}
    device = GpuDevice(0, f"a GPU of sm_{arch}", int(arch[:2]), 132, ARCHITECTURES[arch] * 1024,
                       **special)
    devices = [device]
    if not special and "family" in GpuDevice.__dataclass_fields__:
        devices.append(replace(device, family="wmma"))      # which seldom comes first
    known = units("80") if special else {}
    found = {}
    for (dtype, precision), (d, d_v), options, size, direction in product(
            KINDS, WIDTHS, OPTIONS, SIZES, ("forward", "backward")):
        problem = problem_of(**{
            "heads_q": 1, "heads_k": 1, "d": d, "d_v": d_v, "dtype": dtype, "out_dtype": dtype,
            "precision": precision, "scale": 1.0, "softcap": 0.0, "mask": Mask(), **size,
            **options})
        for launch in chain.from_iterable(make_plan(direction, problem, one).launches
                                          for one in devices):
            name, text = unit(launch.entry, launch.config, launch.smem_bytes)
            if name not in known:
                found[name] = text
    return found


def code_of(text, arch, folder):
    """The sections that are compared of a unit compiled with the sources in a folder.

    Their titles are without the unit's name, since it may be another one at the other commit.
    """
    import nvrtc

    cubin, log = nvrtc.compile(text, arch, folder)
    if cubin is None:
        raise RuntimeError(f"a unit of {folder} does not compile:\n{log}")
    name = re.search(r"\n(\w+)\(const __grid_constant__", text)[1]
    return {title.replace(name, ""): code for title, code in sections(cubin).items()}


def sections(cubin):
    """{name: bytes} of the sections of an ELF file to compare."""
    start, = struct.unpack_from("<Q", cubin, 0x28)
    size, number, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(number)]
    strings = headers[names][4]
    found = {}
    for name, kind, _, _, offset, length in headers:
        title = cubin[strings + name:cubin.index(b"\0", strings + name)].decode()
        if title.startswith(COMPARED):
            stored = kind != NOTHING_STORED
            found[title] = cubin[offset:offset + length] if stored else bytes(length)
    return found


def different_sections(a, b):
    """Names of the sections that two units do not have alike."""
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))

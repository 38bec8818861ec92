"""Random problems on the GPU, against the CPU path with the GPU's roundings and against float64.

    python -m bench fuzz --count 2000
    python -m bench fuzz --plain                    # those that kernels of one GPU serve
    compute-sanitizer --tool memcheck python -m bench fuzz sanitize --kind tf32x3

The record of a run is a line: of every kernel unit, how many problems it has had and which came
farthest from the CPU path, in units of what is allowed; and one by one the problems outside the
rules of exactness. A run goes on where an earlier one with the same seed and kernels has stopped.
"""

import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import product, repeat
from multiprocessing import get_context
from pathlib import Path

import numpy as np

import cupy_flash as cf
from cupy_flash.bind import Options, describe
from cupy_flash.options import ARRAYS
from cupy_flash.plan import make_plan, tuned

from . import RESULTS
from .plans import compiling, device_of, units_of
from .records import Results, provenance, say
from .support import (
    CASES,
    DRAWS,
    KINDS,
    Case,
    answers_to,
    floors,
    forms,
    inputs,
    judge,
)

# (d, d_v) as compiled; half of the true ones are drawn from the last 16 below. With two sets of
# features and a dozen kernels these are fewer than 400 units.
WIDTHS = ((16, 16), (32, 32), (64, 64), (128, 128), (48, 80), (192, 128), (256, 256))
NAMES = ("out", "lse", "dq", "dk", "dv", "dbias", "dsink")
# How far GPU and CPU path may be apart, root mean square over root mean square: less than either is
# from the truth, since both round P and dS alike; now and then a rounding falls the other way.
APART = {"float16": 4e-4, "bfloat16": 1e-3, "tf32": 4e-4, "tf32x3": 1e-5, "float64": 5e-14}


def draw(seed, index, plain=False):
    """The problem `index` of a seed, as a `Case`, and whether results are wide.

    plain: 16-bit, of widths as compiled, without mask and bias: what kernels of one GPU serve.
    """
    rng = np.random.default_rng([seed, index])

    def pick(*values):
        return values[rng.integers(len(values))]

    kind = pick(*(("float16", "bfloat16") if plain else KINDS))
    dtype, precision = KINDS[kind]
    widths = pick(*WIDTHS)
    if rng.random() < 0.5 and not plain:    # otherwise rows are whole 16-byte loads
        widths = (int(rng.integers(wide - 15, wide + 1)) for wide in widths)
    d, d_v = widths
    group = int(pick(1, 1, 2, 3))
    Hk, B = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    long = rng.random() < 0.08 and dtype != "float64"       # enough keys to be split
    Nq = int(pick(1, 2, 5)) if long else int(rng.integers(1, pick(20, 150, 260)))
    Nk = int(rng.integers(1024, 4000)) if long else int(rng.integers(1, pick(20, 150, 260)))
    ndim = 4 if B > 1 or Hk * group > 1 else int(pick(2, 3, 4))
    sides, chance = (None, 0, 3, 40, 130), rng.random
    arrays = tuple((name, str(pick(*forms(option, ndim)))) for name, option in ARRAYS.items()
                   if chance() < 0.2 and not (plain and name in ("mask", "bias")))
    return Case(
        f"random-{seed}-{index}", Nq=Nq, Nk=Nk, d=d, d_v=d_v, B=B, Hq=Hk * group, Hk=Hk,
        ndim=ndim, dtype=dtype,
        precision=precision, scale=pick(None, None, None, 0.3, -0.1), causal=bool(chance() < 0.4),
        q_offset=int(rng.integers(-20, Nk + 20)) if chance() < 0.2 else None,
        window=(pick(*sides), pick(*sides)) if chance() < 0.25 else None,
        softcap=pick(1.5, 20.0) if chance() < 0.15 else None,
        arrays=arrays,
        data=pick("normal", "normal", "mean1", "late", "scales", "spread", "spread-values"),
    ), bool(chance() < 0.4)


def kind_of(case):
    """Its key in `KINDS`."""
    return case.precision or case.dtype


def run(x, wide, move=np.asarray, back=np.asarray, deterministic=False):
    """All results for `Inputs`, as NumPy arrays by name; wide: in the accumulators' type."""
    options = {name: move(value) if isinstance(value, np.ndarray) else value
               for name, value in x.options.items()}
    q, k, v, dout, dlse = map(move, x[:-1])
    accumulator = dlse.dtype if wide else None
    # What is not written stays NaN. And initcheck must not hold the results of a TMA unit, which it
    # does not see, for memory that nobody wrote.
    out = move(np.full((*x.q.shape[:-1], x.v.shape[-1]), np.nan, accumulator or x.q.dtype))
    _, lse = cf.attention(q, k, v, out=out, out_dtype=accumulator, return_lse=True, **options)
    grads = cf.attention_backward(dout, q, k, v, out, lse, dlse=dlse, grad_dtype=accumulator,
                                  deterministic=deterministic, **options)
    return {name: None if a is None else back(a)
            for name, a in zip(NAMES, (out, lse, *grads), strict=True)}


def expected(case, wide):
    """What is known without a GPU: the answers, the floors, and the CPU path's results."""
    from cupy_flash import device

    x = inputs(case)
    Br, Bc = tile_of(case, device.gpu(0))
    with tuned(Br=Br, Bc=Bc, round_P=True):
        on_cpu = run(x, wide)
    return answers_to(x, None if wide else x.q.dtype), floors(x), on_cpu


def tile_of(case, where):
    """Br and Bc of the forward kernel; every row's lazy reference follows its key tiles."""
    x = inputs(case)
    problem = describe(x.q, x.k, x.v, Options(**x.options))
    config = make_plan("forward", problem, where).launches[0].config
    return config.Br, config.Bc


def apart(case, got, on_cpu, floor, plain):
    """Difference of GPU and CPU path in units of what is allowed; floor: see `answers.floors`.

    Each split of the keys has references of its own, so other roundings of P: twice is allowed.
    Those of `plain` problems are never the CPU path's, since the keys are walked from the last.
    """
    allowed = APART[kind_of(case)] * (4 if plain else 2 if case.Nk >= 1024 else 1)
    a, b = got.astype(np.float64), on_cpu.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(np.isfinite(a), finite):
        return np.inf
    if not finite.any():
        return 0.0
    a, b = a[finite], b[finite]
    difference, size = (np.sqrt(np.mean(np.square(x))) for x in (a - b, b))
    return float(difference / (allowed * size + floor)) if difference else 0.0


def arguments(parser):
    """Of the command line."""
    parser.add_argument("part", nargs="?", default="random", choices=("random", "sanitize"))
    parser.add_argument("--count", type=int, default=2000, help="problems")
    # Problems of seed 0 were drawn in another way.
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true",
                        help="in 16 bits, of usual head dims, without mask and bias")
    parser.add_argument("--kind", default="bfloat16", choices=KINDS, help="of `sanitize`")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=500, help="stop after so long")
    parser.add_argument("--out", type=Path, help="file of the records")


def main(options):
    """Do a part; 1 if anything is wrong."""
    out = options.out or RESULTS / f"gpu_{options.part}.jsonl"
    return {"random": random, "sanitize": sanitize}[options.part](options, out)


def needed(options):
    """(name, text, target) of the units of all problems of a run."""
    found = {}
    for index in range(options.count):
        x = inputs(draw(options.seed, index, options.plain)[0])
        for units in units_of_case(x).values():
            found |= dict.fromkeys(units)
    return list(found)


def units_of_case(x):
    """The units of both passes of `Inputs`."""
    from cupy_flash import device

    problem = describe(x.q, x.k, x.v, Options(**x.options))
    return {direction: units_of(make_plan(direction, problem, device.gpu(0)))
            for direction in ("forward", "backward")}


def compile_on_cpu(entry, dtype):
    """Bring a kernel of the CPU path into Numba's cache, by a launch without tasks."""
    import cupy_flash.backends.cpu as cpu
    from cupy_flash.backends.cpu.params import BackwardParams, ForwardParams

    struct = ForwardParams if entry in ("forward_wmma", "combine") else BackwardParams
    cpu.KERNELS[entry](np.zeros(1, struct), np.zeros(1 << 16, dtype), np.zeros(1, np.int64))


class Run:
    """The record of a run, in a file with those of others."""

    def __init__(self, path, seed, plain):
        here, keys = provenance("gpu"), ("seed", "plain", "cuda_src")
        self.fields = {"seed": seed, "plain": plain, "next": 0, "faults": [], "units": {}, **here}
        self._path, self._others = path, []
        for line in Results(path).lines():
            if all(line[key] == self.fields[key] for key in keys):
                self.fields = line | here
            else:
                self._others.append(line)

    def add(self, found):
        """What `check` says of the next problem."""
        self.fields["next"] = found["index"] + 1
        if found["fault"]:
            self.fields["faults"].append({name: found[name] for name in ("index", "case", "fault")})
        for direction, names in found["units"].items():
            ratios = {name: x for name, x in found["apart"].items()
                      if (name in ("out", "lse")) == (direction == "forward")}
            for name in names:
                worst_of(self.fields["units"].setdefault(name, {"problems": 0, "worst": -1.0}),
                         ratios, found)

    def write(self):
        """Write the file anew, this run last."""
        text = "".join(json.dumps(line) + "\n" for line in (*self._others, self.fields))
        Path(self._path).parent.mkdir(parents=True, exist_ok=True)
        Path(self._path).write_text(text)


def worst_of(unit, ratios, found):
    """Count a problem of a unit, and keep it if it is the worst."""
    unit["problems"] += 1
    result = max(ratios, key=ratios.get, default=None)
    if result and ratios[result] > unit["worst"]:
        unit |= {"worst": ratios[result], "result": result, "index": found["index"],
                 "case": found["case"]}


def random(options, path):
    """The problems that are not yet in the record; 1 if any result is wrong."""
    start, units = time.perf_counter(), needed(options)
    run_of = {"seed": options.seed, "plain": options.plain}
    record = Run(path, **run_of)
    todo = range(record.fields["next"], options.count)
    say(f"{len(todo)} of {options.count} problems, {len(units)} units")
    with compiling(units, options.jobs):
        pass
    for library in ("NUMBA", "OMP", "OPENBLAS"):        # the processes below are enough
        os.environ[f"{library}_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        entries = ("forward", "backward", "dbias", "dsink", "combine", "reduce_chunks")
        list(pool.map(compile_on_cpu, *zip(*product(entries, ("float32", "float64")), strict=True)))
        say(f"kernels compiled, {time.perf_counter() - start:.0f} s")
        for first in range(0, len(todo), 200):
            if time.perf_counter() - start > options.seconds:
                say("the time is used up; run it again to go on")
                break
            part = todo[first:first + 200]
            for found, said in pool.map(check, repeat(run_of), part, chunksize=4):
                record.add(found)
                for words in said:
                    say(words)
            record.write()
            say(f"{first + len(part)}/{len(todo)}, {time.perf_counter() - start:.0f} s")
    fields = record.fields
    far = [name for name, unit in fields["units"].items() if unit["worst"] > 1]
    say(f"{fields['next']} problems, {len(fields['faults'])} outside the rule; {len(far)} of "
        f"{len(fields['units'])} units were once farther from the CPU path than expected")
    return 1 if fields["faults"] else 0


def check(run_of, index):
    """Run one problem on CPU and GPU; what a `Run` adds, and what is to be said of it."""
    import cupy

    case, wide = draw(index=index, **run_of)
    x, fault, ratios, said = inputs(case), None, {}, []
    try:
        answers, floor, on_cpu = expected(case, wide)
        got = run(x, wide, cupy.asarray, cupy.asnumpy)
        judge(case.id, got, *answers, floor, DRAWS)
        ratios = {name: round(apart(case, a, on_cpu[name], getattr(floor, name),
                                    run_of["plain"]), 4)
                  for name, a in got.items() if a is not None}
        far = {name: ratio for name, ratio in ratios.items() if ratio > 1}
        if far:
            said.append(f"FAR from the CPU path: {case.id}: {far}")
    except Exception as error:      # the whole list is wanted, not the first fault
        fault = f"{type(error).__name__}: {error}"
        said.append(f"WRONG {case}: {fault}")
    changed = {name: value for name, value in asdict(case).items()
               if value != getattr(Case("x"), name) and name != "label"}
    units = {direction: [name for name, *_ in found]
             for direction, found in units_of_case(x).items()}
    return {"index": index, "units": units, "case": changed, "fault": fault, "apart": ratios}, said


def sanitize(options, path):
    """A small problem for every kernel of a kind, judged; to be run under compute-sanitizer."""
    import cupy

    cupy.cuda.set_allocator(None)       # every array an allocation of its own, with its own bounds
    labels = ("causal-tall", "window-causal-gqa", "mask-dense-gqa", "bias-pair-gqa", "bias-query",
              "bias-head-key-causal", "lens-causal-gqa", "d46v72", "d7v3", "all-options",
              "softcap-causal-gqa", "d128", "d192v128-gqa", "d256", "decode-long")
    dtype, precision = KINDS[options.kind]
    chosen = [replace(case, dtype=dtype, precision=precision)
              for case in CASES if case.label in labels and case.dtype == "float64"]
    tiers = (False, True) if dtype in ("float16", "bfloat16") else (False,)
    wrong = 0
    runs = [(case, portable, False) for portable, case in product(tiers, chosen)]
    runs += [(case, False, True) for case in chosen if case.mask or case.bias]
    for case, portable, deterministic in runs:
        x = inputs(case)
        try:
            with device_of(portable):
                got = run(x, False, cupy.asarray, cupy.asnumpy, deterministic)
            judge(case.id, got, *answers_to(x), floors(x))
        except AssertionError as error:
            wrong += 1
            say(f"WRONG {error}")
        say(f"{case.id}{' portable' * portable}{' deterministic' * deterministic}")
    Results(path).add(kind=options.kind, cases=len(runs), wrong=wrong)
    return 1 if wrong else 0

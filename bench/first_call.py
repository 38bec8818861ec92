"""The first call of a process, and on a GPU the host's time for a repeated one.

    python -m bench first-call --on cpu     # each a fresh process: empty cache, and from disk
    python -m bench first-call --on gpu

On a CPU the time runs from the call, Numba's import included, to the result; also printed is what
`import cupy_flash` adds to `import numpy`. On a GPU every kernel has its time.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from . import RESULTS, ROOT
from .records import Results, say

# On a GPU: goal in seconds, and processes of which the median counts: a machine that others use has
# slow moments. One after another: two at once on the threads of one core take 1.7 times as long.
STATES = {"cold": (2.0, 3), "disk": (0.3, 1)}
KINDS = (("bfloat16", None), ("float32", "tf32x3"), ("float32", "tf32"), ("float64", None))
FILES = {"cpu": "first_call_cpu.jsonl", "gpu": "gpu_times.jsonl"}

CALL = """
import sys, time
import numpy as np, cupy_flash as cf
dtype, direction = sys.argv[1:]
if dtype == "bfloat16":
    import ml_dtypes
    dtype = ml_dtypes.bfloat16
x = np.ones((1, 2, 200, 64), dtype)
lse = np.zeros(x.shape[:3], np.float64 if dtype == "float64" else np.float32)
start = time.perf_counter()
if direction == "forward":
    cf.attention(x, x, x)
else:
    cf.attention_backward(x, x, x, x, x, lse)
print(time.perf_counter() - start)
"""

IMPORT = """
import time
import numpy
start = time.perf_counter()
import cupy_flash
print(time.perf_counter() - start)
"""

ON_GPU = "import sys\nfrom bench.first_call import first_call\nfirst_call(*sys.argv[1:])"


def arguments(parser):
    """Of the command line."""
    parser.add_argument("--on", choices=FILES, required=True)
    parser.add_argument("--out", type=Path, help="file for the JSON lines, written anew")


def main(options):
    """All measurements; nothing is judged here but printed against the goals."""
    path = options.out or RESULTS / FILES[options.on]
    path.unlink(missing_ok=True)
    results = Results(path, options.on)
    return {"cpu": on_cpu, "gpu": on_gpu}[options.on](results)


def fresh(code, *arguments, **env):
    """What a fresh interpreter prints last."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    env.pop("PYTHONDONTWRITEBYTECODE", None)    # an installed package has its bytecode
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], env=env, text=True,
                          capture_output=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def on_cpu(results):
    """One line for each type and pass, and one for the import."""
    say("| dtype | pass | cold s | cached s |\n|---|---|---|---|")
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        for direction in ("forward", "backward"):
            with tempfile.TemporaryDirectory() as cache:
                cold, *warm = (fresh(CALL, dtype, direction, NUMBA_CACHE_DIR=cache)
                               for _ in range(6))
            results.add(dtype=dtype, direction=direction, cold_s=cold, cached_s=median(warm))
            say(f"| {dtype} | {direction} | {cold:.1f} | {median(warm):.2f} |")
    added = median(fresh(IMPORT) for _ in range(9))
    results.add(import_s=added)
    say(f"\n`import cupy_flash` adds {added * 1e3:.0f} ms to `import numpy`.")
    return 0


def on_gpu(results):
    """Lines of first calls by type, head dim and state, and of repeated calls."""
    for dtype, precision in KINDS:
        for d in (64, 128, 256):
            with tempfile.TemporaryDirectory() as folder:
                for state, (goal, processes) in STATES.items():
                    found = defaultdict(lambda: defaultdict(list))
                    for i in range(processes):
                        said = fresh(ON_GPU, dtype, precision, d, CUPY_CACHE_DIR=f"{folder}/{i}")
                        for field, name in ((x, y) for x in said for y in said[x]):
                            found[field][name].append(said[field][name])
                    slowest = max(map(median, found["kernels"].values()))
                    say(f"first call {dtype} {precision} d {d}, {state}: slowest kernel "
                        f"{slowest:.2f} s (goal {goal} s), {dict(found['kernels'])}")
                    results.add(measured="first call", state=state, dtype=dtype,
                                precision=str(precision), d=d, **found)
    for found in (overhead("forward"), overhead("backward")):
        say("repeated call:", found)
        results.add(measured="repeated call", **found)
    return 0


def first_call(dtype, precision, d):
    """In a process of its own: seconds until each kernel is ready, and of the calls around."""
    start = time.perf_counter()
    import cupy as cp

    import cupy_flash as cf
    from cupy_flash.backends.cuda import compile as compiled

    from .data import dtype_of

    precision = None if precision == "None" else precision
    cp.zeros(1)
    cp.cuda.Device().synchronize()
    context = time.perf_counter() - start
    kernels, load = {}, compiled._load

    def timed(name, text, target):
        before = time.perf_counter()
        kernel = load(name, text, target)
        kernels[name] = round(time.perf_counter() - before, 3)
        return kernel

    compiled._load = timed
    q = cp.zeros((1, 2, 256, int(d)), dtype_of(dtype))
    calls = {}
    before = time.perf_counter()
    out, lse = cf.attention(q, q, q, causal=True, precision=precision, return_lse=True)
    cp.cuda.Device().synchronize()
    calls["forward"] = round(time.perf_counter() - before, 3)
    before = time.perf_counter()
    cf.attention_backward(q, q, q, q, out, lse, causal=True, precision=precision)
    cp.cuda.Device().synchronize()
    calls["backward"] = round(time.perf_counter() - before, 3)
    calls["context"] = round(context, 3)
    print(json.dumps({"kernels": kernels, "calls": calls}))


def overhead(direction, calls=50, rounds=50):
    """Microseconds of the host for a repeated small call, beside bare launches of its kernels.

    The bare launches are those of the call itself, with their very arguments, without anything
    around them; `numpy_us` is what they take with their structs as NumPy arrays, the way that CuPy
    documents, which asks each array for its address.
    """
    import cupy as cp
    import numpy as np

    import cupy_flash as cf
    from cupy_flash.backends.cuda import launch

    q = cp.zeros((1, 1, 16, 64), cp.float16)       # the GPU must be done before the host
    out, lse = cf.attention(q, q, q, return_lse=True)
    functions = {"forward": lambda: cf.attention(q, q, q),
                 "backward": lambda: cf.attention_backward(q, q, q, q, out, lse)}
    call, recorded = functions[direction], []
    call()
    original = launch.launches

    def recording(plan):
        def record(function):
            return lambda *arguments: (recorded.append((function, arguments)), function(*arguments))
        return [(record(function), *rest) for function, *rest in original(plan)]

    launch.launches = recording
    launch.prepared.clear()
    results = call()                               # its arrays live as long as their addresses
    launch.launches = original
    launch.prepared.clear()

    def bare():
        for function, arguments in recorded:
            function(*arguments)

    structs = [(function, (grid, block, (np.frombuffer(argument.words, f"V{size}"),), shared))
               for function, (grid, block, (argument,), shared) in recorded
               for size in [argument.words.itemsize * len(argument.words)]]

    def documented():
        for function, arguments in structs:
            function(*arguments)

    def host(function):
        function()
        cp.cuda.Device().synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        spent = time.perf_counter() - start
        cp.cuda.Device().synchronize()
        return 1e6 * spent / calls

    rows = [(host(call), host(bare), host(documented)) for _ in range(rounds)]
    ours, launched, numpy = (median(column) for column in zip(*rows, strict=True))
    del results
    return {"direction": direction, "launches": len(recorded), "call_us": round(ours, 1),
            "bare_us": round(launched, 1), "more_us": round(ours - launched, 1),
            "numpy_us": round(numpy, 1), "goal_us": 20}

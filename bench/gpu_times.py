"""The first call, cold and from the disk cache, and the host's time for a repeated call."""

import json
import os
import subprocess
import sys
import tempfile
import time
from statistics import median

from gpu_check import say

# Goal in seconds, and processes of which the median counts: a machine that others use has slow
# moments. One after another: two at once on the threads of one core take 1.7 times as long.
STATES = {"cold": (2.0, 3), "disk": (0.3, 1)}
KINDS = (("bfloat16", "None"), ("float32", "tf32x3"), ("float32", "tf32"), ("float64", "None"))


def times(options, results):
    """All measurements; nothing is judged here but printed against the goals."""
    for dtype, precision in KINDS:
        for d in (64, 128, 256):
            with tempfile.TemporaryDirectory() as folder:
                for state, (goal, processes) in STATES.items():
                    found = _in_processes(processes, folder, dtype, precision, d)
                    slowest = max(map(median, found["kernels"].values()))
                    say(f"first call {dtype} {precision} d {d}, {state}: slowest kernel "
                        f"{slowest:.2f} s (goal {goal} s), {found['kernels']}")
                    results.add(measured="first call", state=state, dtype=dtype,
                                precision=precision, d=d, **found)
    for found in (overhead("forward"), overhead("backward")):
        say("repeated call:", found)
        results.add(measured="repeated call", **found)
    return 0


def _in_processes(count, folder, *arguments):
    """What new processes, each with its cache, measure: {field: {name: seconds of each}}."""
    command = [sys.executable, sys.argv[0], "first-call", *map(str, arguments)]
    said = []
    for i in range(count):
        done = subprocess.run(command, env={**os.environ, "CUPY_CACHE_DIR": f"{folder}/{i}"},
                              text=True, capture_output=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        said.append(done.stdout)
    found = [json.loads(out.splitlines()[-1]) for out in said]
    return {field: {name: [one[field][name] for one in found] for name in found[0][field]}
            for field in found[0]}


def first_call(dtype, precision, d):
    """In a process of its own: seconds until each kernel is ready, and of the calls around."""
    start = time.perf_counter()
    import cupy as cp

    import cupy_flash as cf
    from cupy_flash.backends.cuda import compile as compiled

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
    import ml_dtypes  # noqa: F401
    q = cp.zeros((1, 2, 256, int(d)), cp.dtype(dtype))
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
    return 0


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

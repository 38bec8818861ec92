"""Time the CPU path against PyTorch's CPU attention.

    python bench/cpu.py --out bench/results/cpu.jsonl            # measure (needs torch)
    python bench/cpu.py --table bench/results/cpu.jsonl          # the table, from the file

Each library lives in a process of its own, which sleeps while the other one works. A round is some
20 ms of untimed and as many of timed calls of each, in turn (at least one call): the untimed ones
outlast the threads that OpenMP keeps spinning for milliseconds after the other process's calls.
The ratio of a cell is the median over rounds of torch's time / ours. Results are compared with each
other before anything is timed.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from flops import backward_flops, forward_flops  # noqa: E402

HEADS = 8
SQUARE = [(n, n) for n in (512, 2048, 8192)]
DECODE = (1, 16384)


def cells():
    """(dtype, d, Nq, Nk, causal, direction) of the table."""
    for dtype in ("float32", "float64"):
        for d in (64, 128):
            for Nq, Nk in SQUARE:
                for causal in (False, True):
                    for direction in ("forward", "backward"):
                        yield dtype, d, Nq, Nk, causal, direction
            yield dtype, d, *DECODE, False, "forward"


def inputs(dtype, d, Nq, Nk):
    """q, k, v, dout of a cell: standard normal, one batch entry."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, HEADS, n, d)).astype(dtype) for n in (Nq, Nk, Nk, Nq)]


def ours(cell):
    """The call to be timed, and the arrays it returns."""
    import cupy_flash as cf

    dtype, d, Nq, Nk, causal, direction = cell
    q, k, v, dout = inputs(dtype, d, Nq, Nk)
    if direction == "forward":
        return lambda: [cf.attention(q, k, v, causal=causal)]
    out, lse = cf.attention(q, k, v, causal=causal, return_lse=True)
    return lambda: list(cf.attention_backward(dout, q, k, v, out, lse, causal=causal)[:3])


def torch(cell):
    """The same of torch.nn.functional.scaled_dot_product_attention."""
    import torch as th

    th.set_num_threads(threads())
    dtype, d, Nq, Nk, causal, direction = cell
    q, k, v, dout = map(th.from_numpy, inputs(dtype, d, Nq, Nk))
    attention = th.nn.functional.scaled_dot_product_attention
    if direction == "forward":

        def forward():
            with th.no_grad():
                return [attention(q, k, v, is_causal=causal)]

        return forward
    leaves = [x.requires_grad_(True) for x in (q, k, v)]
    out = attention(*leaves, is_causal=causal)
    return lambda: th.autograd.grad(out, leaves, dout, retain_graph=True)


LIBRARIES = {"ours": ours, "torch": torch}


def threads():
    return len(os.sched_getaffinity(0))


def serve(library, pipe):
    """A worker process: ("cell", cell) -> results; ("time", repeats) -> seconds per call."""
    call = None
    while True:
        word, argument = pipe.recv()
        if word == "cell":
            call = LIBRARIES[library](argument)
            pipe.send([np.asarray(x) for x in call()])
        else:
            for _ in range(argument):
                call()
            start = time.perf_counter()
            for _ in range(argument):
                call()
            pipe.send((time.perf_counter() - start) / argument)


def measure(workers, cell, seconds):
    """Rounds of both libraries until the time is used up; at least three."""
    results = {}
    for name, pipe in workers.items():
        pipe.send(("cell", cell))
        results[name] = pipe.recv()
    error = max(
        float(np.abs(a - b).max()) for a, b in zip(results["ours"], results["torch"], strict=True)
    )
    bound = 1e-3 if cell[0] == "float32" else 1e-11
    if not error < bound:
        raise SystemExit(f"{cell}: the libraries differ by {error}, allowed {bound}")

    def timed(repeats):
        for name, pipe in workers.items():
            pipe.send(("time", repeats))
            yield name, pipe.recv()

    repeats = max(1, int(0.02 / min(dict(timed(1)).values())))  # some 20 ms per timing
    taken, start = {name: [] for name in workers}, time.perf_counter()
    while len(taken["ours"]) < 3 or time.perf_counter() - start < seconds:
        for name, taken_once in timed(repeats):
            taken[name].append(taken_once)
    return taken, error


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the measurements, one JSON line a cell")
    parser.add_argument("--table", type=Path, help="print the table of such a file and stop")
    parser.add_argument("--seconds", type=float, default=3, help="time per cell")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
        return
    context = get_context("spawn")
    workers, processes = {}, []
    for name in LIBRARIES:
        workers[name], there = context.Pipe()
        processes.append(context.Process(target=serve, args=(name, there), daemon=True))
        processes[-1].start()
    records = []
    for cell in cells():
        if options.only not in cell_name(cell):
            continue
        taken, error = measure(workers, cell, options.seconds)
        records.append(record(cell, taken, error))
        print(cell_name(cell), f"{records[-1]['ratio']:.2f}", file=sys.stderr, flush=True)
    for process in processes:
        process.terminate()
    if options.out:
        options.out.write_text("".join(json.dumps(r) + "\n" for r in records))
    print(table(records))


def cell_name(cell):
    dtype, d, Nq, Nk, causal, direction = cell
    return f"{direction}-{'causal' if causal else 'full'}-{Nq}x{Nk}-d{d}-{dtype}"


def record(cell, taken, error):
    """One line of the results file."""
    import numba

    dtype, d, Nq, Nk, causal, direction = cell
    count = forward_flops if direction == "forward" else backward_flops
    flops = count(1, HEADS, Nq, Nk, d, d, causal)
    ratios = np.array(taken["torch"]) / np.array(taken["ours"])
    return {
        "cell": cell_name(cell),
        "dtype": dtype,
        "d": d,
        "Nq": Nq,
        "Nk": Nk,
        "causal": causal,
        "direction": direction,
        "heads": HEADS,
        "threads": threads(),
        "rounds": len(ratios),
        "ratio": float(np.median(ratios)),
        "ratio_low": float(np.quantile(ratios, 0.25)),
        "ratio_high": float(np.quantile(ratios, 0.75)),
        **{f"gflops_{name}": float(flops / np.median(t) * 1e-9) for name, t in taken.items()},
        "difference": error,
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu_name(),
        "commit": commit(),
        "numba": numba.__version__,
        "numpy": np.__version__,
        "torch": version("torch"),
        "python": platform.python_version(),
    }


def version(package):
    from importlib.metadata import version as installed

    return installed(package)


def cpu_name():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def commit():
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True
    ).stdout.strip()


def table(records):
    """The records as a Markdown table, geometric means below."""
    head = records[0]
    lines = [
        f"CPU path against torch {head['torch']} `scaled_dot_product_attention`, "
        f"{head['heads']} heads, {head['threads']} threads, {head['cpu']}, "
        f"{head['date']}, commit {', '.join(dict.fromkeys(r['commit'] for r in records))}.",
        "A ratio above 1 means ours is faster; in brackets the quartiles of the rounds.",
        "",
        "| dtype | d | Nq x Nk | mask | pass | ours GFLOP/s | torch GFLOP/s | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        mask = "causal" if r["causal"] else "full"
        lines.append(
            f"| {r['dtype']} | {r['d']} | {r['Nq']} x {r['Nk']} | {mask} | "
            f"{r['direction']} | {r['gflops_ours']:.0f} | {r['gflops_torch']:.0f} | "
            f"{r['ratio']:.2f} ({r['ratio_low']:.2f} to {r['ratio_high']:.2f}) |"
        )
    lines.append("")
    for dtype in ("float32", "float64"):
        for direction in ("forward", "backward"):
            kind = (dtype, direction)
            rows = [r for r in records if (r["dtype"], r["direction"]) == kind]
            ratios = [r["ratio"] for r in rows if r["Nq"] in (2048, 8192)]
            if ratios:
                mean = float(np.exp(np.mean(np.log(ratios))))
                lines.append(
                    f"- {dtype} {direction}, N = 2048 and 8192: geometric mean {mean:.2f}, "
                    f"lowest {min(ratios):.2f}"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Tables of the pages, computed from the code and from the committed records.

A page asks for one in a block of the directive ``computed``. The table of errors in the README is
written by hand from `errors`, and a test compares the two.
"""

import json
import subprocess
from functools import cache
from itertools import chain
from math import exp, log
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "bench" / "results"
TYPES = {"bfloat16": "bfloat16", "float16": "float16", "tf32x3": "float32",
         "tf32": 'float32, `precision="tf32"`', "float64": "float64"}


def records(name):
    """The lines of a file of records."""
    return [json.loads(line) for line in (RECORDS / name).read_text().splitlines()]


def table(head, rows):
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def mean(values):
    """The geometric mean."""
    values = list(values)
    return exp(sum(map(log, values)) / len(values))


def gpu_speed():
    """Ratios to the best peer, by family and type; and what is stale."""
    from bench.charts import speed_records
    from bench.plans import stale

    words = {"16-bit": "full and causal", "features": "grouped heads, d 192 and 128, a window",
             "decode": "one query on many keys", "science": "one sequence",
             "portable": "by the kernels for every GPU"}
    lines = [one for one in speed_records() if one["ratio"]]
    kinds = sorted({(one["family"], one["kind"]) for one in lines}, key=lambda kind: (
        list(words).index(kind[0]), list(TYPES).index(kind[1])))
    rows = [[TYPES[kind], words[family], *(
        ratios(one["ratio"] for one in lines
               if (one["family"], one["kind"], one["direction"]) == (family, kind, direction))
        for direction in ("forward", "backward"))] for family, kind in kinds]
    text = table(["type", "what", "forward", "backward"], rows)
    old = sum(map(stale, lines))
    if old:
        text += (f"\n\nOf these {len(lines)} cells, {old} were measured with kernels that have "
                 "changed since.")
    return text


def ratios(values):
    """The geometric mean of ratios, and their range."""
    values = list(values)
    return (f"**{mean(values):.2f}** ({min(values):.2f} to {max(values):.2f})" if values else "")


def cpu_speed():
    """Ratios to PyTorch on a CPU; and whether the kernels have changed since."""
    lines = [one for one in records("cpu.jsonl") if one["Nq"] in (2048, 8192)]
    text = table(["type", "forward", "backward"], [
        [dtype, *(ratios(one["ratio"] for one in lines
                         if (one["dtype"], one["direction"]) == (dtype, direction))
                  for direction in ("forward", "backward"))] for dtype in ("float32", "float64")])
    dates = sorted({one["date"] for one in lines})
    text += f"\n\nMeasured on {' and '.join(dates)}"
    old = sum(changed_since(one["commit"], "cupy_flash/backends/cpu") for one in lines)
    return text + (f"; the kernels of {old} of {len(lines)} cells have changed since." if old
                   else ".")


@cache
def changed_since(commit, folder):
    """Whether files have changed since a commit, as far as there is a history to ask."""
    try:
        answer = subprocess.run(
            ["git", "-C", ROOT, "log", "-1", "--format=%h", f"{commit.removesuffix('-dirty')}..",
             "--", folder], capture_output=True, text=True)
    except FileNotFoundError:
        return False
    return bool(answer.stdout)


def on_record():
    """What was timed beside other implementations: devices, head dims and masks."""
    from bench.charts import speed_records

    lines, cpu = speed_records(), records("cpu.jsonl")
    widths = sorted({one["width"] for one in lines}, key=lambda width: int(width.split("v")[0]))
    rows = [[_listed({one["gpu"] for one in lines}),
             _listed(width.replace("v", " and ") for width in widths),
             _listed({one["mask"].replace("window", "a window of ") for one in lines})],
            [_listed({f"{one['cpu']}, {one['threads']} threads" for one in cpu}),
             _listed(sorted({one["d"] for one in cpu})),
             _listed({"causal" if one["causal"] else "full" for one in cpu})]]
    return table(["on", "head dims", "masks"], rows)


def _listed(words):
    """Words with commas; a set in the order of the alphabet."""
    return ", ".join(map(str, sorted(words) if isinstance(words, set) else words))


def first_calls():
    """Seconds of first calls, cold and from disk."""
    cpu = [one for one in records("first_call_cpu.jsonl") if "cold_s" in one]
    rows = [[f"CPU, {direction}", *(_range(one[name] for one in cpu
                                           if one["direction"] == direction)
                                    for name in ("cold_s", "cached_s"))]
            for direction in ("forward", "backward")]
    gpu = [one for one in records("gpu_times.jsonl") if one["measured"] == "first call"]
    rows += [[f"GPU, {direction}", *(_range(chain.from_iterable(
        one["calls"][direction] for one in gpu if one["state"] == state))
        for state in ("cold", "disk"))] for direction in ("forward", "backward")]
    return table(["first call", "compiled then, s", "from disk, s"], rows)


def _range(seconds):
    """The least and the largest."""
    seconds = sorted(seconds)
    low, high = (f"{x:.2f}" if x < 1 else f"{x:.1f}" for x in (seconds[0], seconds[-1]))
    return low if low == high else f"{low} to {high}"


def errors(N=16384, data="mean 1"):
    """Largest error over largest value on a GPU, by type."""
    lines = {one["kind"]: one["errors"] for one in records("gpu_errors.jsonl")
             if (one["N"], one["data"]) == (N, data)}
    names = ("out", "lse", "dq", "dk", "dv")
    return table(["type", *(f"`{name}`" for name in names)],
                 [[title, *(f"{lines[kind][name]:.0e}" for name in names)]
                  for kind, title in TYPES.items()])


def cpu_errors(N=1000, d=64):
    """Errors against float64 (long double for float64): ours and the baseline's, in each type.

    They are measured when the page is built, by the baseline that the tests use.
    """
    import ml_dtypes
    import numpy as np

    import cupy_flash as cf
    from cupy_flash import reference

    rows = []
    for dtype in (ml_dtypes.bfloat16, np.float16, np.float32, np.float64):
        rng = np.random.default_rng(0)
        q, k, v, dout = ((1 + rng.standard_normal((N, d))).astype(dtype) for _ in range(4))
        wide = np.longdouble if dtype is np.float64 else np.float64
        accumulator = np.float64 if dtype is np.float64 else np.float32
        out, lse = cf.attention(q, k, v, causal=True, return_lse=True, out_dtype=accumulator)
        grads = cf.attention_backward(dout, q, k, v, out, lse, causal=True, grad_dtype=accumulator)
        truth = (reference.attention(q, k, v, causal=True, compute_dtype=wide)[0],
                 *reference.attention_backward(dout, q, k, v, causal=True, compute_dtype=wide)[:3])
        plain = (reference.baseline(q, k, v, causal=True)[0],
                 *reference.baseline_backward(dout, q, k, v, causal=True)[:3])
        row = [np.dtype(dtype).name]
        for ours, baseline, want in zip((out, *grads[:3]), plain, truth, strict=True):
            largest = np.abs(want).max()
            row += [f"{np.abs(x.astype(wide) - want).max() / largest:.0e}"
                    for x in (ours, baseline)]
        rows.append(row)
    names = ("out", "dq", "dk", "dv")
    return table(["type", *chain.from_iterable((f"`{name}`", "baseline") for name in names)], rows)


def traffic(N=16384, d=128, heads=16, Br=128, size=2):
    """Bytes that go to and from memory, and how long that takes: with and without the matrix."""
    matrix = heads * N * N * size
    operands = 4 * heads * N * d * size
    ours = 2 * heads * N * d * size + 2 * heads * N * d * size * (N // Br)
    flops = 4 * heads * N * N * d
    bandwidth, peak = 4.8e12, 989e12
    rows = [["q, k, v and out, once each", _bytes(operands),
             f"{1e3 * operands / bandwidth:.2f} ms"],
            ["the matrix of scores: written, read, written as P, read", _bytes(4 * matrix),
             f"{1e3 * 4 * matrix / bandwidth:.1f} ms"],
            [f"tiles of {Br} queries: K and V once for each", _bytes(ours),
             f"{1e3 * ours / bandwidth:.1f} ms, mostly from the L2 cache"],
            ["for comparison, the arithmetic", f"{flops / 1e12:.1f} TFLOP",
             f"{1e3 * flops / peak:.1f} ms at 989 TFLOP/s"]]
    return table(["what", "amount", "time at 4.8 TB/s"], rows)


def workspace():
    """What plans ask for beside operands and results, on the machine that builds the pages."""
    from bench.charts import planned

    rows = []
    for N in (1024, 16384, 262144):
        matrix = 4 * 4 * N * N
        rows.append([f"{N:,}", _bytes(4 * N * 64 * 4 * 3), _bytes(matrix),
                     *(_bytes(planned(direction, N, dtype="float32"))
                       for direction in ("forward", "backward"))])
    return table(["N", "q, k, v", "one matrix of scores", "ours, forward: results and workspace",
                  "ours, backward"], rows)


def _bytes(n):
    """A number of bytes in a fitting unit."""
    power = min(int(log(n, 1024)), 4)
    n, unit = n / 1024**power, ("bytes", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{n:.0f} {unit}" if n >= 100 or not power else f"{n:.1f} {unit}"

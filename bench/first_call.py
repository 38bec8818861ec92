"""Time the first call of a process on the CPU: with an empty cache, and from the cache on disk.

    python bench/first_call.py [--out bench/results/first_call_cpu.jsonl]

Each line is a fresh process; its time runs from the call, Numba's import included, to the result.
Also printed: what `import cupy_flash` adds to `import numpy`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cpu import commit, cpu_name, version

ROOT = Path(__file__).parents[1]
DTYPES = ("float16", "bfloat16", "float32", "float64")

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


def seconds(code, *arguments, cache):
    """What a fresh interpreter prints."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": cache}
    env.pop("PYTHONDONTWRITEBYTECODE", None)    # an installed package has its bytecode
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=env, text=True,
                          capture_output=True, check=True)
    return float(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the measurements, JSON lines")
    options = parser.parse_args()
    provenance = {"date": time.strftime("%Y-%m-%d"), "cpu": cpu_name(), "commit": commit(),
                  "numba": version("numba"), "numpy": version("numpy")}
    records = []
    print("| dtype | pass | cold s | cached s |\n|---|---|---|---|")
    for dtype in DTYPES:
        for direction in ("forward", "backward"):
            with tempfile.TemporaryDirectory() as cache:
                cold = seconds(CALL, dtype, direction, cache=cache)
                warm = statistics.median(seconds(CALL, dtype, direction, cache=cache)
                                         for _ in range(5))
            records.append({"dtype": dtype, "direction": direction, "cold_s": cold,
                            "cached_s": warm, **provenance})
            print(f"| {dtype} | {direction} | {cold:.1f} | {warm:.2f} |", flush=True)
    with tempfile.TemporaryDirectory() as cache:
        added = statistics.median(seconds(IMPORT, cache=cache) for _ in range(9))
    records.append({"import_s": added, **provenance})
    print(f"\n`import cupy_flash` adds {added * 1e3:.0f} ms to `import numpy`.")
    if options.out:
        options.out.write_text("".join(json.dumps(r) + "\n" for r in records))


if __name__ == "__main__":
    main()

"""Faults put into the CUDA kernels on fibers are seen: a barrier left out, a byte too few."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from cases import Case, inputs
from cuda_on_cpu import harness
from cuda_on_cpu.harness import COMPILER, HERE, Fibers, KernelError

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler on Linux")

SEEDS = range(1, 13)
# The barriers of each kernel.
BARRIERS = {
    "forward_wmma": {"numbers_written", "tiles_loaded", "scores_written", "scores_finished",
                     "seen_found", "P_written", "V_read", "l_written", "memory_free"},
    "dkdv_wmma": {"numbers_written", "lse_loaded", "tiles_loaded", "products_written",
                  "gradients_written"},
    "dq_wmma": {"numbers_written", "lse_loaded", "tiles_loaded", "products_written",
                "dS_written", "seen_found", "K_cleaned", "tiles_read", "factors_written",
                "memory_free"},
    "dbias_wmma": {"rows_read", "lse_loaded", "tiles_loaded", "products_written", "sums_written",
                   "sums_read"},
}


def call(dtype, fibers):
    """Every kernel once; what it writes, or None if it did not come to its end."""
    x, out, lse = problem(dtype)
    results = {"forward_wmma": attempt(lambda: fibers.forward(x.q, x.k, x.v, **x.options))}
    for entry, which in (("dkdv_wmma", (1, 2)), ("dq_wmma", (0,)), ("dbias_wmma", (3,))):
        fibers.only = {"normalise", "backward_preprocess", entry}
        g = attempt(lambda: fibers.backward(x.dout, x.q, x.k, x.v, out, lse, **x.options))
        results[entry] = g and [g[i] for i in which]
    return results


def attempt(run):
    """The bytes of the results of run(); None if a kernel of it failed."""
    try:
        return [None if x is None else x.tobytes() for x in run()]
    except KernelError:
        return None


@cache
def problem(dtype):
    """Several tiles of rows and of keys; rows that see nothing, keys that nobody sees."""
    x = inputs(Case("barriers", Nq=53, Nk=37, B=2, Hq=2, Hk=1, d=20, d_v=36, dtype=dtype,
                    q_lens=(53, 20), kv_lens=(37, 30), causal=True, mask="dense", bias="1hqk"))
    hidden = slice(4, 9)
    x.options["mask"][..., hidden] = False
    x.k[..., hidden, :] = x.v[..., hidden, :] = np.nan
    return x, *Fibers().forward(x.q, x.k, x.v, **x.options)


@cache
def right(dtype):
    """What the kernels return, and the names of the barriers that each of them reaches."""
    fibers = Fibers(grid=1)
    return call(dtype, fibers), fibers.barriers


def test_every_barrier_is_known():
    _, barriers = right("float32")
    assert {entry: set(barriers[entry]) for entry in BARRIERS} == BARRIERS
    assert not barriers["backward_preprocess"]


DOUBLED = """\
#include "ptx.cuh"
struct Params {{ int x; }};
extern "C" __global__ void twice(Params p) {{
  cf::ptx::sync_block("first");
  cf::ptx::sync_block("{second}");
}}
"""


@pytest.mark.parametrize("second, code, names", [
    ("second", 0, b"first\nsecond\n"), ("first", harness.SAME_NAME, b"first\n")])
def test_two_barriers_of_one_name_are_refused(second, code, names):
    path = harness.compile_unit(f"twice_{second}", DOUBLED.format(second=second), "twice", "Params",
                                ("-O1",))
    library = harness._load(path)
    params = np.zeros(1, np.int32)
    assert library.run(params.ctypes.data, params.nbytes, 1, 64, 64, 1, b"", 0) == code
    assert library.barriers() == names


def unseen(dtype):
    """The barriers that can be left out of a kernel without any seed showing it."""
    want, barriers = right(dtype)
    left = {(entry, barrier) for entry in BARRIERS for barrier in barriers[entry]}
    for seed in SEEDS:
        for barrier in sorted({barrier for _, barrier in left}):
            # Not NaN: fragments that do not know their rows would write to wild addresses.
            got = call(dtype, Fibers(grid=1, seed=seed, skip=barrier, fill=1))
            for entry in BARRIERS:
                if got[entry] != want[entry]:
                    left.discard((entry, barrier))
    return left


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_barrier_is_needed(dtype):
    assert unseen(dtype) == set()


def sanitized(missing):
    """What AddressSanitizer says of every kernel with so many bytes of shared memory too few."""
    library = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True,
                             text=True).stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip("the compiler has no AddressSanitizer")
    environment = os.environ | {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0",
                                "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, str(HERE / "sanitized.py"), str(missing)],
                          env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_no_access_outside_an_array():
    code, said, error = sanitized(0)
    assert (code, said) == (0, "clean\n"), error[:4000]


def test_an_access_outside_an_array_is_seen():
    code, _, error = sanitized(4)
    assert code != 0 and "heap-buffer-overflow" in error and "find_seen_keys" in error

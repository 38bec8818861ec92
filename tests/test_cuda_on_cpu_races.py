"""Shared memory of the CUDA kernels on fibers: no two accesses race, and the detector sees such.

Unlike a wrong result, a race shows in any order of the threads.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from cases import KINDS, Case, inputs
from cuda_on_cpu import harness, races
from cuda_on_cpu.harness import KernelError
from cuda_on_cpu.races import Watched

import cupy_flash as cf
from cupy_flash.plan import cuda_forward_sm90, cuda_simt
from cupy_flash.plan.cuda_forward_sm80 import Row

pytestmark = pytest.mark.skipif(not races.AVAILABLE, reason="needs g++ on Linux")

READ, WRITE, COPY = "read after write", "write after read", "use of a copy under way"
FENCE = "write without a fence"
# What small kernels of two warps do, in the order of races.cuh: the races of it, whether they are
# within a warp, and whether that takes the strict view of a warp.
SMALL = {
    "nothing": ({READ, WRITE}, False, False),
    "barrier of the block": (),
    "barrier of the warp for two warps": ({READ, WRITE}, False, False),
    "nothing in a warp": ({READ, WRITE}, True, False),
    "barrier of the warp": (),
    "shuffle": ({READ, WRITE}, True, True),
    "numbered barrier": (),
    "numbered barriers of a warp each": ({READ, WRITE}, False, False),
    "rows loaded and overwritten": ({READ, WRITE}, False, False),
    "own row loaded and overwritten": (),
    "copy": (),
    "copy without a barrier": ({READ, WRITE}, False, False),
    "copy without a wait": ({COPY}, False, False),
    "own copy without a wait": ({COPY}, True, False),
    "arrival and wait": (),
    "arrival without a wait": ({READ, WRITE}, False, False),
    "arrival too early": ({READ, WRITE}, False, False),
    "numbered arrival and wait": (),
    "numbered wait and arrival": ({READ, WRITE}, False, False),
}
TEXT = f"""\
#include "{Path(__file__).parent / "races.cuh"}"
extern "C" __global__ void small(const __grid_constant__ cf::RaceParams p) {{
  cf::races_of_two_warps(p);
}}
"""


@pytest.fixture(scope="module")
def small():
    return harness.compile_unit("small", TEXT, "small", "cf::RaceParams", races.flags())


@pytest.mark.parametrize("strict", [False, True], ids=["usual", "strict"])
@pytest.mark.parametrize("name", SMALL)
def test_small_kernels(small, name, strict):
    kinds, same_warp, needs_strict = SMALL[name] or (set(), False, False)
    words = np.arange(256, dtype=np.uint32)
    params = np.array([[*SMALL].index(name), words.ctypes.data], np.uint64)
    found = []
    with races.watch(small, "small", strict, found) as library:
        code = library.run(params.ctypes.data, params.nbytes, 1, 64, 64 * 16 + 8, 1, b"", 0)
    assert code == 0
    assert bool(found) == (bool(kinds) and strict >= needs_strict)
    assert {race.kind for race in found} <= kinds
    assert all(race.same_warp == same_warp for race in found)
    assert all(race.first.startswith("races.cuh:") for race in found)


# The functions that write those zeros, and those that multiply what they have zeroed.
MEANT = {frozenset(pair) for zeros, products in (
             ("zero_values", ("start_values",)),
             ("zero_rows", ("start_scores", "start_sums", "multiply_keys")))
         for pair in ((zeros, other) for other in (zeros, *products))}


def unintended(found):
    """Races but those that the consumers of the kernels for sm_90a explain: they write the same
    zeros to a tile, each before it reads them itself."""
    return [race for race in found if race.kind == FENCE or frozenset(race.functions) not in MEANT]


class Form(NamedTuple):
    """One form of one kernel, and a problem that takes it through most of its branches."""

    entry: str
    case: dict
    options: dict

    def run(self, **options):
        """Its races, what it returns (None if it did not come to its end), and its barriers."""
        x = problem(**self.case)
        fibers = Watched(grid=1, **self.options, **options)
        fibers.only = {self.entry, "normalise", "normalise_simt", "backward_preprocess"}
        if self.entry == "dbias_sum":
            fibers.only.add("backward_sm80")
        try:
            if "forward" in self.entry:
                results = fibers.forward(x.q, x.k, x.v, **x.options)
            else:
                out, lse = cf.attention(x.q, x.k, x.v, return_lse=True, **x.options)
                results = fibers.backward(x.dout, x.q, x.k, x.v, out, lse, **x.options)
            results = [a.tobytes() for a in results if a is not None]
        except KernelError:
            results = None
        return unintended(fibers.races), results, fibers.barriers.get(self.entry)


def problem(kind, bias_scale=1, **case):
    """`bias_scale`: a large one makes an lse that cannot hold ln l."""
    dtype, precision = KINDS[kind]
    usual = {"Nq": 75, "Nk": 69, "B": 2, "Hq": 2, "Hk": 1, "d": 24, "d_v": 40, "causal": True,
             "kv_lens": (69, 30)}
    x = inputs(Case("race", dtype=dtype, precision=precision, **usual | case))
    if x.options.get("bias") is not None:
        x.options["bias"] = (x.options["bias"] * bias_scale).astype(x.options["bias"].dtype)
    return x


def registers(kind, *tile, d_v=40, **form):
    return Form("forward_sm80", {"kind": kind, "d_v": d_v},
                {"registers": Row(*tile, 256, "of a test", **form)})


def fused(kind, *tile, **case):
    return Form("backward_sm80", {"kind": kind, **case}, {"fused": tile})


def general(entry, **case):
    return Form(entry, {"kind": "bfloat16", "mask": "dense", "bias": "1hqk", **case}, {})


def simt(entry, kind="tf32x3", **case):
    tile = cuda_simt.Tile(1, 2, 32, 8, 2, 16, 2, "of a test")
    return Form(entry, {"kind": kind, "d": 3, "d_v": 1, **case}, {"simt": tile})


def hopper(*tile, **case):
    tile = cuda_forward_sm90.Row(*tile, 256, 256, "of a test")
    return Form("forward_sm90", {"kind": "bfloat16", "d": 32, "d_v": 40, "Nq": 300, "Hk": 2,
                                   **case}, {"hopper": tile})


def backward(entry="backward_sm90", **case):
    tile = cuda_forward_sm90.Row(128, 32, 256, 256, "of a test")
    return Form(entry, {"kind": "bfloat16", "Nq": 300, "Nk": 140, "Hk": 2,
                                    "kv_lens": (140, 70), "q_lens": (290, 300), **case},
                {"hopper": tile})


# Of the kernels for sm_90a. In `forward_sm90`, whether a consumer has its turn changes when its
# products run, not what they read.
TILES = ("keys_full", "q_full", "dout_full", "q_empty", "dout_empty", "zeros_fenced",
         "zeros_written", "dS_fenced", "tiles_read")
WAITS = {
    "forward_sm90": (
        "q_full", "k_full", "v_full", "k_empty", "v_empty", "work_full", "zeros_fenced",
        "some_unseen", "seen_written", "panels_free", "panels_fenced", "panels_written"),
    "backward_sm90": (*TILES, "turn", "sums_written", "sums_read"),
    "backward_sm90_wide": (*TILES, "p_full", "p_empty", "scores_full", "ranges_read"),
}
FEATURES = {"mask": "per-query", "bias": "1hqk", "softcap": 5.0}
FORMS = {
    "registers": registers("bfloat16", 32, 16, 2),
    "Q in registers": registers("float16", 64, 32, 4, keep_Q=True),
    "Q split, one loop": registers("tf32x3", 32, 16, 2, split_Q=True, together=True),
    "pairs": registers("bfloat16", 32, 32, 4, pairs=True, d_v=64),
    "pairs, float64": registers("float64", 32, 32, 4, pairs=True, d_v=64),
    "pairs, one has scores": registers("float64", 32, 16, 4, pairs=True, d_v=64),
    "roles": fused("bfloat16", 32, 32, 4, 2, 1, 2),
    "roles and parts, a stage": fused("float16", 32, 32, 4, 2, 2, 1),
    "parts": fused("float16", 32, 32, 4, 1, 2, 2, d=20, d_v=35),
    "TF32, a stage": fused("tf32", 32, 32, 2, 1, 1, 1),
    "parts, TF32": fused("tf32", 32, 32, 4, 1, 2, 1),
    "roles and parts, 3xTF32": fused("tf32x3", 32, 32, 8, 2, 2, 2, True),
    "one has scores, TF32": fused("tf32", 16, 16, 4, 2, 2, 1),
    "float64": fused("float64", 32, 32, 4, 1, 2, 1),
    "roles, float64": fused("float64", 32, 16, 4, 2, 2, 1),
    "roles, float64, one has scores": fused("float64", 16, 32, 8, 2, 2, 1),
    "features": fused("bfloat16", 32, 32, 2, 1, 1, 2, **FEATURES),
    "features, parts": fused("float16", 32, 32, 4, 1, 2, 1, **FEATURES),
    "features, TF32, a stage": fused("tf32", 32, 32, 2, 1, 1, 1, **FEATURES),
    "features, parts, 3xTF32": fused("tf32x3", 32, 32, 4, 1, 2, 1, True, **FEATURES),
    "features, float64": fused("float64", 32, 32, 4, 1, 2, 1, **FEATURES),
    "dbias added": fused("bfloat16", 32, 32, 2, 1, 1, 2, bias="11qk"),
    "dbias over rows, parts": fused("float16", 32, 32, 4, 1, 2, 1, bias="111k"),
    "dbias over rows, float64": fused("float64", 32, 32, 4, 1, 2, 1, bias="b11k"),
    "dbias over keys": fused("tf32", 32, 32, 2, 1, 1, 1, bias="1hq1"),
    "sums of dbias": fused("tf32", 32, 32, 2, 1, 1, 1, bias="1h11")._replace(entry="dbias_sum"),
    "features, float64, one has scores": fused("float64", 16, 16, 4, 1, 4, 1, **FEATURES),
    "forward_wmma": general("forward_wmma"),
    "dkdv": general("dkdv_wmma"),
    "dq": general("dq_wmma"),
    "dbias_wmma": general("dbias_wmma"),
    "normalise": general("normalise", bias_scale=1e5),
    "forward, narrow": simt("forward_simt"),
    "dkdv, narrow": simt("dkdv_simt"),
    "dkdv, narrow, dbias": simt("dkdv_simt", "float64", bias="bhqk"),
    "dq, narrow": simt("dq_simt", mask="dense"),
    "dbias, narrow": simt("dbias_simt", bias="1hq1"),
    "normalise, narrow": simt("normalise_simt", bias="1hq1", bias_scale=1e5),
    "two consumers": hopper(128, 32, Nk=140, kv_lens=(140, 70)),
    "holes": hopper(128, 32, Nk=140, kv_lens=(140, 70), mask="dense", bias="1hqk"),
    "backward": backward(d=64, d_v=56),
    "backward, 64 rows": backward(d=128, d_v=72, Nq=150, q_lens=(140, 150)),
    "backward, wide": backward("backward_sm90_wide", d=200, d_v=72, Nq=200, q_lens=(180, 200)),
    "three consumers": hopper(192, 16, Nk=100, kv_lens=(100, 70), softcap=4.0, Hk=1),
}


@pytest.mark.parametrize("name", FORMS)
def test_no_races(name):
    """Nor such as only the step of a warp's lanes hides."""
    for strict in (False, True):
        found, results, barriers = FORMS[name].run(strict=strict)
        assert results is not None and barriers is not None
        assert found == []


def test_each_barrier_left_out_makes_a_race():
    """In the only order that is tried, where some results are right all the same."""
    places, racing, quiet = set(), set(), set()
    for form in FORMS.values():
        _, want, barriers = form.run()
        waits = WAITS.get(form.entry)
        for name in waits or barriers:
            place = form.entry, name
            if place in racing:
                continue
            # Results go through shared memory in step with shuffles, which order nothing.
            found, got, _ = form.run(skip=name, strict=waits is not None)
            places.add(place)
            if found or got is None:                # or nothing goes on at all
                racing.add(place)
            if found and got == want:
                quiet.add(place)
    assert places - racing == set()
    assert quiet

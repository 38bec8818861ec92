"""The CPU path with any number of threads: sums in parts, whose bits it does not change."""

from dataclasses import replace

import numpy as np
import pytest
from answers import answers, answers_to, floors, judge
from cases import FEATURES, SINK, Case, inputs
from numerics import assert_bit_equal

import cupy_flash as cf
from cupy_flash import device
from cupy_flash.bind import Options, bind_forward
from cupy_flash.plan import make_plan, tuned
from cupy_flash.plan.cpu import NEAR_TILES

LONG = Case("long", Nq=20, Nk=3100, d=32, Hq=2, Hk=1)
HIGH = Case("high", Nq=300, Nk=60, d=32, Hq=4, Hk=1, bias="hqk")
CASES = (
    LONG,
    Case("long-causal", Nq=20, Nk=3100, d=32, Hq=2, Hk=1, causal=True, bias="11qk"),
    Case("long-window", Nq=20, Nk=3100, d=32, Hq=2, Hk=1, window=(900, 0)),
    Case("long-kv-lens", B=2, Nq=12, Nk=3100, d=32, Hq=2, Hk=1, kv_lens=(800, 0)),
    Case("long-mask", Nq=20, Nk=3100, d=32, Hq=2, Hk=1, mask="blocks", softcap=5.0),
    HIGH,
    Case("high-lens", Nq=300, Nk=60, B=2, d=32, Hq=2, Hk=1, causal=True, q_lens=(300, 100),
         kv_lens=(20, 60)),
    *(feature for feature in FEATURES if feature.label in ("decode-long", "decode-long-ragged")),
    *(feature for feature in SINK if feature.label == "sink-decode-long"),
    Case("high-sink", Nq=300, Nk=60, B=2, d=32, Hq=2, Hk=1, causal=True, q_lens=(300, 100),
         kv_lens=(20, 60), bias="hqk", sink=(1.0, -2.0)),
)


def run(x):
    """Forward and backward, the results by name."""
    out, lse = cf.attention(x.q, x.k, x.v, return_lse=True, **x.options)
    g = cf.attention_backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse, **x.options)
    return {"out": out, "lse": lse, **g._asdict()}


@pytest.fixture
def threads(monkeypatch):
    """Sets the number of threads that plans are made for."""
    def set_threads(n):
        monkeypatch.setattr(device, "cpu", lambda: device.Device("cpu", n))
    return set_threads


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_any_number_of_threads(threads, case, n):
    threads(n)
    for dtype in ("float32", "float64"):
        x = inputs(replace(case, dtype=dtype))
        with tuned(Br=32):
            judge(f"{case.id} {dtype}", run(x), *answers(replace(case, dtype=dtype)), floors(x))


def test_a_split_without_visible_keys_may_hold_nan(threads):
    """The keys of most splits lie behind `kv_lens` or outside the window."""
    threads(8)
    for options in ({"kv_lens": (700,)}, {"window": (300, 0), "q_offset": 400}):
        x = inputs(replace(LONG, **options))
        k, v = x.k.copy(), x.v.copy()
        k[:, :, 700:], v[:, :, 700:] = float("nan"), float("inf")
        judge(str(options), run(x._replace(k=k, v=v)), *answers_to(x), floors(x))


def plans(case, n):
    """The plans for both passes with n threads and tiles of 32 rows."""
    x = inputs(case)
    problem, *_ = bind_forward(x.q, x.k, x.v, Options())
    where = device.Device("cpu", n)
    with tuned(Br=32):
        return [make_plan(name, problem, where) for name in ("forward", "backward")]


def test_these_problems_are_split_indeed():
    """Otherwise the tests above would test nothing."""
    for n in (1, 8):
        assert plans(LONG, n)[0].launches[0].splits > 1                 # of the keys
        assert plans(HIGH, n)[1].launches[0].splits > 1                 # of the query rows
        tasks = plans(LONG, n)[1].launches[0].tasks
        assert tasks == (1 if n == 1 else 2)                            # tiles that take turns


NUMBERS = (1, 2, 3, 5, 8, 16)


def assert_same_bits(threads, name, x):
    """Forward and backward with each of `NUMBERS` of threads."""
    results = []
    for n in NUMBERS:
        threads(n)
        results.append(run(x))
    for n, found in zip(NUMBERS[1:], results[1:], strict=True):
        for key, value in found.items():
            if value is not None:
                assert_bit_equal(f"{name}, {n} threads, {key}", value, results[0][key])


# 20 keys are no multiple of the rows of a product, which then touches keys of the next tile.
@pytest.mark.parametrize("tiles", [{"Br": 32}, {"Br": 96}, {"Br": 16, "Bc": 20}], ids=str)
def test_the_table_has_the_same_bits_with_any_number_of_threads(threads, tiles):
    for case in (*CASES, *FEATURES, *SINK):
        with tuned(**tiles):
            assert_same_bits(threads, case.id, inputs(case))


@pytest.mark.parametrize("case", [
    Case("tall", Nq=8400, Nk=320, Hq=1, Hk=1, d=4),
    Case("tall-causal", Nq=4500, Nk=640, Hq=1, Hk=1, d=4, causal=True),
    Case("tall-window", Nq=2200, Nk=640, Hq=2, Hk=1, d=4, window=(500, 0), dtype="float64"),
], ids=lambda case: case.label)
def test_sums_in_two_levels_have_the_same_bits_with_any_number_of_threads(threads, case):
    """Chunks of so many tiles of rows that dK and dV move to their second level on the way."""
    x = inputs(case)
    with tuned(Br=8 if case.dtype == "float64" else 16, Bc=16):
        problem, *_ = bind_forward(x.q, x.k, x.v, Options())
        launch = make_plan("backward", problem, device.Device("cpu", 8)).launches[0]
        assert launch.tasks > launch.splits * NEAR_TILES        # tiles that take turns
        assert_same_bits(threads, case.id, x)
        judge(case.id, run(x), *answers(case), floors(x))


def random_case(seed):
    """A problem of up to 700 queries and 2500 keys with an option or two."""
    rng = np.random.default_rng(seed)
    Hk = int(rng.integers(1, 4))
    options = [{}, {"causal": True}, {"window": (int(rng.integers(900)), 0)}, {"softcap": 3.0},
               {"bias": str(rng.choice(["bhqk", "11qk", "1h1k", "hq1"]))}, {"mask": "padding"}]
    return Case(f"random-{seed}", Nq=int(rng.choice([1, 3, 40, 150, 700])),
                Nk=int(rng.choice([1, 50, 333, 900, 2500])), d=int(rng.integers(1, 70)),
                d_v=int(rng.integers(1, 70)), Hk=Hk, Hq=Hk * int(rng.integers(1, 4)),
                dtype=str(rng.choice(["float32", "float64", "float16"], p=[0.6, 0.3, 0.1])),
                **options[rng.integers(len(options))])


@pytest.mark.parametrize("seed", range(12))
def test_random_problems_have_the_same_bits_with_any_number_of_threads(threads, seed):
    case = random_case(seed)
    assert_same_bits(threads, case.id, inputs(case))

"""The CPU path with any number of threads: keys split in forward, query rows split in backward."""

from dataclasses import replace

import pytest
from answers import answers, answers_to, floors, judge
from cases import FEATURES, Case, inputs

import cupy_flash as cf
from cupy_flash import device
from cupy_flash.bind import Options, bind_forward
from cupy_flash.plan import make_plan, tuned

LONG = Case("long", Nq=20, Nk=3100, d=32, Hq=2, Hk=1)
CASES = (
    LONG,
    Case("long-causal", Nq=20, Nk=3100, d=32, Hq=2, Hk=1, causal=True, bias="11qk"),
    Case("long-window", Nq=20, Nk=3100, d=32, Hq=2, Hk=1, window=(900, 0)),
    Case("long-kv-lens", B=2, Nq=12, Nk=3100, d=32, Hq=2, Hk=1, kv_lens=(800, 0)),
    Case("long-mask", Nq=20, Nk=3100, d=32, Hq=2, Hk=1, mask="blocks", softcap=5.0),
    Case("high", Nq=300, Nk=60, d=32, Hq=4, Hk=1, bias="hqk"),
    Case("high-lens", Nq=300, Nk=60, B=2, d=32, Hq=2, Hk=1, causal=True, q_lens=(300, 100),
         kv_lens=(20, 60)),
    *(feature for feature in FEATURES if feature.label in ("decode-long", "decode-long-ragged")),
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


def test_these_problems_are_split_indeed(threads):
    """Otherwise the tests above would test nothing."""
    x = inputs(LONG)
    problem, *_ = bind_forward(x.q, x.k, x.v, Options())
    for n, more in ((1, False), (8, True)):
        threads(n)
        with tuned(Br=32):
            plans = [make_plan(pass_, problem, device.cpu()) for pass_ in ("forward", "backward")]
        assert [plan.launches[0].splits > 1 for plan in plans] == [more, more]

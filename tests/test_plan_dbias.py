"""Which plan sums dbias where: in the fused backward kernel, and why not."""

from dataclasses import replace

import pytest
from problems import problem_of
from test_plan_cuda import FUSED, H200

from cupy_flash.plan import make_plan
from cupy_flash.plan.cuda_backward_sm80 import smem_pieces
from cupy_flash.plan.cuda_dbias import ADDED, OVER_KEYS, OVER_ROWS, STORED
from cupy_flash.problem import Mask

SIZES = {"batch": 2, "heads_q": 4, "heads_k": 4, "Nq": 1000, "Nk": 3001}
GROUPED = {"heads_k": 2}


def plan_of(shape, **changes):
    """The plan of a float32 problem."""
    p = problem_of(**{
        **SIZES, "d": 64, "d_v": 64, "dtype": "float32", "out_dtype": "float32",
        "precision": "tf32x3", "scale": 0.125, "softcap": 0.0, "mask": Mask(), "bias_shape": shape,
        **changes})
    return make_plan("backward", p, H200)


def main_of(plan):
    return next(x for x in plan.launches if x.entry in ("backward_sm80", "dkdv_wmma"))


def behind(plan):
    """The launches behind the kernel and `backward_postprocess`."""
    entries = [x.entry for x in plan.launches]
    assert entries[:4] == ["normalise", *FUSED]
    return entries[4:]


@pytest.mark.parametrize("shape, changes, how, sums", [
    ((2, 4, 1000, 3001), {}, STORED, None),
    ((1, 4, 1000, 3001), {}, ADDED, None),
    ((1, 4, 1000, 3001), {"dbias_dtype": "float16"}, ADDED, (4 * 1000 * 3008, "float32")),
    ((1, 1, 1000, 3001), {"dbias_dtype": "float64"}, ADDED, (1000 * 3008, "float32")),
    ((2, 1, 1000, 3001), GROUPED, ADDED, None),
    ((2, 1, 1, 3001), {}, OVER_ROWS, (2 * 4 * 3001, "float64")),
    ((1, 1, 1, 3001), GROUPED, OVER_ROWS, (2 * 2 * 3001, "float64")),
    ((1, 4, 1, 1), {}, OVER_ROWS, (2 * 4 * 3001, "float64")),
    ((1, 4, 1, 3001), GROUPED, ADDED, None),
    ((1, 4, 1, 1), GROUPED, OVER_KEYS, (8 * 2 * 4 * 1000, "float64")),
    ((1, 4, 1000, 1), {}, OVER_KEYS, (8 * 2 * 4 * 1000, "float64")),
    ((1, 1, 1000, 1), {"dtype": "float64", "precision": None}, OVER_KEYS,
     (8 * 2 * 4 * 1000, "float64")),
    ((1, 1, 1, 3001), {"dtype": "float64", "precision": None}, OVER_ROWS,
     (2 * 2 * 4 * 3001, "float64")),
], ids=str)
def test_where_dbias_is_summed(shape, changes, how, sums):
    plan = plan_of(shape, **changes)
    main = main_of(plan)
    assert dict(main.config.constants)["dbias"] == how
    assert behind(plan) == ([] if sums is None else ["dbias_sum"])
    assert "dbias" in main.reason and main.reason in str(plan)
    found = {b.name: (b.extent, b.dtype) for b in plan.workspace}
    assert found.pop("dbias_sums", None) == sums
    assert {*found} == {"normalisers", "state", "dq_sums"}
    # What is added to is zeroed before.
    before = next(x for x in plan.launches if x.entry == "backward_preprocess")
    assert bool(before.config.constants) == (how in (ADDED, OVER_KEYS))
    pieces = dict(smem_pieces(main.config))
    assert ("dbias of each thread" in pieces) == (how == OVER_ROWS)


@pytest.mark.parametrize("changes, why", [
    ({"softcap": 2.0}, "behind the softcap"),
    ({"Nq": 2**12, "shape": (1, 4, 1, 3001), **GROUPED}, None),
    ({"Nq": 2**12 + 1, "shape": (1, 4, 1, 3001), **GROUPED}, "rows of grouped heads"),
    ({"Nq": 2**13, "shape": (2, 4, 1, 3001), **GROUPED}, None),
    ({"Nq": 2**20, "shape": (1, 4, 1, 3001)}, None),
    ({"Nk": 2**16, "shape": (1, 4, 1000, 1), "dtype": "float64", "precision": None}, None),
    ({"Nk": 2**16 + 1, "shape": (1, 4, 1000, 1), "dtype": "float64", "precision": None},
     "so many keys"),
    ({"Nk": 2**20, "shape": (1, 4, 1000, 1)}, None),
    ({"batch": 2**14, "shape": (1, 4, 1000, 3001)}, None),
    ({"Nk": 0, "shape": (1, 4, 1000, 1)}, "no scores"),
    ({"Nq": 0, "shape": (1, 4, 1, 3001)}, "no scores"),
    ({"batch": 0, "shape": (1, 4, 1000, 3001)}, "no scores"),
], ids=str)
def test_what_is_left_to_the_general_kernel_and_why(changes, why):
    changes = {"shape": (1, 1, 1000, 3001)} | changes
    plan = plan_of(**changes)
    left = [x for x in plan.launches if x.entry == "dbias_wmma"]
    assert len(left) == (why is not None)
    if left:
        assert why in left[0].reason and left[0].reason in str(plan)
        assert "dbias_sums" not in [b.name for b in plan.workspace]
        assert not any(x.config.constants for x in plan.launches if "process" in x.entry)


def test_a_fixed_order_has_the_general_kernels():
    plan = plan_of((1, 1, 1000, 3001), deterministic=True)
    assert [x.entry for x in plan.launches] == [
        "normalise", "backward_preprocess", "dkdv_wmma", "dq_wmma", "dbias_wmma"]
    assert not any(x.config.constants for x in plan.launches)


@pytest.mark.parametrize("wrt, entries", [
    (("dbias",), ["backward_preprocess", "backward_sm80", "dbias_sum"]),
    (("dq", "dbias"), [*FUSED, "dbias_sum"]),
    (("dk", "dv"), FUSED[:2]),
], ids=str)
def test_a_gradient_that_is_not_asked_for_costs_nothing(wrt, entries):
    plan = plan_of((2, 1, 1, 3001), wrt=wrt)
    assert [x.entry for x in plan.launches] == ["normalise", *entries]
    assert dict(main_of(plan).config.constants)["dbias"] == ("dbias" in wrt and OVER_ROWS)


def test_splits_of_the_rows_have_sums_of_their_own():
    plan = plan_of((1, 1, 1, 40), Nq=2**20, Nk=40, batch=1, heads_q=1, heads_k=1)
    main = main_of(plan)
    assert main.splits > 1
    assert {b.name: b.extent for b in plan.workspace}["dbias_sums"] == main.splits * 40


def test_sums_that_do_not_fit_take_another_tile():
    """In 99 KiB there is no room for a sum of each thread beside 128 keys."""
    small = replace(H200, arch=120, smem=99 * 1024)
    p = plan_of((1, 1, 1, 3001), dtype="bfloat16", out_dtype="bfloat16", precision=None).problem
    tiles = [main_of(make_plan("backward", p, device)).config.Bc for device in (H200, small)]
    assert tiles == [128, 64]


def test_kernels_for_narrow_heads_say_nothing_of_the_fused_one():
    (launch,) = (x for x in plan_of((1, 4, 1000, 3001), d=3, d_v=1).launches
                 if x.entry == "dbias_simt")
    assert launch.reason == "a column of dbias of each thread"

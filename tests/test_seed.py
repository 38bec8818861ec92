"""Answers known in advance, and tiles of every shape that must give them."""

from dataclasses import replace

import numpy as np
import pytest
from answers import answers, floors, judge
from cases import DTYPES, Case, inputs
from numerics import assert_bit_equal
from test_backward import assert_same_gradients, gradients
from test_forward import attend

import cupy_flash as cf
from cupy_flash import reference
from cupy_flash.plan import tuned

ALL = tuple(DTYPES)
TILES = {
    "one tile": {"Br": 512, "Bc": 512},
    "singletons": {"Br": 1, "Bc": 1},
    "one key at a time": {"Br": 96, "Bc": 1},
    "one query at a time": {"Br": 1, "Bc": 96},
    "uneven": {"Br": 7, "Bc": 13},
    "wide": {"Br": 16, "Bc": 128},
    "high": {"Br": 128, "Bc": 6},
    "always rescaled": {"lazy": 0.0},
    "hardly ever rescaled": {"lazy": 60.0},
}


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("added", [0, 1000, -1000])
@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
def test_two_weights_of_1_and_3(backend, dtype, added, tiles):
    """Scores 0 and ln 3 with values 2 and 6: (2 + 3 * 6) / 4 = 5, whatever is added to both."""
    q, k = np.zeros((4, 1), DTYPES[dtype]), np.zeros((2, 1), DTYPES[dtype])
    v = np.array([[2], [6]], DTYPES[dtype])
    bias = np.array([0, np.log(3)]) + added
    arrays = (backend.asarray(x) for x in (q, k, v))
    with tuned(**tiles):
        out, lse = cf.attention(*arrays, bias=backend.asarray(bias), return_lse=True)
    # ln 3 + 1000 in float32 is off by up to 3e-5, and a weight of 3 by as much.
    rounding = {"float16": 2e-3, "bfloat16": 1e-2, "float64": 2e-13}.get(dtype, 1e-4)
    np.testing.assert_allclose(backend.asnumpy(out).astype(np.float64), 5,
                               rtol=rounding if added else min(rounding, 1e-6))
    np.testing.assert_allclose(backend.asnumpy(lse), np.log(4) + added, rtol=1e-6)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("tiles", [{}, TILES["high"], TILES["wide"]], ids=str)
def test_a_sum_of_65536_equal_terms(backend, dtype, tiles):
    """An `l` kept in the input dtype stops growing at 256 (bfloat16) or 2048 (float16)."""
    q, k = np.zeros((3, 8), DTYPES[dtype]), np.ones((65536, 8), DTYPES[dtype])
    v = np.full((65536, 1), 3, DTYPES[dtype])
    with tuned(**tiles):
        out, lse = cf.attention(*(backend.asarray(x) for x in (q, k, v)), return_lse=True)
    np.testing.assert_array_equal(backend.asnumpy(out), v[:3])
    np.testing.assert_allclose(backend.asnumpy(lse), np.log(65536), rtol=2e-7)


@pytest.mark.parametrize("offset", [0, 300, 872])
@pytest.mark.parametrize("tiles", [{"Br": 128, "Bc": 96}, *TILES.values()], ids=str)
def test_one_tile_of_128_queries_against_1000_keys(backend, offset, tiles):
    """Queries `offset` to `offset + 127` of 1000, with the largest score at the very end."""
    rng = np.random.default_rng(offset)
    q, k, v = rng.standard_normal((3, 1000, 64))
    k[-1] = 8 * q[offset + 64]
    q = q[offset : offset + 128]
    with tuned(**tiles):
        for options in ({}, {"causal": True, "q_offset": offset}):
            out, lse = cf.attention(*(backend.asarray(x) for x in (q, k, v)), return_lse=True,
                                    **options)
            want, want_lse = reference.attention(q, k, v, compute_dtype=np.longdouble, **options)
            error = np.abs(backend.asnumpy(out) - want).max()
            assert error < 5.2e-15, (options, error)
            assert np.abs(backend.asnumpy(lse) - want_lse).max() < 2e-14


CASES = (
    Case("tiles", Nq=40, Nk=110, d=20, Hq=2, Hk=1, causal=True, bias="hqk", softcap=9.0,
         data="late"),
    Case("tiles-mask", Nq=40, Nk=110, d=20, d_v=9, B=2, Hq=4, Hk=2, mask="blocks", alibi="bh",
         kv_lens=(110, 60), data="scales"),
    Case("tiles-window", Nq=110, Nk=40, d=20, window=(9, 4), data="mean1"),
)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_the_same_scores_cut_into_tiles(backend, case, tiles, dtype):
    case = replace(case, dtype=dtype)
    x = inputs(case)
    with tuned(**tiles):
        out, lse = attend(backend, x)
        g = gradients(backend, x, wide_out=True)
    judge(f"{case.id} {tiles}", {"out": out, "lse": lse, **g}, *answers(case), floors(x))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_its_neighbours(backend, dtype):
    """Each row decides for itself when its reference moves: others may hold anything."""
    x = inputs(Case("alone", Nq=60, Nk=150, d=24, Hq=2, Hk=1, dtype=dtype, data="late"))
    out, lse = attend(backend, x)
    own = np.arange(60) % 7 == 3
    for factor in (0, -1, 30, np.nan):
        q = np.where(own[:, None], x.q, x.q * x.q.dtype.type(factor))
        other, other_lse = attend(backend, x._replace(q=q))
        assert_bit_equal(f"{factor}", other[:, :, own], out[:, :, own])
        assert_bit_equal(f"{factor}", other_lse[:, :, own], lse[:, :, own])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounded_probabilities_are_as_the_plain_program_rounds_them(backend, dtype):
    """`round_P` repeats the rounding of tensor cores: within the rule, and not the default."""
    case = Case("round", Hq=4, Hk=2, causal=True, dtype=dtype)
    x = inputs(case)
    exact, _ = attend(backend, x, out_dtype=np.float32)
    with tuned(round_P=True):
        rounded, lse = attend(backend, x, out_dtype=np.float32)
        g = gradients(backend, x, wide_out=True, grad_dtype=np.float32)
    judge(case.id, {"out": rounded, "lse": lse, **g}, *answers(case))
    want = answers(case)[0].out
    if backend.name == "cpu":               # a GPU always rounds
        assert np.abs(rounded - want).max() > 10 * np.abs(exact - want).max()


def test_tuning_ends_with_its_context(backend):
    x = inputs(CASES[0])
    want = {"out": attend(backend, x)[0], **gradients(backend, x)}
    with tuned(Br=16, Bc=6):
        attend(backend, x)
    assert_same_gradients("after", {"out": attend(backend, x)[0], **gradients(backend, x)}, want)

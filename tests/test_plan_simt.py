"""Plans for narrow heads: kernels without tensor cores, with which tiles, in how many blocks."""

from dataclasses import replace
from math import ceil

import pytest
from test_hopper import HOPPER
from test_plan_cuda import H200, problem
from units import SMEM, device

from cupy_flash.plan import cuda_simt, make_plan
from cupy_flash.plan.cuda import kernel_of
from cupy_flash.plan.kernel import SPLIT_KEYS, Refusal
from cupy_flash.problem import Mask

DTYPES = (("float32", "tf32x3"), ("float64", None))
ENTRIES = ("forward_simt", "dkdv_simt", "dq_simt", "dbias_simt", "normalise_simt")


def narrow(dtype="float32", **changes):
    """One head of points in a few dimensions."""
    return problem(**{"batch": 1, "heads_q": 1, "heads_k": 1, "Nq": 32768, "Nk": 32768, "d": 3,
                      "d_v": 1, "dtype": dtype, "out_dtype": dtype,
                      "precision": dict(DTYPES)[dtype], **changes})


def entries(direction, p, gpu=H200):
    return [launch.entry for launch in make_plan(direction, p, gpu).launches]


@pytest.mark.parametrize("dtype, precision", DTYPES)
@pytest.mark.parametrize("arch", SMEM)
def test_narrow_heads_have_them_on_every_gpu(arch, dtype, precision):
    """Up to 8 columns, with any option; what they do not serve says why."""
    for d in range(1, 12):
        for d_v in range(1, 12):
            for options in ({}, {"has_mask": True, "softcap": 3.0, "has_alibi": True},
                            {"bias_shape": (1, 1, 1, 3000)}, {"deterministic": True}):
                p = problem(d=d, d_v=d_v, dtype=dtype, out_dtype=dtype, precision=precision,
                            **options)
                serves = max(d, d_v) <= 8
                forward, backward = (make_plan(name, p, device(arch))
                                     for name in ("forward", "backward"))
                assert ("forward_simt" in str(forward.launches)) == serves
                assert ({"dkdv_simt", "dq_simt"} <= {x.entry for x in backward.launches}) == serves
                assert any(x.entry.startswith("dbias") for x in backward.launches) == (
                    p.bias_shape is not None)
                if not serves:
                    assert "not dkdv_simt: it keeps whole rows in registers" in str(backward)


@pytest.mark.parametrize("changes, why", [
    ({"dtype": "bfloat16", "out_dtype": "bfloat16", "precision": None}, "16-bit products"),
    ({"precision": "tf32"}, "'tf32' asks for operands that are rounded"),
    ({"d": 9}, "up to 8"), ({"d_v": 9}, "up to 8"),
], ids=str)
def test_what_they_do_not_serve_says_why(changes, why):
    p = replace(narrow(), **changes)
    for entry in ("forward_simt", "dkdv_simt"):
        offer = kernel_of(entry).offer(p, H200)
        assert isinstance(offer, Refusal) and why in offer.reason
    assert why in str(make_plan("backward", p, H200))


def test_hopper_has_them_too():
    assert entries("forward", narrow(), HOPPER) == ["forward_simt", "combine"]
    assert entries("backward", narrow(), HOPPER) == [
        "backward_preprocess", "dkdv_simt", "dq_simt", "dq_sum", "backward_sum"]


def test_all_parts_of_a_backward_pass_are_theirs():
    """So that scores are the same to the bit in all of them."""
    p = narrow(batch=200, heads_q=4, heads_k=4, Nq=500, Nk=3000, bias_shape=(1, 4, 500, 1))
    assert entries("backward", p) == [
        "normalise_simt", "backward_preprocess", "dkdv_simt", "dq_simt", "dbias_simt"]
    whole = narrow(batch=200, heads_q=4, heads_k=4, Nq=500, Nk=3000,
                   bias_shape=(200, 4, 500, 3000))
    assert entries("backward", whole) == [
        "normalise_simt", "backward_preprocess", "dkdv_simt", "dq_simt"]
    wide = problem(bias_shape=(1, 4, 1000, 1), deterministic=True)
    assert entries("backward", wide) == [
        "normalise", "backward_preprocess", "dkdv_wmma", "dq_wmma", "dbias_wmma"]


def test_gradients_that_are_not_asked_for_have_no_kernel():
    p = narrow(Nq=1000, Nk=2000)
    assert "dq_simt" not in entries("backward", replace(p, wrt=("dk", "dv")))
    only_q = entries("backward", replace(p, wrt=("dq",)))
    assert "dkdv_simt" not in only_q and "dq_simt" in only_q


def test_each_row_can_be_chosen():
    chosen = set()
    for dtype, _ in DTYPES:
        for d in range(1, 9):
            for d_v in range(1, 9):
                for N in (100, 32768):
                    p = narrow(dtype, d=d, d_v=d_v, Nq=N, Nk=N, bias_shape=(1, 1, 1, N))
                    for q in (p, narrow(dtype, d=d, d_v=d_v, Nq=N, Nk=N)):
                        for entry in ENTRIES:
                            if entry == "dbias_simt" and not q.bias_shape:
                                continue
                            offer = kernel_of(entry).offer(q, H200)
                            c = offer.config
                            assert (c.d, c.d_v) == (d, d_v) and offer.smem_bytes < 48 << 10
                            own = {"rows": c.Br, "keys": c.Bc, "dbias": c.Bc}[kernel_of(entry).owns]
                            chosen.add((entry, dtype, own // (32 * c.warps), c.warps,
                                        dict(c.constants)["chunk"], offer.reason))
    assert chosen == {(entry, dtype, row.own, row.warps, row.chunk, row.reason)
                      for entry in ENTRIES for dtype, rows in kernel_of(entry).rows.items()
                      for row in rows}


@pytest.mark.parametrize("dtype, _", DTYPES)
@pytest.mark.parametrize("Nq, Nk", [(32768, 32768), (1, 2**20), (2**20, 40), (5000, 5000),
                                    (64, 2**19), (2**19, 64)])
def test_every_shape_fills_the_gpu(Nq, Nk, dtype, _):
    """With keys or rows in splits, each of a block's length at least, none of them empty."""
    p = narrow(dtype, Nq=Nq, Nk=Nk)
    forward = make_plan("forward", p, H200).launches[0]
    backward = make_plan("backward", p, H200)
    dq, dkdv = (next(x for x in backward.launches if x.entry == entry)
                for entry in ("dq_simt", "dkdv_simt"))
    for launch, walked in ((forward, Nk), (dq, Nk), (dkdv, Nq)):
        assert launch.tasks >= H200.sms or launch.splits >= walked // (2 * SPLIT_KEYS), launch
    for launch in (forward, dq):
        keys = ceil(ceil(Nk / launch.splits) / launch.config.Bc) * launch.config.Bc
        assert (launch.splits - 1) * keys < Nk <= launch.splits * keys
    sizes = {buffer.name: buffer.extent for buffer in backward.workspace}
    assert sizes.get("dq_parts", 0) == (dq.splits * Nq * 3 if dq.splits > 1 else 0)
    assert sizes.get("dk_sums", 0) == ("pieces" in dict(dkdv.config.constants)) * (
        dkdv.splits * Nk * 3)


def test_sums_over_many_rows_are_cut():
    """Into short pieces, which blocks can share out, and very many into longer ones."""
    def pieces(**changes):
        launches = make_plan("backward", narrow(**changes), H200).launches
        main = next(x for x in launches if x.entry == "dkdv_simt")
        return dict(main.config.constants).get("pieces", 0)

    assert pieces() == pieces(Nq=513, Nk=100) == pieces(Nq=2**16) == cuda_simt.PIECE == 512
    assert pieces(Nq=512) == 0 and pieces(Nq=2**16 + 1) == 2048
    assert pieces(heads_q=2, Nq=257) == 512                 # packed rows
    assert pieces(mask=Mask(left=300, right=0)) == 0        # no key is seen by many


def test_few_rows_have_small_blocks():
    """And so have many sequences of a length that would fill large ones badly."""
    def warps(**changes):
        return make_plan("forward", narrow(**changes), H200).launches[0].config.warps

    assert warps() == warps(batch=100, Nq=1024, Nk=1024) == 4
    assert warps(Nq=100) == warps(Nq=3000, Nk=100) == warps(batch=1000, Nq=200, Nk=200) == 2


def test_numbers_are_no_part_of_a_unit():
    """But head dims are, which are not padded."""
    one = make_plan("forward", narrow(), H200).launches[0].config
    for change in ({"scale": 3.0}, {"Nq": 70000, "Nk": 50000}, {"mask": Mask(right=0)}):
        assert make_plan("forward", narrow(**change), H200).launches[0].config == one, change
    assert make_plan("forward", narrow(d=2), H200).launches[0].config != one
    for change in ({"scale": -1.0}, {"scale": 0.0}, {"softcap": 2.0}):
        constants = make_plan("forward", narrow(**change), H200).launches[0].config.constants
        assert dict(constants)["scaled"], change


def test_a_plan_says_what_it_does_and_why():
    text = str(make_plan("backward", narrow(), H200))
    for part in ("dkdv_simt: Br 128, Bc 512", "each load serves four keys", "splits of the rows",
                 "dq_simt: Br 512, Bc 128", "splits of the keys, since 64 tiles of rows",
                 "workspace dq_parts:"):
        assert part in text, part


def test_other_rows_can_be_tried():
    """As a script that times them does."""
    from cupy_flash.plan import tuned
    from cupy_flash.plan.cuda import KERNELS

    row = cuda_simt.Tile(8, 4, 512, 4, 1, 16, 2, "of a test")
    tried = tuple(replace(kernel, rows={"float32": (row,), "float64": (row,)})
                  if kernel.entry == "forward_simt" else kernel for kernel in KERNELS)
    with tuned(kernels=tried):
        launch = make_plan("forward", narrow(), H200).launches[0]
    assert (launch.config.Br, launch.config.Bc) == (1024, 512) and "of a test" in launch.reason

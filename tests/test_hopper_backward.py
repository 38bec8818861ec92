"""The backward kernel for sm_90a without a GPU: what ptxas makes of it, and when it is chosen."""

import nvrtc
import pytest
from test_hopper import HOPPER, problem
from test_plan_cuda import H200

from cupy_flash.backends.cuda.unit import unit
from cupy_flash.plan import make_plan
from cupy_flash.plan.cuda import kernel_of
from cupy_flash.plan.cuda_backward_sm90 import KERNELS
from cupy_flash.problem import Mask

SPILLED = 32        # bytes, of any compiler
USUAL = {"d": 64, "d_v": 64, "dtype": "bfloat16", "out_dtype": "bfloat16"}


def compiled(launch, lines=""):
    """The compiler's log of a launch's kernel."""
    _, text = unit(launch.entry, launch.config, launch.smem_bytes)
    cubin, log = nvrtc.compile(lines + text, kernel_of(launch.entry).target or 90)
    assert cubin is not None, log
    return cubin, log


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("entry, row", [(kernel.entry, row) for kernel in KERNELS
                                        for row in kernel.rows], ids=str)
def test_every_row_compiles_as_it_is_meant(entry, row, dtype):
    """No warning that products wait for each other or registers stay, next to nothing spilled."""
    p = problem(**USUAL | {"d": row.d, "d_v": row.d - 8, "dtype": dtype, "out_dtype": dtype})
    before, launch, behind = make_plan("backward", p, HOPPER).launches
    assert (launch.entry, launch.config.Br, launch.config.Bc) == (entry, row.Br, row.Bc)
    _, log = compiled(launch)
    assert "C75" not in log, log
    found = nvrtc.resources(log)
    assert max(found["spill_stores"], found["stack"]) <= SPILLED and found["static_smem"] == 0
    for small in (before, behind):
        compiled(small)


def test_the_build_that_stops_endless_waits_compiles():
    launch = make_plan("backward", problem(**USUAL), HOPPER).launches[1]
    cubin, log = compiled(launch, "#define CF_TRAP_AFTER 1000000\n")
    assert all(name in cubin for name in (b"waits for ever", b"keys_full", b"dout_empty")), log


def layout(name, strides=(1 << 20, 1 << 18, 128, 2), dtype="bfloat16"):
    return name, (8, 4, 256, 64), strides, dtype, True


@pytest.mark.parametrize("changes, words", [
    ({"dtype": "float32", "out_dtype": "float32", "precision": "tf32"}, "16 bits"),
    ({"has_mask": True}, "no mask"), ({"bias_shape": (1, 1, 1, 1)}, "no mask, bias"),
    ({"softcap": 3.0}, "softcap"), ({"has_alibi": True}, "ALiBi"),
    ({"deterministic": True}, "no order"),
    ({"heads_q": 12, "heads_k": 4}, "a group of 3 heads"),
    ({"Nk": 2**30}, "too long"), ({"Nq": 2**29, "heads_q": 4, "heads_k": 2}, "too long"),
    ({"layouts": (layout("dout", dtype="float32"),)}, "dout has float32"),
    ({"layouts": (layout("dout"),), "unaligned": ("dout",)}, "dout does not begin"),
    ({"layouts": (layout("k", (1 << 20, 1 << 18, 120, 2)),)}, "strides of k"),
])
def test_what_it_cannot_do_is_said(changes, words):
    p = problem(**USUAL | changes)
    plan = make_plan("backward", p, HOPPER)
    assert all(words in refusal.reason for refusal in plan.refusals[:len(KERNELS)])
    assert not {launch.entry for launch in plan.launches} & {kernel.entry for kernel in KERNELS}


def test_other_gpus_have_the_fused_kernel_and_say_why():
    p = problem(**USUAL, mask=Mask(right=0))
    plan = make_plan("backward", p, H200)
    assert plan.launches[1].entry == "backward_sm80"
    assert "not backward_sm90, backward_sm90_wide: it needs sm_90a" in str(plan)


def test_strides_of_what_is_copied_do_not_matter():
    p = problem(**USUAL, layouts=(layout("q", (8, 16, 24, 4)),), copied=("q",))
    assert KERNELS[0].offer(p, HOPPER).reason == KERNELS[0].rows[0].reason

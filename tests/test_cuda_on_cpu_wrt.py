"""Gradients that are not asked for, on fibers: the others keep their bits."""

import pytest
from cases import KINDS, Case, inputs
from cuda_on_cpu.harness import COMPILER, Fibers
from numerics import assert_bit_equal
from test_cuda_on_cpu_fused import SMALL
from test_hopper_on_cpu import TWO, padded

import cupy_flash as cf

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler on Linux")

NAMES = ("q", "k", "v", "bias", "sink")
# The kernels, a type, head dims, and what else a call has.
FAMILIES = {
    **{f"sm80 {kind}": ({"fused": SMALL[kind]}, kind, 20, {"bias": "bhqk"}) for kind in SMALL},
    "sm80, roles": ({"fused": (32, 32, 4, 2, 1, 2)}, "bfloat16", 20, {}),
    "sm90": ({"hopper": TWO}, "bfloat16", 40, {}),
    "sm90, wide": ({"hopper": TWO}, "float16", 136, {}),
    "wmma": ({}, "float32", 20, {"deterministic": True, "bias": "1hqk"}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_wrt_changes_no_bit_of_what_is_asked_for(family):
    """But for dq, where additions have no order: there, one block adds after the other."""
    tiles, kind, d, more = FAMILIES[family]
    dtype, precision = KINDS.get(kind, (kind, None))
    order = {"deterministic": True} if more.pop("deterministic", False) else {}
    x = inputs(Case("wrt", Nq=70, Nk=90, B=2, Hq=2, Hk=1, d=d, d_v=d, dtype=dtype,
                    precision=precision, causal=True, **more))
    x = x._replace(**{name: padded(getattr(x, name)) for name in ("q", "k", "v", "dout")})
    out, lse = cf.attention(x.q, x.k, x.v, return_lse=True, **x.options)

    def run(wrt):
        return Fibers(grid=1, **tiles).backward(x.dout, x.q, x.k, x.v, out, lse, wrt=wrt,
                                                **order, **x.options)

    want = run(None)
    for wrt in (("q",), ("k",), ("v",), ("k", "q"), *((("bias",),) if more else ())):
        for name, one, other in zip(NAMES, run(wrt), want, strict=True):
            assert (one is None) == (name not in wrt)
            if one is not None and (name != "q" or order):
                assert_bit_equal(f"d{name} of {wrt}", one, other)

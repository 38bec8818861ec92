"""Rows of very different size, by every kind of CUDA kernel on fibers: the rule for rows."""

from dataclasses import replace

import pytest
from answers import answers_to, floors, judge
from cases import KINDS, SPREAD, inputs
from cuda_on_cpu.harness import COMPILER, Fibers
from test_cuda_on_cpu import wide
from test_cuda_on_cpu_fused import SMALL
from test_cuda_on_cpu_registers import fibers
from test_hopper_on_cpu import TWO, padded

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler on Linux")

NAMES = ("out", "lse", "dq", "dk", "dv")
FORWARD = {"general": lambda kind: Fibers(), "registers": lambda kind: fibers(),
           "hopper": lambda kind: Fibers(hopper=TWO)}
BACKWARD = {"general": lambda kind: Fibers(), "fused": lambda kind: Fibers(fused=SMALL[kind]),
            "hopper": lambda kind: Fibers(hopper=TWO)}
PAIRS = [(kind, *pair) for kind in KINDS
         for pair in (("general", "general"), ("registers", "fused"), ("hopper", "hopper"))
         if pair[0] != "hopper" or kind in ("float16", "bfloat16")]


@pytest.mark.parametrize("feature", [x for x in SPREAD if x.window], ids=lambda x: x.label)
@pytest.mark.parametrize("kind, forward, backward", PAIRS)
def test_small_rows_are_as_accurate_as_large_ones(kind, forward, backward, feature):
    dtype, precision = KINDS[kind]
    x = inputs(replace(feature, Nq=100, Nk=90, d=20, d_v=36, dtype=dtype, precision=precision))
    x = x._replace(**{name: padded(getattr(x, name)) for name in ("q", "k", "v", "dout")})
    dout, q, k, v = x.dout, x.q, x.k, x.v
    out, lse = FORWARD[forward](kind).forward(q, k, v, out_dtype=wide(x), **x.options)
    g = BACKWARD[backward](kind).backward(dout, q, k, v, out, lse, dlse=x.dlse,
                                          grad_dtype=wide(x), **x.options)
    judge(f"{feature.label} {kind}", dict(zip(NAMES, (out, lse, *g[:3]), strict=True)),
          *answers_to(x), floors(x))

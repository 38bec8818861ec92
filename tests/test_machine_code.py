"""What `python -m bench machine-code` calls the same code, and which kernels it looks at."""

import sys
from pathlib import Path

import nvrtc

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import machine_code

UNIT = """\
{comment}
extern "C" __global__ void __launch_bounds__({threads}) twice(float* x, const float* y) {{
  x[threadIdx.x] = {factor} * y[threadIdx.x];
}}
"""


def code(comment="", factor="2.f", threads=128):
    cubin, log = nvrtc.compile(UNIT.format(comment=comment, factor=factor, threads=threads), 80)
    assert cubin is not None, log
    return machine_code.sections(cubin)


def test_a_comment_changes_no_machine_code_and_a_factor_does():
    assert ".text.twice" in code()
    assert machine_code.different_sections(code(), code("// a digest")) == []
    assert machine_code.different_sections(code(), code(factor="3.f")) == [".text.twice"]


def test_the_same_instructions_with_other_needs_differ():
    assert machine_code.different_sections(code(), code(threads=64)) == [".nv.info.twice"]


def test_every_kernel_is_looked_at():
    found = [*machine_code.units("80"), *machine_code.units("90a")]
    for entry in ("forward_wmma", "forward_sm80", "combine", "backward_preprocess",
                  "backward_sm80", "backward_postprocess", "dkdv_wmma", "dq_wmma", "dbias_wmma",
                  "forward_sm90", "backward_sm90", "backward_sm90_wide"):
        assert any(name.startswith(f"{entry}_") for name in found), entry

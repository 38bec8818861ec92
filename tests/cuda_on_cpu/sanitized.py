"""Every kernel once under AddressSanitizer; run by test_cuda_on_cpu_faults.py.

The first argument is how many bytes of shared memory the blocks get less than they ask for.
"""

import os
import sys
from itertools import product

from cases import Case, inputs

from cuda_on_cpu.harness import Fibers
from cupy_flash.plan import tuned
from cupy_flash.plan.cuda_forward_sm80 import Row
from cupy_flash.plan.cuda_simt import Tile


def main(missing):
    os.environ.pop("LD_PRELOAD", None)          # the compiler needs no sanitizer
    flags = ("-O1", "-g1", "-fsanitize=address", "-fno-omit-frame-pointer")
    for dtype in ("bfloat16", "float64"):
        x = inputs(Case("memory", Nq=19, Nk=37, Hq=2, Hk=1, d=21, d_v=35, dtype=dtype,
                        causal=True, mask="padding", bias="1hqk", alibi="h", softcap=5.0,
                        kv_lens=(37,)))
        for sms in (1, 64):             # without splits of the keys, and with
            fibers = Fibers(sms=sms, missing=missing, flags=flags)
            out, lse = fibers.forward(x.q, x.k, x.v, **x.options)
        fibers.backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse, **x.options)
    # The forward kernel in registers, last so that a test's missing bytes show in the first one.
    for dtype, d, d_v, pairs in (("bfloat16", 21, 35, False), ("float16", 40, 64, True),
                                 ("float64", 24, 16, False)):
        x = inputs(Case("memory", Nq=67, Nk=77, Hq=2, Hk=1, d=d, d_v=d_v, dtype=dtype, causal=True,
                        kv_lens=(70,)))
        row = Row(32, 32, 4 if pairs else 2, 256, "of a test", pairs=pairs)
        for sms in (1, 64):
            Fibers(sms=sms, missing=missing, flags=flags, registers=row).forward(
                x.q, x.k, x.v, **x.options)
    fused_backward(missing, flags)
    narrow_heads(missing, flags)


def fused_backward(missing, flags):
    """Its forms: two roles and one, one stage and two, rows of whole 16-byte copies and not; the
    ways in which it sums dbias."""
    for dtype, d, d_v, tile in (("bfloat16", 24, 40, (32, 32, 4, 2, 1, 2)),
                                ("float16", 21, 35, (32, 32, 4, 1, 2, 2)),
                                ("float64", 24, 16, (32, 32, 4, 1, 2, 1))):
        x = inputs(Case("memory", Nq=67, Nk=77, Hq=2, Hk=1, d=d, d_v=d_v, dtype=dtype, causal=True,
                        kv_lens=(70,)))
        fibers = Fibers(missing=missing, flags=flags, fused=tile)
        out, lse = Fibers(flags=flags).forward(x.q, x.k, x.v, **x.options)
        fibers.backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse, **x.options)
    for dtype, bias in product(("float16", "float64"), ("11qk", "b11k", "1hq1", "1h11")):
        x = inputs(Case("memory", Nq=67, Nk=77, Hq=2, Hk=1, d=21, d_v=35, dtype=dtype, bias=bias))
        fibers = Fibers(missing=missing, flags=flags, fused=(32, 32, 4, 1, 2, 1))
        out, lse = Fibers(flags=flags).forward(x.q, x.k, x.v, **x.options)
        fibers.backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse, **x.options)


def narrow_heads(missing, flags):
    """Records of whole pieces of 16 bytes and of others; dbias of each score and a sum."""
    tile = Tile(2, 1, 32, 8, 2, 16, 2, "of a test")
    for dtype, d, d_v, bias in (("float32", 3, 2, "bhqk"), ("float64", 8, 1, "1hq1")):
        x = inputs(Case("memory", Nq=67, Nk=77, Hq=2, Hk=1, d=d, d_v=d_v, dtype=dtype, causal=True,
                        mask="padding", bias=bias, alibi="h", kv_lens=(70,)))
        for sms in (1, 64):
            fibers = Fibers(sms=sms, missing=missing, flags=flags, simt=tile)
            out, lse = fibers.forward(x.q, x.k, x.v, **x.options)
            fibers.backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse, **x.options)


if __name__ == "__main__":
    with tuned(split_keys=16):
        main(int(sys.argv[1]))
    print("clean")

"""Every kernel once under AddressSanitizer; run by test_cuda_on_cpu_faults.py.

The first argument is how many bytes of shared memory the blocks get less than they ask for.
"""

import os
import sys

from cases import Case, inputs

from cuda_on_cpu.harness import Fibers
from cupy_flash.plan import cuda


def main(missing):
    os.environ.pop("LD_PRELOAD", None)          # the compiler needs no sanitizer
    cuda.SPLIT_KEYS = 16
    flags = ("-O1", "-g1", "-fsanitize=address", "-fno-omit-frame-pointer")
    for dtype in ("bfloat16", "float64"):
        x = inputs(Case("memory", Nq=19, Nk=37, Hq=2, Hk=1, d=21, d_v=35, dtype=dtype,
                        causal=True, mask="padding", bias="1hqk", alibi="h", softcap=5.0,
                        kv_lens=(37,)))
        for sms in (1, 64):             # without splits of the keys, and with
            fibers = Fibers(sms=sms, missing=missing, flags=flags)
            out, lse = fibers.forward(x.q, x.k, x.v, **x.options)
        fibers.backward(x.dout, x.q, x.k, x.v, out, lse, dlse=x.dlse, **x.options)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    print("clean")

"""``python -m cupy_flash warmup``: compile the kernels before anybody waits for them."""

import argparse
import sys
import time

import numpy as np

import cupy_flash as cf
from cupy_flash.cli import devices

DTYPES = ("float16", "bfloat16", "float32", "float64")


def add_arguments(parser):
    """Add the options of the command."""
    parser.add_argument("dtypes", nargs="*", metavar="dtype", type=_known,
                        help=f"any of {', '.join(DTYPES)}; without one, float32 and float64")
    parser.add_argument("--forward", action="store_true", help="leave backward out")
    parser.add_argument("--cpu", action="store_true", help="leave CUDA devices out")
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128], metavar="D",
                        help="head dims to compile for on CUDA devices (default: 64 128)")


def run(arguments) -> int:
    """Compile; return 0, or 2 when bfloat16 is asked for without ml_dtypes."""
    gpus = [] if arguments.cpu else devices.cuda_devices()[0]
    for name in arguments.dtypes or ("float32", "float64"):
        try:
            dtype = _dtype(name)
        except ImportError:
            print('bfloat16 needs ml_dtypes: pip install ml_dtypes', file=sys.stderr)
            return 2
        start = time.perf_counter()
        compile_for(dtype, backward=not arguments.forward)
        print(f"{name}: ready after {time.perf_counter() - start:.1f} s", flush=True)
        for gpu in gpus:
            start = time.perf_counter()
            for d in arguments.head_dims:
                compile_on(gpu, dtype, d, backward=not arguments.forward)
            print(f"{name} on {gpu.name}: ready after {time.perf_counter() - start:.1f} s",
                  flush=True)
    return 0


def compile_for(dtype, *, backward):
    """Call the functions so that every kernel of a dtype runs once.

    Parameters
    ----------
    dtype : numpy.dtype
    backward : bool
        Whether the kernels of backward are wanted too.
    """
    # One query on many keys: where there are several threads, they share the keys, and a second
    # kernel merges their results.
    q, k = np.ones((1, 16), dtype), np.ones((2**15, 16), dtype)
    cf.attention(q, k, k)
    if backward:
        # One head with many queries: several threads share it, and a kernel adds up their parts.
        x = np.ones((512, 16), dtype)
        out, pullback = cf.attention_vjp(x, x, x, bias=np.zeros((512, 1), dtype))
        pullback(out)


def compile_on(gpu, dtype, d, *, backward):
    """Compile the CUDA kernels of a dtype and a head dim, with features and without.

    Parameters
    ----------
    gpu : probe.CudaDevice
    dtype : numpy.dtype
    d : int
    backward : bool
        Whether the kernels of backward are wanted too.
    """
    q, x = gpu.asarray(np.ones((1, d), dtype)), gpu.asarray(np.ones((4096, d), dtype))
    bias = gpu.asarray(np.zeros((1, 1), dtype))
    cf.attention(q, x, x)               # few queries: the keys are split, and a kernel merges them
    for options in ({}, {"bias": bias}):
        out, pullback = cf.attention_vjp(q, q, q, **options)
        if backward:
            pullback(out)


def _known(name):
    """The name itself, if it is one of a dtype."""
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(DTYPES)}")
    return name


def _dtype(name):
    """A NumPy dtype by name, bfloat16 among them."""
    if name != "bfloat16":
        return np.dtype(name)
    from ml_dtypes import bfloat16

    return np.dtype(bfloat16)

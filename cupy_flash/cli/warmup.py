"""``python -m cupy_flash warmup``: compile the kernels before anybody waits for them."""

import argparse
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, redirect_stderr
from multiprocessing.connection import wait

import numpy as np

import cupy_flash as cf
from cupy_flash import console, device
from cupy_flash.cli import calls, devices
from cupy_flash.cli.progress import Progress

DTYPES = ("float16", "bfloat16", "float32", "float64")
WIDEST = 256        # head dim that `cupy_flash.attention` takes


def add_arguments(parser):
    """Add the options of the command."""
    parser.add_argument("dtypes", nargs="*", metavar="dtype", type=_known,
                        help=f"any of {', '.join(DTYPES)}; without one, float32 and float64. The "
                             "CPU has one set of kernels for all but float64")
    parser.add_argument("--dtype", action="append", dest="more", metavar="DTYPE", type=_known,
                        default=[], help="the same as an option; may be repeated")
    parser.add_argument("--forward", action="store_true", help="leave backward out")
    parser.add_argument("--cpu", action="store_true", help="leave CUDA devices out")
    parser.add_argument("--head-dim", "--head-dims", nargs="+", type=_head_dim, metavar="D",
                        default=[(64, 64), (128, 128)], dest="head_dims",
                        help=f"head dims to compile for on CUDA devices, each 1 to {WIDEST}, "
                             "or D:DV where v has another (default: 64 128)")
    parser.add_argument("--options", nargs="*", choices=calls.OPTIONS, default=calls.USUAL,
                        metavar="OPTION", help="what calls on CUDA devices have beside q, k and v: "
                        f"any of {', '.join(calls.OPTIONS)}; each by itself, and those that are "
                        "named together (default: all but tf32, each by itself)")


def run(arguments) -> int:
    """Compile; return 0, 1 when a kernel does not compile, 2 when ml_dtypes is missing."""
    names = dict.fromkeys((*arguments.dtypes, *arguments.more)) or ("float32", "float64")
    try:
        dtypes = [_dtype(name) for name in names]
    except ImportError:
        console.say('bfloat16 needs ml_dtypes: pip install ml_dtypes')
        return 2
    faults = _warm_cpu(dtypes, not arguments.forward)
    gpus, reason = ([], None) if arguments.cpu else devices.cuda_devices()
    if reason is not None:
        print(f"no GPU: {reason}")
    for gpu in gpus:
        faults += _warm_gpu(gpu, dtypes, arguments)
    for fault in faults:
        console.say(fault)
    return 1 if faults else 0


def cpu_jobs(dtypes, backward):
    """(dtype, pass) of the calls that run every kernel of these dtypes on the CPU."""
    wide = dict.fromkeys("float64" if dtype == np.float64 else "float32" for dtype in dtypes)
    return [(name, step) for name in wide for step in ("forward", "backward")[:1 + backward]]


def run_on_cpu(name, step):
    """Call a function so that every kernel of a pass runs once.

    Parameters
    ----------
    name : {"float32", "float64"}
        The accumulators' type, for which kernels are compiled.
    step : {"forward", "backward"}
    """
    if step == "forward":
        # One query on many keys: where there are several threads, they share the keys, and a second
        # kernel merges their results.
        q, k = np.ones((1, 16), name), np.ones((2**15, 16), name)
        cf.attention(q, k, k)
    else:
        # One head with many queries: several threads share it, and a kernel adds up their parts.
        x, lse = np.ones((512, 16), name), np.ones(512, name)
        cf.attention_backward(x, x, x, x, x, lse, bias=np.zeros((512, 1), name),
                              sink=np.zeros(1, name))


def _warm_cpu(dtypes, backward):
    """Compile for the CPU; return a line for each fault."""
    try:
        from cupy_flash.backends.cpu import cache
    except RuntimeError as error:       # Numba's compiler is switched off
        return [str(error)]
    jobs, start = cpu_jobs(dtypes, backward), time.perf_counter()
    faults = _run_side_by_side(jobs)
    folder = cache.cache_folder()
    if folder is None or not any(folder.glob("*.kernel")):
        faults.append("compiled CPU kernels are not kept: set NUMBA_CACHE_DIR to a folder that can "
                      f"be written to (now {folder or 'no home folder is known'})")
    if not faults:
        names = ", ".join(dict.fromkeys(name for name, _ in jobs))
        print(f"the CPU: kernels for {names} arithmetic ready after "
              f"{time.perf_counter() - start:.1f} s", flush=True)
    return faults


def _run_side_by_side(jobs):
    """Run jobs in processes of their own, for Numba compiles one kernel at a time in each."""
    context = multiprocessing.get_context("spawn")      # which is what every system has
    waiting = [context.Process(target=_run_quietly, args=job, name=" ".join(job)) for job in jobs]
    running, faults = {}, []
    try:
        with Progress(len(jobs), "compiling for the CPU") as progress:
            while waiting or running:
                while waiting and len(running) < device.cpu().threads:
                    process = waiting.pop(0)
                    with _without_interrupts():
                        process.start()
                    running[process.sentinel] = process
                for sentinel in wait(list(running)):
                    process = running.pop(sentinel)
                    process.join()
                    if process.exitcode:
                        faults.append(f"the CPU kernels for {process.name} do not compile")
                    progress.step()
    finally:
        for process in running.values():
            process.terminate()
    return faults


@contextmanager
def _without_interrupts():
    """A context in which processes are started that Ctrl-C does not reach: it is our matter."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _run_quietly(*job):
    """Run a job without the notices of its compilations: the bar says what is going on."""
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        run_on_cpu(*job)


def _warm_gpu(gpu, dtypes, arguments):
    """Compile what calls on a GPU need, as many kernels at a time as there are processors."""
    from cupy_flash.backends.cuda.compile import prepare

    where, faults = device.gpu(gpu.number), []
    start = time.perf_counter()
    launches = [launch for dtype in dtypes for widths in arguments.head_dims
                for launch in calls.launches(where, dtype, *widths, arguments.options,
                                             backward=not arguments.forward)]
    pool = ThreadPoolExecutor(device.cpu().threads)
    try:
        with Progress(len(launches), f"compiling for {gpu.name}") as progress:
            for done in as_completed(pool.submit(prepare, gpu.number, one) for one in launches):
                if done.exception() is not None:
                    faults.append(f"{gpu.name}: {done.exception()}")
                progress.step()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    print(f"{gpu.name}: {len(launches) - len(faults)} of {len(launches)} kernels ready after "
          f"{time.perf_counter() - start:.1f} s", flush=True)
    return faults


def _known(name):
    """The name itself, if it is one of a dtype."""
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(DTYPES)}")
    return name


def _head_dim(text):
    """(d, d_v) of "64" or "192:128"."""
    parts = text.split(":")
    if len(parts) > 2 or not all(x.isdecimal() and 1 <= int(x) <= WIDEST for x in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no head dim, expected a whole number from 1 to {WIDEST}, or two, as "
            "192:128, where v has another than q and k")
    return int(parts[0]), int(parts[-1])


def _dtype(name):
    """A NumPy dtype by name, bfloat16 among them."""
    if name != "bfloat16":
        return np.dtype(name)
    from ml_dtypes import bfloat16

    return np.dtype(bfloat16)

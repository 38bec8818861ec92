"""
Keys in four processes
======================

Results over different keys merge exactly, by their log-sum-exps. So keys may lie in several
processes or machines, and only the results travel, never the keys. Backward works alike: with
`out` and `lse` of the whole, the gradients of the parts add up.

Here 4 x 25,000 keys lie in four processes of Dask; then the same is done by MPI.
"""

import inspect
import shutil
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from distributed import Client, LocalCluster

import cupy_flash as cf

H, NQ, NK, D, WORKERS = 4, 1000, 25_000, 32, 4

# %%
# What a worker does. It makes its own keys (elsewhere it would read them) and keeps them; on a
# machine with a GPU it computes there.


def keys_of(part):
    """The keys and values of one worker; its keys lie around a centre of their own."""
    rng = np.random.default_rng(part)
    k, v = rng.standard_normal((2, H, NK, D), dtype=np.float32)
    return np.stack([k + 0.5 * rng.standard_normal((H, 1, D), dtype=np.float32), v])


def attend(kv, q):
    """Attention to the keys of one worker."""
    xp, host = module()
    return tuple(map(host, cf.attention(xp.asarray(q), *xp.asarray(kv), return_lse=True)))


def backward(kv, *arrays):
    """Gradients of one worker's keys, and its part of dq; the arrays are dout, q, out, lse."""
    xp, host = module()
    dout, q, out, lse = map(xp.asarray, arrays)
    return tuple(map(host, cf.attention_backward(dout, q, *xp.asarray(kv), out, lse)[:3]))


def module():
    """CuPy and its way back to the host where there is a GPU, NumPy elsewhere."""
    try:
        import cupy
        if cupy.is_available():
            return cupy, cupy.asnumpy
    except ImportError:
        pass
    return np, np.asarray


# %%
# The queries go to all workers; a result is as large as the queries, whatever the number of keys.


def by_dask(client, q, dout):
    """`out`, `lse`, dq, and of each worker its lse, dk and dv."""
    workers = list(client.scheduler_info()["workers"])
    shards = [client.submit(keys_of, part, workers=worker) for part, worker in enumerate(workers)]
    shared = client.scatter(q, broadcast=True)
    outs, lses = zip(*client.gather([client.submit(attend, shard, shared) for shard in shards]),
                     strict=True)
    out, lse = cf.merge(outs, lses)
    rest = client.scatter([dout, q, out, lse], broadcast=True)
    dqs, dks, dvs = zip(*client.gather([client.submit(backward, shard, *rest)
                                        for shard in shards]), strict=True)
    return out, lse, sum(dqs), lses, dks, dvs


# %%
# Under MPI every process runs the same program, ``examples/mpi_ranks.py``: the results are
# gathered and merged by every rank, dq is a sum over the ranks.


def by_mpi():
    """What `mpi_ranks.py` prints in four processes."""
    beside = Path(sys.executable).with_name("mpiexec")          # the package mpich puts it there
    mpiexec = beside if beside.exists() else shutil.which("mpiexec")
    program = Path(inspect.getfile(by_mpi)).resolve().with_name("mpi_ranks.py")
    return subprocess.run([mpiexec, "-n", "4", sys.executable, program], capture_output=True,
                          text=True, check=True).stdout


# %%
# Both, each held against one process that has all keys; and the share of the four processes in the
# weights of 60 queries, which is ``exp(lse_part - lse)``.

if __name__ == "__main__":
    cf.attention(*np.zeros((3, H, 8, D), np.float32), return_lse=True)      # compiled once for all
    q, dout = np.random.default_rng(99).standard_normal((2, H, NQ, D), dtype=np.float32)
    with LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=None,
                      env={"NUMBA_NUM_THREADS": "1"}) as cluster, Client(cluster) as client:
        start = time.perf_counter()
        out, lse, dq, lses, dks, _ = by_dask(client, q, dout)
        seconds = time.perf_counter() - start

    k, v = np.concatenate([keys_of(part) for part in range(WORKERS)], axis=2)
    whole, pullback = cf.attention_vjp(q, k, v)
    want = pullback(dout)
    apart = {"out": np.abs(out - whole).max(), "dq": np.abs(dq - want.dq).max(),
             "dk": np.abs(np.concatenate(dks, axis=1) - want.dk).max()}
    print(f"Dask, {WORKERS} processes, {NK:,} keys each, {seconds:.2f} s: "
          + ", ".join(f"{name} differs by {value:.0e}" for name, value in apart.items()))
    print(by_mpi(), end="")

    figure, axis = plt.subplots(figsize=(7, 2.4), layout="constrained")
    axis.stackplot(np.arange(60), [np.exp(part - lse)[0, :60] for part in lses],
                   colors=["#2a6fb0", "#7fb0d8", "#d98a2b", "#f0c891"])
    axis.set(xlim=(0, 59), ylim=(0, 1), xlabel="query", ylabel="share of the weights")
    plt.show()

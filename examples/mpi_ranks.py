"""What each process of `sharded_keys.py` does under MPI: ``mpiexec -n 4 python mpi_ranks.py``.

Each rank holds a quarter of the keys. Forward: every rank attends to its own keys; the results are
merged. Backward: the whole's `out` and `lse` make the gradients of the parts add up, so dq is a sum
over the ranks, and dk and dv are each rank's own. On a machine with GPUs the ranks share them.
"""

import numpy as np
from mpi4py import MPI

import cupy_flash as cf

try:
    import cupy
    GPUS = cupy.cuda.runtime.getDeviceCount() if cupy.is_available() else 0
except ImportError:
    GPUS = 0


def share(comm, H=4, N=4000, d=32):
    """q and dout, which all ranks have, and this rank's k and v."""
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, H, N, d), dtype=np.float32)
    k, v = np.random.default_rng(1 + comm.rank).standard_normal((2, H, N // comm.size, d),
                                                                dtype=np.float32)
    return q, dout, k, v


def attention(comm, q, k, v, xp, host):
    """`out` and `lse` of all queries on the keys of all ranks, the same on every rank."""
    out, lse = map(host, cf.attention(*map(xp.asarray, (q, k, v)), return_lse=True))
    outs, lses = (np.empty((comm.size, *x.shape), x.dtype) for x in (out, lse))
    comm.Allgather(out, outs)
    comm.Allgather(lse, lses)
    return cf.merge(list(outs), list(lses))


def gradients(comm, dout, q, k, v, out, lse, xp, host):
    """dq, the same on every rank, and dk, dv of this rank's keys."""
    grads = cf.attention_backward(*map(xp.asarray, (dout, q, k, v, out, lse)))
    dq, dk, dv = map(host, grads[:3])
    comm.Allreduce(MPI.IN_PLACE, dq)
    return dq, dk, dv


def main():
    """Compare the parts with one process that has all keys."""
    comm = MPI.COMM_WORLD
    xp, host = np, np.asarray
    if GPUS:
        cupy.cuda.Device(comm.rank % GPUS).use()
        xp, host = cupy, cupy.asnumpy
    q, dout, k, v = share(comm)
    out, lse = attention(comm, q, k, v, xp, host)
    dq, dk, _ = gradients(comm, dout, q, k, v, out, lse, xp, host)
    parts = comm.gather((k, v, dk))
    if comm.rank == 0:
        k, v, dk = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
        whole, pullback = cf.attention_vjp(q, k, v)
        want = pullback(dout)
        print(f"MPI, {comm.size} processes, {k.shape[1] // comm.size:,} keys each: out differs by "
              f"{np.abs(out - whole).max():.0e}, dq by {np.abs(dq - want.dq).max():.0e}, dk by "
              f"{np.abs(dk - want.dk).max():.0e}")


if __name__ == "__main__":
    main()

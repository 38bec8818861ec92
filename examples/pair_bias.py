"""
Pair bias, as in models of proteins
===================================

Models of protein structure add to the scores a bias that they compute from pairs of residues. It
has a number for each head and pair, and all rows of the alignment share it: ``q`` is ``(rows, H,
N, d)``, the bias ``(1, H, N, N)``. It is broadcast and not repeated, and its gradient is summed
over the rows in place. A program in NumPy keeps ``rows`` matrices of that size, several at a
time.
"""

import time
import tracemalloc

import matplotlib.pyplot as plt
import numpy as np
from threadpoolctl import threadpool_limits

import cupy_flash as cf

try:
    import cupy
    xp = cupy if cupy.is_available() else np
except ImportError:
    xp = np
host = np.asarray if xp is np else cupy.asnumpy

# %%
# 64 rows of 256 residues, 4 heads of 32. Some rows are shorter: their last residues are masked.

ROWS, HEADS, N, D = 64, 4, 256, 32
rng = np.random.default_rng(0)
q, k, v, dout = (xp.asarray(rng.standard_normal((ROWS, HEADS, N, D), np.float32)) for _ in range(4))
distance = np.abs(np.arange(N)[:, None] - np.arange(N))
helix = np.cos(2 * np.pi * distance / 3.6) * np.exp(-distance / 40)
bias = xp.asarray((np.array([2, 1, 0, -1])[:, None, None] * helix)[None].astype(np.float32))
lengths = rng.integers(N // 2, N, ROWS)
mask = xp.asarray(np.arange(N) < lengths[:, None])[:, None, None, :]


def ours():
    """Output and gradients by `attention_vjp`."""
    out, pullback = cf.attention_vjp(q, k, v, bias=bias, mask=mask)
    return [host(x) for x in (out, *pullback(dout)[:4])]


def plain():
    """The same as anybody would write it, with all matrices in memory."""
    scale = xp.float32(D**-0.5)
    S = xp.where(mask, scale * (q @ k.swapaxes(2, 3)) + bias, xp.float32(-xp.inf))
    P = xp.exp(S - S.max(axis=3, keepdims=True))
    P /= P.sum(axis=3, keepdims=True)
    out = P @ v
    dP = dout @ v.swapaxes(2, 3)
    dS = P * (dP - xp.sum(dout * out, axis=3, keepdims=True))
    return [host(x) for x in (out, scale * (dS @ k), scale * (dS.swapaxes(2, 3) @ q),
                              P.swapaxes(2, 3) @ dout, dS.sum(axis=0, keepdims=True))]


def seconds_of(call):
    """How long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measured(call):
    """The results, the shorter of two times, and the peak of host memory.

    On a busy machine the threads of NumPy's library wait for each other, and one alone is faster.
    """
    with threadpool_limits(1):
        results, alone = call(), seconds_of(call)
        tracemalloc.start()
        call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return results, min(alone, seconds_of(call)), peak


results, seconds, peak = measured(ours)
expected, plain_seconds, plain_peak = measured(plain)
library = "NumPy" if xp is np else "CuPy"
print(f"forward and backward of {ROWS} rows of {N} residues")
for name, taken, most in ((f"plain {library}", plain_seconds, plain_peak),
                          ("cupy_flash", seconds, peak)):
    print(f"{name:12} {1e3 * taken:7.0f} ms   {most / 2**20:7.1f} MiB on the host")
difference = {name: float(np.abs(a - b).max() / np.abs(b).max()) for name, a, b in
              zip(("out", "dq", "dk", "dv", "dbias"), results, expected, strict=True)}
print("largest differences, relative to the largest value: "
      + ", ".join(f"{name} {value:.0e}" for name, value in difference.items()))

# %%
# Fitting the bias: from the outputs of an unknown one, gradient descent finds it again. It is one
# number for each head and distance here, so the gradient is summed along the diagonals.

one = slice(0, 8)
q, k, v, mask = q[one], k[one], v[one], mask[one]
target = cf.attention(q, k, v, bias=bias, mask=mask)
indices = xp.asarray(np.broadcast_to(distance, (HEADS, N, N)) + N * np.arange(HEADS)[:, None, None])
profile, momentum, losses = xp.zeros((HEADS, N)), 0.0, []
for _ in range(50):
    fitted = profile.ravel()[indices][None].astype(xp.float32)
    out, pullback = cf.attention_vjp(q, k, v, bias=fitted, mask=mask)
    losses.append(float(xp.mean((out - target)**2)))
    dbias = pullback(out - target).dbias[0]
    slope = xp.bincount(indices.ravel(), dbias.ravel(), HEADS * N).reshape(HEADS, N)
    momentum = 0.8 * momentum + slope
    profile = profile - 0.008 * momentum
print(f"mean squared error {losses[0]:.1e} at first, {losses[-1]:.1e} after {len(losses)} steps")

figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
axes[0].semilogy(losses, color="#2a6fb0")
axes[0].set(xlabel="step", title="mean squared error")
true = np.array([2, 1, 0, -1])[:, None] * (np.cos(2 * np.pi * np.arange(40) / 3.6)
                                           * np.exp(-np.arange(40) / 40))
for head, color in enumerate(("#2a6fb0", "#d98a2b", "#888888", "#b03a2e")):
    axes[1].plot(true[head], color=color, lw=1, label=f"head {head}")
    axes[1].plot(host(profile)[head, :40], ".", color=color, ms=4)
axes[1].set(xlabel="distance in the chain", title="bias: true (lines), found (dots)")
axes[1].legend(fontsize=7)
plt.show()

r"""
Sinkhorn divergence between two clouds
======================================

Optimal transport with an entropic penalty is solved by two functions f and g that update each other
(Sinkhorn's iteration, in logarithms). With the cost :math:`|x - y|^2 / 2` and the blur
:math:`\varepsilon`:

.. math::

    f_i = -\varepsilon \, \ln\, \sum_j b_j\, e^{(g_j - |x_i - y_j|^2 / 2) / \varepsilon}

The sum is a log-sum-exp over scores ``(x.y + g - |y|^2 / 2 - |x|^2 / 2) / eps + log b``: it is
the `lse` of `attention`, with one more column in x and y. The matrices of costs and weights never
exist; only the last column of the keys changes from one iteration to the next.
"""

import time
import tracemalloc

import matplotlib.pyplot as plt
import numpy as np
import ot

import cupy_flash as cf

try:
    import cupy
    xp = cupy if cupy.is_available() else np
except ImportError:
    xp = np


class SoftMinimum:
    """``g -> -eps * log sum_j exp((g_j - |x_i - y_j|^2 / 2) / eps) / n`` for clouds x and y."""

    def __init__(self, x, y, eps):
        one = xp.ones((len(x), 1), x.dtype)
        self.q = xp.concatenate([x, one], axis=1)
        self.k = xp.concatenate([y, xp.zeros((len(y), 1), y.dtype)], axis=1)
        self.v = xp.zeros((len(y), 1), y.dtype)     # the output is not needed
        self.x2, self.y2 = (xp.sum(z**2, axis=1) / 2 for z in (x, y))
        self.eps = float(eps)

    def __call__(self, g):
        self.k[:, -1] = g - self.y2
        _, lse = cf.attention(self.q, self.k, self.v, scale=1 / self.eps, return_lse=True)
        return self.x2 - self.eps * (lse - float(np.log(len(g))))


def transport(x, y, eps, steps):
    """The entropic cost between two clouds of equal weights, by its dual: mean(f) + mean(g)."""
    to_x, to_y = SoftMinimum(x, y, eps), SoftMinimum(y, x, eps)
    f, g = xp.zeros(len(x), x.dtype), xp.zeros(len(y), y.dtype)
    for _ in range(steps):
        f = to_x(g)
        g = to_y(f)
    return float(f.mean() + g.mean()), f


def self_transport(x, eps, steps):
    """The same of a cloud to itself, where f = g; half steps converge in a few iterations."""
    to_x, f = SoftMinimum(x, x, eps), xp.zeros(len(x), x.dtype)
    for _ in range(steps):
        f = (f + to_x(f)) / 2
    return 2 * float(f.mean()), f


# %%
# Two clouds, centred on their common mean: the costs do not change, and float32 keeps its digits.

GPU = xp is not np
N, EPS, STEPS = (100_000 if GPU else 10_000), 0.1, 15
rng = np.random.default_rng(0)
angle = rng.uniform(0, 2 * np.pi, N)
ring = np.stack([np.cos(angle), np.sin(angle)], axis=1) + 0.1 * rng.standard_normal((N, 2))
blobs = rng.choice([[-1.0, 0.4], [0.8, -0.6]], N) + 0.3 * rng.standard_normal((N, 2))
centre = (ring.mean(axis=0) + blobs.mean(axis=0)) / 2
x, y = (xp.asarray(z - centre, np.float32) for z in (ring, blobs))


def measured(call):
    """The result, seconds and peak of host memory of a call."""
    tracemalloc.start()
    start = time.perf_counter()
    result = call()
    seconds, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return result, seconds, peak


transport(x[:100], y[:100], EPS, 1)             # compiles, or loads what was compiled
(cost, f), seconds, peak = measured(lambda: transport(x, y, EPS, STEPS))
print(f"cupy_flash  {N:,} points each, {STEPS} iterations: cost {cost:.6f}, {seconds:.2f} s"
      + ("" if GPU else f", {peak / 2**20:.1f} MiB"))

# %%
# The same iterations in POT, which keeps the matrix of costs. On a GPU's 100,000 points that matrix
# would have 40 GB, so POT gets a part of the cloud there.

part = slice(0, 10_000)
a, b = ((ring - centre)[part].astype(np.float32), (blobs - centre)[part].astype(np.float32))
ours = transport(xp.asarray(a), xp.asarray(b), EPS, STEPS)[0]


def pot():
    """The value of the same dual after as many iterations of POT."""
    costs = ot.dist(a, b) / 2
    weights = np.full(len(a), 1 / len(a), np.float32)
    _, log = ot.sinkhorn(weights, weights, costs, EPS, numItermax=STEPS, stopThr=0, log=True,
                         warn=False)
    return float(EPS * (np.log(log["u"] * len(a)).mean() + np.log(log["v"] * len(b)).mean()))


theirs, their_seconds, their_peak = measured(pot)
print(f"POT         {len(a):,} points each, {STEPS} iterations: cost {theirs:.6f}, "
      f"{their_seconds:.2f} s, {their_peak / 2**20:.1f} MiB; difference {abs(ours - theirs):.1e}")

# %%
# The divergence subtracts what each cloud costs to itself, so that it is 0 between equal clouds.
# The gradient with respect to a point of x is where it wants to go: ``x - (weighted mean of y)``,
# and that weighted mean is the output of attention with the same scores.

self_x, f_x = self_transport(x, EPS, STEPS)
self_y, _ = self_transport(y, EPS, STEPS)
divergence = cost - (self_x + self_y) / 2
print(f"Sinkhorn divergence {divergence:.4f}")


def barycentre(x, y, g):
    """For each x the mean of y under the transport plan."""
    to_x = SoftMinimum(x, y, EPS)
    to_x.k[:, -1] = g - to_x.y2
    return cf.attention(to_x.q, to_x.k, y, scale=1 / EPS)


g = SoftMinimum(y, x, EPS)(f)
move = barycentre(x, y, g) - barycentre(x, x, f_x)
shown = slice(0, 400)
x_shown, y_shown, move_shown = ((z[shown] if xp is np else cupy.asnumpy(z[shown]))
                                for z in (x, y, move))
figure, axis = plt.subplots(figsize=(5.4, 4.6), layout="constrained")
axis.scatter(*y_shown.T, s=6, color="#d98a2b", label="y")
axis.quiver(*x_shown.T, *move_shown.T, angles="xy", scale_units="xy", scale=1, width=0.002,
            color="#2a6fb0")
axis.scatter(*x_shown.T, s=6, color="#2a6fb0", label="x, and where it wants to go")
axis.set_aspect("equal")
axis.legend(loc="upper right", fontsize=8)
plt.show()

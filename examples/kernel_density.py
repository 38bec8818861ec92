r"""
Density of 100,000 points, its gradient, and its peaks
======================================================

A kernel density estimate is a sum of exponentials, and its logarithm a log-sum-exp. With a one
beside each point and ``-|k|^2 / 2`` beside each sample, and ``scale = 1 / h^2``, attention
returns it as `lse`, up to terms that can be written down:

.. math::

    \ln\, \hat p(q) = \mathrm{lse}(q) - \frac{|q|^2}{2h^2} - \ln\, n
    - \frac{d}{2} \, \ln\, (2 \pi h^2)

Its gradient is what the pullback makes of ``dlse = 1``. The weights, 6,400 x 100,000 here, never
exist.
"""

import math

import matplotlib.pyplot as plt
import numpy as np

import cupy_flash as cf

try:
    import cupy
    xp = cupy if cupy.is_available() else np
except ImportError:
    xp = np
host = np.asarray if xp is np else cupy.asnumpy

# %%
# A density depends on differences alone; ``q.k`` and ``|k|^2`` do not. Around 1000 they are a
# million times larger than what is left of them. So both clouds are centred first.


def log_density(points, samples, h):
    """Log density of a Gaussian kernel estimate, and its gradient.

    Parameters
    ----------
    points : ndarray (m, d)
        Where the density is wanted.
    samples : ndarray (n, d)
    h : float
        The bandwidth.

    Returns
    -------
    log_density : ndarray (m,)
    gradient : ndarray (m, d)
    """
    n, d = samples.shape
    centre = samples.mean(axis=0)
    points, samples = points - centre, samples - centre
    one = xp.ones((len(points), 1), points.dtype)
    q = xp.concatenate([points, one], axis=1)
    k = xp.concatenate([samples, -0.5 * xp.sum(samples**2, axis=1, keepdims=True)], axis=1)
    # The output is not needed; values with one column are the least that can be asked for.
    v = xp.zeros((n, 1), samples.dtype)
    (out, lse), pullback = cf.attention_vjp(q, k, v, scale=1 / h**2, return_lse=True)
    grads = pullback(xp.zeros_like(out), xp.ones_like(lse))
    constant = math.log(n) + d / 2 * math.log(2 * math.pi * h**2)
    value = lse - xp.sum(points**2, axis=1) / (2 * h**2) - constant
    return value, grads.dq[:, :d] - points / h**2


# %%
# 100,000 samples of four normal distributions, of which the density is known.

CENTRES = np.array([[-2.0, -1.0], [1.5, -1.5], [0.0, 1.5], [2.0, 1.5]])
WIDTHS = np.array([0.8, 0.5, 0.6, 0.4])
rng = np.random.default_rng(0)
which = rng.integers(len(CENTRES), size=100_000)
samples = CENTRES[which] + WIDTHS[which, None] * rng.standard_normal((len(which), 2))


def true_density(points):
    """The density that the samples were drawn from."""
    distance = np.sum((points[:, None] - CENTRES)**2, axis=2)
    return np.mean(np.exp(-distance / (2 * WIDTHS**2)) / (2 * math.pi * WIDTHS**2), axis=1)


axis = np.linspace(-4, 4, 80)
grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
value, _ = map(host, log_density(xp.asarray(grid), xp.asarray(samples), h=0.07))
error = np.abs(np.exp(value) - true_density(grid)).max() / true_density(grid).max()
print(f"{len(grid):,} points, {len(samples):,} samples; largest error of the density "
      f"{100 * error:.1f} % of its peak")

# %%
# Mean shift: a step of ``h^2`` times the gradient goes to the weighted mean of the samples. From
# any point it climbs to a peak of the density.

walkers = xp.asarray(rng.uniform(-3, 3, (60, 2)))
path = [host(walkers)]
for _ in range(25):
    walkers = walkers + 0.3**2 * log_density(walkers, xp.asarray(samples), h=0.3)[1]
    path.append(host(walkers))
path = np.array(path)
arrived = np.sqrt(np.min(np.sum((path[-1][:, None] - CENTRES)**2, axis=2), axis=1))
print(f"after {len(path) - 1} steps half of the points are within {np.median(arrived):.3f} "
      "of a centre")

# %%
# The estimate, and the paths to its peaks.

figure, axes = plt.subplots(1, 2, figsize=(8, 3.7), layout="constrained", sharey=True)
axes[0].imshow(np.exp(value).reshape(80, 80), extent=(-4, 4, -4, 4), origin="lower", cmap="magma_r")
axes[1].contour(axis, axis, value.reshape(80, 80), levels=np.arange(-9, 0, 1), cmap="magma_r",
                linewidths=0.8)
axes[1].plot(path[..., 0], path[..., 1], color="#2a6fb0", lw=0.8)
axes[1].plot(*CENTRES.T, "k+", ms=9)
axes[0].set_title("density of 100,000 samples")
axes[1].set_title("its logarithm, and paths uphill")
plt.show()

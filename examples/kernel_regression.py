"""
Kernel regression with a fitted bandwidth
=========================================

The estimate of Nadaraya and Watson at a point q is the mean of all observed values, each weighted
by ``exp(-|q - k|^2 / 2h^2)``. That is attention: queries are the points, keys the places of the
observations, values what was observed there. Here the bandwidth h is fitted by gradient descent,
with the gradient from `attention_vjp`, and the result is held against scikit-learn.
"""

import time
import tracemalloc

import matplotlib.pyplot as plt
import numpy as np
from sklearn.neighbors import KNeighborsRegressor

import cupy_flash as cf

try:
    import cupy
    xp = cupy if cupy.is_available() else np
except ImportError:
    xp = np
host = np.asarray if xp is np else cupy.asnumpy

# %%
# The data: 20,000 noisy observations of a function of two variables, and 2,000 kept for tuning.


def truth(x):
    """The function that is to be found."""
    return np.sin(3 * x[:, 0]) * np.cos(2 * x[:, 1]) + 0.5 * x[:, 1]


rng = np.random.default_rng(0)
places = rng.uniform(-2, 2, (22_000, 2)).astype(np.float32)
observed = (truth(places) + 0.5 * rng.standard_normal(len(places))).astype(np.float32)
train, tune = slice(0, 20_000), slice(20_000, None)

# %%
# In ``-|q - k|^2 / 2 = q.k - |k|^2 / 2 - |q|^2 / 2`` the last term is the same for all keys and
# cancels in the softmax. So one more column does it: a one beside q, ``-|k|^2 / 2`` beside k, and
# ``scale = 1 / h^2``.


def queries(points):
    """The points with a one appended."""
    return xp.asarray(np.concatenate([points, np.ones((len(points), 1), points.dtype)], axis=1))


def keys(samples):
    """The samples with -|k|^2 / 2 appended."""
    return xp.asarray(np.concatenate(
        [samples, -0.5 * np.sum(samples**2, axis=1, keepdims=True)], axis=1))


q, k, v = queries(places[tune]), keys(places[train]), xp.asarray(observed[train, None])
wanted = xp.asarray(observed[tune, None])

# %%
# Gradient descent on log h. The derivative with respect to the logarithm of the scale is
# ``sum(q * dq)``, for q and the scale are only ever multiplied; and log scale is -2 log h.


def loss_and_slope(h):
    """The mean squared error on the tuning data, and its derivative with respect to log h."""
    out, pullback = cf.attention_vjp(q, k, v, scale=1 / h**2)
    rest = out - wanted
    dq = pullback(2 * rest / len(rest)).dq
    return float(xp.mean(rest**2)), -2 * float(xp.sum(q * dq))


h, path = 0.5, []
for step in range(15):
    loss, slope = loss_and_slope(h)
    path.append((h, loss))
    h *= float(np.exp(-np.clip(25 * slope, -0.5, 0.5)))
    if step % 2 == 0:
        print(f"step {step:2d}   h = {path[-1][0]:.4f}   squared error {loss:.5f}")

# %%
# The same estimator in scikit-learn: all observations as neighbours, with Gaussian weights. It
# keeps all distances and weights, so it is asked for 400 points here, and timed on them.

grid = np.stack(np.meshgrid(*[np.linspace(-2, 2, 100)] * 2), axis=-1).reshape(-1, 2)
grid = grid.astype(np.float32)
theirs = KNeighborsRegressor(20_000, weights=lambda distance: np.exp(-distance**2 / (2 * h**2)),
                             algorithm="brute").fit(places[train], observed[train])


def measured(call):
    """The result, seconds and peak of host memory of a call."""
    call()
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return result, seconds, peak


some = grid[::25]
q_some, q_grid = queries(some), queries(grid)
estimate = host(cf.attention(q_grid, k, v, scale=1 / h**2))[:, 0]
_, our_seconds, our_peak = measured(lambda: host(cf.attention(q_some, k, v, scale=1 / h**2)))
want, their_seconds, their_peak = measured(lambda: theirs.predict(some))
difference = float(np.max(np.abs(estimate[::25] - want)))
print(f"{len(some)} points, {len(k):,} observations, h = {h:.4f}")
print(f"scikit-learn  {1e3 * their_seconds:7.1f} ms  {their_peak / 2**20:7.1f} MiB")
print(f"cupy_flash    {1e3 * our_seconds:7.1f} ms  {our_peak / 2**20:7.1f} MiB")
print(f"largest difference {difference:.1e}")

# %%
# What was observed, what was found on 10,000 points, and what is true.

figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained", sharex=True, sharey=True)
style = {"vmin": -2, "vmax": 2, "cmap": "RdBu_r"}
axes[0].scatter(*places[:4000].T, c=observed[:4000], s=2, **style)
for axis, values in ((axes[1], estimate), (axes[2], truth(grid))):
    image = axis.imshow(values.reshape(100, 100), extent=(-2, 2, -2, 2), origin="lower", **style)
for axis, title in zip(axes, ("4,000 of the observations", f"estimate, h = {h:.3f}", "truth"),
                       strict=True):
    axis.set(title=title, aspect="equal")
figure.colorbar(image, ax=axes, shrink=0.8)
plt.show()

error = float(np.sqrt(np.mean((estimate - truth(grid))**2)))
print(f"root mean square error {error:.3f}, of observations with a noise of 0.5")

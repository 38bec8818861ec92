"""The logarithm of a kernel density, its gradient, and the peaks of the density.

With q extended by a one and k by -|k|^2 / 2, and `scale = 1 / h^2`, attention weighs each sample k
by exp(-|q - k|^2 / (2 h^2)). The log-sum-exp is then the logarithm of the density, up to terms that
can be written down:

    log density(q) = lse - |q|^2 / (2 h^2) - log(n) - d / 2 * log(2 pi h^2)

and its gradient is what the pullback makes of ``dlse = 1``. The matrix of weights, 500 x 100,000
here, never exists.

A density depends on differences alone, q.k and |k|^2 do not: around 1000 they are a million times
larger than what is left of them. So both clouds are centred first.

    python examples/kernel_density.py
"""

import math

import numpy as np

import cupy_flash as cf

CENTRES = np.array([[0.0, 0.0, 0.0], [4.0, 0.0, 0.0], [0.0, 4.0, 4.0]])


def log_density(points, samples, h):
    """Log density of a Gaussian kernel estimate, and its gradient.

    Parameters
    ----------
    points : numpy.ndarray, shape (m, d)
        Where the density is wanted.
    samples : numpy.ndarray, shape (n, d)
    h : float
        The bandwidth.

    Returns
    -------
    log_density : numpy.ndarray, shape (m,)
    gradient : numpy.ndarray, shape (m, d)
    """
    n, d = samples.shape
    centre = np.mean(samples, axis=0)
    points, samples = points - centre, samples - centre
    one = np.ones((len(points), 1), points.dtype)
    q = np.concatenate([points, one], axis=1)
    k = np.concatenate([samples, -0.5 * np.sum(samples**2, axis=1, keepdims=True)], axis=1)
    # The output is not needed; values with one column are the least that can be asked for.
    v = np.zeros((n, 1), samples.dtype)
    (out, lse), pullback = cf.attention_vjp(q, k, v, scale=1 / h**2, return_lse=True)
    grads = pullback(np.zeros_like(out), np.ones_like(lse))
    constant = math.log(n) + d / 2 * math.log(2 * math.pi * h**2)
    value = lse - np.sum(points**2, axis=1) / (2 * h**2) - constant
    return value, grads.dq[:, :d] - points / h**2


def main(n=100_000):
    """Estimate a density that is known from n samples, and climb to its peaks."""
    rng = np.random.default_rng(0)
    samples = CENTRES[rng.integers(len(CENTRES), size=n)]
    samples = samples + rng.standard_normal(samples.shape)
    h = 0.25
    points = samples[:500].copy()
    estimate, _ = log_density(points, samples, h)
    distance = np.sum((points[:, None] - CENTRES) ** 2, axis=2)
    truth = np.log(np.mean(np.exp(-distance / 2), axis=1)) - 1.5 * math.log(2 * math.pi)
    print(f"log density at {len(points)} of {len(samples):,} points: mean error "
          f"{np.mean(np.abs(estimate - truth)):.3f}")
    for _ in range(12):
        _, gradient = log_density(points, samples, h=1.0)
        points += gradient      # with this step width it is mean shift for h = 1
    shift = np.sqrt(np.min(np.sum((points[:, None] - CENTRES) ** 2, axis=2), axis=1))
    print(f"after 12 steps uphill, half of them lie within {np.median(shift):.3f} of a true centre")
    return np.mean(np.abs(estimate - truth)), np.median(shift)


if __name__ == "__main__":
    main()

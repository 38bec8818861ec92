"""Kernel regression on images of digits: the arithmetic of the demo, on any array module.

A query image q gets the mean of all training labels, weighted by exp(-|q - k|^2 / (2 h^2)). This
estimator of Nadaraya and Watson is attention: as |q|^2 is the same for all keys and cancels,

    softmax_k(-|q - k|^2 / (2 h^2)) = softmax_k((q . k - |k|^2 / 2) / h^2),

which is the softmax of `scale` times a scalar product, with `scale = 1 / h^2`, q extended by a one
and k by -|k|^2 / 2.
"""

import math

import numpy as np

import cupy_flash as cf

CLASSES = 10
SIDE = 8
# A test image that lies far from all training images of its class has probability 0 in float32;
# the floor keeps its loss finite.
_FLOOR = 1e-6


def shifted(images, reach):
    """Return all copies of the images shifted by up to `reach` pixels in x and y.

    Parameters
    ----------
    images : numpy.ndarray, shape (n, 64)
    reach : int
        0 returns the images themselves.

    Returns
    -------
    numpy.ndarray, shape ((2 * reach + 1)**2 * n, 64)
        One block of n images after the other, the pixels shifted in being 0.
    """
    padded = np.pad(images.reshape(-1, SIDE, SIDE), ((0, 0), (reach, reach), (reach, reach)))
    steps = range(2 * reach + 1)
    blocks = [padded[:, y : y + SIDE, x : x + SIDE] for y in steps for x in steps]
    return np.concatenate(blocks).reshape(-1, SIDE * SIDE)


def queries(images):
    """Images with a one appended."""
    return np.concatenate([images, np.ones((len(images), 1), images.dtype)], axis=1)


def keys(images):
    """Images with -|image|^2 / 2 appended."""
    return np.concatenate([images, -0.5 * np.sum(images**2, axis=1, keepdims=True)], axis=1)


def one_hot(labels):
    """Row i is 1 at the label of image i, else 0."""
    return np.eye(CLASSES, dtype=np.float32)[labels]


def loss_and_slope(xp, q, k, v, wanted, h):
    """Return the mean log loss of the regression and its derivative with respect to log h.

    Parameters
    ----------
    xp : module
        The array module of all arrays.
    q, k, v : arrays
        From `queries`, `keys` and `one_hot`.
    wanted : array, shape (len(q), 10)
        One-hot labels of the query images.
    h : float
        The bandwidth.

    Returns
    -------
    loss, slope, accuracy : float
    """
    p, pullback = cf.attention_vjp(q, k, v, scale=1 / h**2)
    p_wanted = xp.sum(p * wanted, axis=1, keepdims=True)
    loss = -float(xp.mean(xp.log(p_wanted + _FLOOR)))
    # The loss sees nothing but the probability of the right class.
    grads = pullback(-wanted / (p_wanted + _FLOOR) / len(q))
    # Scaling q scales every score, exactly as `scale` does, so the derivative with respect to
    # log scale is the one along q itself: sum(q * dq). And log scale = -2 log h.
    slope = -2 * float(xp.sum(q * grads.dq))
    accuracy = float(xp.mean(p.argmax(axis=1) == wanted.argmax(axis=1)))
    return loss, slope, accuracy


def fit_bandwidth(evaluate, h, steps, report):
    """Follow the gradient down from h.

    Parameters
    ----------
    evaluate : callable
        h -> (loss, slope with respect to log h, accuracy).
    h : float
        Where to start.
    steps : int
        How many steps to go.
    report : callable
        Called as report(step, h, loss, accuracy) before each step and at the end.

    Returns
    -------
    float
        The bandwidth after the last step.
    """
    for step in range(steps):
        loss, slope, accuracy = evaluate(h)
        report(step, h, loss, accuracy)
        # Steps in log h, at most a factor 1.6 each: far from the optimum the loss is steep.
        h *= math.exp(-max(-0.5, min(0.5, slope)))
    loss, _, accuracy = evaluate(h)
    report(steps, h, loss, accuracy)
    return h


def regression(q, k, v, h):
    """Kernel regression by `cupy_flash`: class probabilities, shape (len(q), 10)."""
    return cf.attention(q, k, v, scale=1 / h**2)


def plain_regression(xp, q, k, v, h):
    """The same as anybody would write it, with the whole matrix of weights in memory."""
    weights = (q * q.dtype.type(1 / h**2)) @ k.T
    weights -= weights.max(axis=1, keepdims=True)
    xp.exp(weights, out=weights)
    return (weights @ v) / weights.sum(axis=1, keepdims=True)

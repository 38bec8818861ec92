"""The demo's picture: test digits and the training images that they attended to most."""

import os

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cupy_flash.cli.digits import SIDE

SHOWN_KEYS = 8


def fault_of(path):
    """Why no picture can be saved as `path`, in words; None if one can."""
    endings = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix[1:].lower() not in endings:
        return f"{path} does not end in one of .{', .'.join(endings)}"
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"there is no folder {folder}: make it first"
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        return f"{path} cannot be written"
    return None


def draw(path, rows):
    """Draw one row for each test image.

    Parameters
    ----------
    path : str or pathlib.Path
        Where the picture goes; the suffix decides the format.
    rows : list of dict
        ``image`` (64,), ``title``, and for the keys, by falling weight: ``key_images`` (n, 64),
        ``key_labels`` (n,) and ``weights`` (n,).
    """
    figure = Figure(figsize=(1.15 * (SHOWN_KEYS + 2), 1.5 * len(rows) + 0.8), layout="constrained")
    # Agg needs no screen, and only this figure is bound to it: a user's backend stays as it is.
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(rows), SHOWN_KEYS + 1, squeeze=False,
                           width_ratios=[1.5] + [1] * SHOWN_KEYS)
    for axes, row in zip(grid, rows, strict=True):
        _image(axes[0], row["image"], row["title"])
        columns = zip(axes[1:], row["key_images"], row["key_labels"], row["weights"], strict=False)
        for axis, image, label, weight in columns:
            _image(axis, image, f"a {label}: {100 * weight:.0f} %")
    figure.suptitle("Left: test images.  Right: the training images with the largest weights",
                    fontsize=11)
    figure.savefig(path, dpi=110)


def largest_weights(q, k, v, images, lse, h, count=SHOWN_KEYS):
    """Return the training images that one query attends to most.

    The weights are exp(score - lse): with the log-sum-exp at hand, single entries of the softmax
    cost one scalar product each.

    Parameters
    ----------
    q : numpy.ndarray, shape (65,)
    k, v, images : numpy.ndarray
        All keys, their one-hot labels and the images they were made of.
    lse : float
        The log-sum-exp of this query.
    h : float
        The bandwidth.

    Returns
    -------
    dict
        ``key_images``, ``key_labels`` and ``weights``, the largest weight first.
    """
    weights = np.exp(k @ q / h**2 - lse)
    best = np.argsort(-weights, kind="stable")[:count]
    return {"key_images": images[best], "key_labels": v[best].argmax(axis=1),
            "weights": weights[best]}


def _image(axis, image, title):
    """One 8 x 8 image, dark ink on white."""
    axis.imshow(image.reshape(SIDE, SIDE), cmap="gray_r", vmin=0, vmax=1)
    axis.set_title(title, fontsize=8)
    axis.set_xticks([])
    axis.set_yticks([])

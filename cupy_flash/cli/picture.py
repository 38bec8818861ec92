"""The demo's picture: the digits as they were read, what they attended to, time and memory."""

import os

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from cupy_flash.cli.digits import SIDE

SHOWN_KEYS, COLUMNS, MOST_NAMED = 8, 40, 6
OURS, PLAIN = "#2a6fb0", "#d98a2b"


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


def draw(path, test, rows, taken):
    """Draw what was read, what it was read from, and what it took.

    Parameters
    ----------
    path : str or pathlib.Path
        Where the picture goes; the suffix decides the format.
    test : tuple of numpy.ndarray
        Images (n, 64), what they are (n,) and what they were read as (n,).
    rows : list of dict
        Single test images: ``image`` (64,), ``title``, and for the keys, by falling weight:
        ``key_images`` (m, 64), ``key_labels`` (m,) and ``weights`` (m,).
    taken : list of tuple
        For each bar chart its title, its unit and a dict of values by name.
    """
    figure = Figure(figsize=(8.4, 3.6 + 1.05 * len(rows)), layout="constrained")
    # Agg needs no screen, and only this figure is bound to it: a user's backend stays as it is.
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subfigures(3, 1, height_ratios=[2.6, 1.05 * len(rows), 1])
    _mosaic(top.subplots(), *test)
    grid = middle.subplots(len(rows), SHOWN_KEYS + 1, squeeze=False)
    for axes, row in zip(grid, rows, strict=True):
        _image(axes[0], row["image"], row["title"])
        columns = zip(axes[1:], row["key_images"], row["key_labels"], row["weights"], strict=False)
        for axis, image, label, weight in columns:
            _image(axis, image, f"a {label}: {100 * weight:.0f} %")
    middle.suptitle("The least certain ones (left), and the known images with the largest weights",
                    fontsize=9)
    for axis, bars in zip(bottom.subplots(1, len(taken)), taken, strict=True):
        _bars(axis, *bars)
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


def _mosaic(axis, images, truth, read):
    """All images, each in the colour of the digit that was read; framed where that is wrong."""
    colors = matplotlib.colormaps["tab10"](np.arange(10))[:, :3]
    step = SIDE + 1
    places = [(step * (i // COLUMNS), step * (i % COLUMNS)) for i in range(len(images))]
    canvas = np.ones((places[-1][0] + step + 1, step * COLUMNS + 1, 3))
    for (y, x), image, digit in zip(places, images, read, strict=True):
        ink = image.reshape(SIDE, SIDE, 1)
        canvas[y + 1 : y + step, x + 1 : x + step] = 1 - ink * (1 - 0.8 * colors[digit])
    axis.imshow(canvas, interpolation="nearest")
    wrong = np.flatnonzero(read != truth)
    for i in wrong:
        y, x = places[i]
        axis.add_patch(Rectangle((x - 0.2, y - 0.2), step + 0.4, step + 0.4, fill=False,
                                 color="red", lw=1.6))
    named = ", ".join(f"a {truth[i]} as {read[i]}" for i in wrong)
    axis.set_title(f"{len(images)} test images in the colour of the digit that was read; misread, "
                   f"framed: {named if len(wrong) <= MOST_NAMED else len(wrong)}", fontsize=9)
    axis.set_axis_off()


def _image(axis, image, title):
    """One 8 x 8 image, dark ink on white."""
    axis.imshow(image.reshape(SIDE, SIDE), cmap="gray_r", vmin=0, vmax=1)
    axis.set_title(title, fontsize=7)
    axis.set_xticks([])
    axis.set_yticks([])


def _bars(axis, title, unit, values):
    """One bar for each way of computing, the first on top."""
    for i, (name, value) in enumerate(values.items()):
        axis.barh(i, value, color=OURS if name == "cupy_flash" else PLAIN, height=0.6)
        digits = 0 if value >= 10 else 1
        axis.text(value, i, f" {value:,.{digits}f} {unit}", va="center", fontsize=8)
    axis.set_yticks(range(len(values)), values, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.35 * max(values.values()))
    axis.set_xticks([])
    axis.set_title(title, fontsize=9)
    for side in ("top", "right", "bottom"):
        axis.spines[side].set_visible(False)

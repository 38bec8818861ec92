"""Who sees whom, drawn from what the library computes and not from what it should compute."""

import matplotlib.pyplot as plt
import numpy as np

import cupy_flash as cf

SEEN, HIDDEN, EMPTY = "#2a6fb0", "#e8ebee", "#f3d6d2"


def weights(Nq, Nk, **options):
    """The matrix of probabilities of equal scores: with the identity as values, `out` is P."""
    q, k = np.zeros((1, 1, Nq, 1)), np.zeros((1, 1, Nk, 1))
    return cf.attention(q, k, np.eye(Nk)[None, None], **options)[0, 0]


def panel(axis, title, P, rows=None):
    """One grid: queries down, keys across; a fully masked row is red.

    rows: how many of them are true queries; what lies behind is padding.
    """
    Nq, Nk = P.shape
    for i in range(Nq):
        for j in range(Nk):
            color = SEEN if P[i, j] > 0 else HIDDEN if P[i].any() else EMPTY
            axis.add_patch(plt.Rectangle((j + 0.06, i + 0.06), 0.88, 0.88, color=color))
    if rows is not None:
        axis.axhline(rows, color="#444444", lw=1, ls=":")
    axis.set(xlim=(0, Nk), ylim=(Nq, 0), aspect="equal", xticks=np.arange(Nk) + 0.5,
             yticks=np.arange(Nq) + 0.5, xticklabels=range(Nk), yticklabels=range(Nq))
    axis.tick_params(length=0, labelsize=7)
    axis.set_title(title, fontsize=8, family="monospace")
    for spine in axis.spines.values():
        spine.set_visible(False)


def draw(*panels):
    """A row of panels, each ``(title, P)`` or ``(title, P, rows)``."""
    # Five panels a figure would be unreadable on a narrow screen, so it is two rows of three.
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(6, 2.6 * rows), layout="constrained",
                                squeeze=False)
    for axis in axes.flat[len(panels):]:
        axis.set_axis_off()
    for axis, arguments in zip(axes.flat, panels, strict=False):
        panel(axis, *arguments)
    axes[0, 0].set_ylabel("query", fontsize=8)
    axes[-1, 0].set_xlabel("key", fontsize=8)
    return figure

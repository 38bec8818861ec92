"""The picture of the demo in the README: all test digits as they were read, time and memory.

    python docs/pictures/digits_demo.py         # writes docs/images/digits.png

It computes what `python -m cupy_flash demo` computes, and measures it in the same way, on the CPU.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

from cupy_flash.cli import devices, digits
from cupy_flash.cli.demo import split

H = 0.3322              # what the demo finds by gradient descent
COLUMNS, SIDE = 25, digits.SIDE
OURS, PLAIN = "#2a6fb0", "#d98a2b"


def problem(reach):
    """Queries, keys, values and what the test images are, with copies shifted by up to `reach`."""
    data = split(*load_digits(return_X_y=True))
    known, labels = (np.concatenate(parts) for parts in
                     zip(data["train"], data["tune"], strict=True))
    images, truth = data["test"]
    arrays = (digits.queries(digits.shifted(images, min(reach, 1))),
              digits.keys(digits.shifted(known, reach)),
              np.tile(digits.one_hot(labels), ((2 * reach + 1) ** 2, 1)))
    return arrays, images, truth


def measured(arrays):
    """Seconds and bytes of both ways, and the probabilities that ours found."""
    cpu = devices.CpuDevice()
    ways = {"plain NumPy": lambda: digits.plain_regression(np, *arrays, H),
            "cupy_flash": lambda: digits.regression(*arrays, H)}
    taken = {name: (devices.seconds(cpu, way), cpu.peak_bytes(way)) for name, way in ways.items()}
    return taken, ways["cupy_flash"]()


def mosaic(axis, images, truth, read):
    """All images, in the colour of the digit that was read; red where that is wrong."""
    colors = plt.get_cmap("tab10")(np.arange(10))[:, :3]
    rows = len(images) // COLUMNS
    canvas = np.ones((rows * (SIDE + 1) + 1, COLUMNS * (SIDE + 1) + 1, 3))
    for i, (image, digit) in enumerate(zip(images, read, strict=True)):
        y, x = (1 + (SIDE + 1) * place for place in divmod(i, COLUMNS))
        ink = image.reshape(SIDE, SIDE, 1)
        canvas[y : y + SIDE, x : x + SIDE] = 1 - ink * (1 - 0.8 * colors[digit])
    axis.imshow(canvas, interpolation="nearest")
    for i in np.flatnonzero(read != truth):
        y, x = ((SIDE + 1) * place for place in divmod(int(i), COLUMNS))
        axis.add_patch(plt.Rectangle((x - 0.2, y - 0.2), SIDE + 1.4, SIDE + 1.4, fill=False,
                                     color="red", lw=1.8))
    wrong = ", ".join(f"a {truth[i]} as {read[i]}" for i in np.flatnonzero(read != truth))
    axis.set_title(f"{len(images)} test images; misread, in red: {wrong}", fontsize=9)
    axis.set_axis_off()


def bars(axis, title, values, unit):
    """One bar for each way."""
    for i, (name, value) in enumerate(values.items()):
        axis.barh(i, value, color=OURS if name == "cupy_flash" else PLAIN, height=0.6)
        axis.text(value, i, f" {value:,.0f} {unit}" if value >= 10 else f" {value:.1f} {unit}",
                  va="center", fontsize=9)
    axis.set_yticks(range(len(values)), values, fontsize=9)
    axis.set_xlim(0, 1.35 * max(values.values()))
    axis.set_xticks([])
    axis.set_title(title, fontsize=9)
    for side in ("top", "right", "bottom"):
        axis.spines[side].set_visible(False)


def draw(reach=2):
    """The figure."""
    arrays, images, truth = problem(reach)
    taken, p = measured(arrays)
    read = p.reshape(-1, len(images), 10).mean(axis=0).argmax(axis=1)
    figure = plt.figure(figsize=(8.4, 6.6), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[5, 1])
    mosaic(figure.add_subplot(grid[0, :]), images, truth, read)
    weights = len(arrays[0]) * len(arrays[1])
    bars(figure.add_subplot(grid[1, 0]), f"time for {weights / 1e6:.0f} million weights",
         {name: 1e3 * seconds for name, (seconds, _) in taken.items()}, "ms")
    bars(figure.add_subplot(grid[1, 1]), "memory for them",
         {name: size / 2**20 for name, (_, size) in taken.items()}, "MiB")
    return figure


if __name__ == "__main__":
    plt.switch_backend("agg")
    path = Path(__file__).resolve().parents[1] / "images" / "digits.png"
    draw().savefig(path, dpi=110, metadata={"Software": None})
    print(f"wrote {path.name}")

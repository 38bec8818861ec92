"""Charts of the committed records, for the documentation and the README.

    python -m bench charts          # writes docs/images/speed.svg, the chart in the README

Each function returns a figure; `docs/pictures/` calls them when the pages are built. Nothing is
measured here.
"""

import re

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

import cupy_flash as cf

from . import RESULTS, ROOT
from .pages import PEERS
from .records import Results, newest

OURS, BEST, CEILING, OTHER = "#2a6fb0", "#d98a2b", "#999999", "#b03a2e"
# TFLOP/s of an H200's tensor cores without sparsity, by its data sheet; 3xTF32 are three products.
PEAK = {"bfloat16": 989, "float16": 989, "tf32": 494, "tf32x3": 494 / 3, "float64": 67}
BANDWIDTH = 4800        # GB/s, likewise
NAMES = {"tf32x3": "float32", "tf32": 'float32, precision="tf32"'}


def records(name):
    """The lines of a file of records."""
    return Results(RESULTS / name).lines()


def speed_records(**fields):
    """The newest line of each cell of the speed benchmark that has these fields."""
    return [one for one in newest(records("gpu_speed.jsonl"))
            if one["ours"] and all(one[name] == value for name, value in fields.items())]


def best(one):
    """Name and rate of the fastest peer of a line."""
    name = min(one["peers"], key=lambda name: one["peers"][name]["ms"])
    return name, one["peers"][name]["rate"]


def lengths(family, kind, directions=("forward", "backward"), masks=("full", "causal")):
    """Rates against the length: a row for each pass, a column for each head dim."""
    lines = speed_records(family=family, kind=kind)
    widths = sorted({one["width"] for one in lines}, key=int)
    figure, axes = plt.subplots(len(directions), len(widths), sharex=True, sharey=True,
                                squeeze=False, layout="constrained",
                                figsize=(2.1 * len(widths) + 0.7, 2.1 * len(directions) + 0.7))
    for row, direction in zip(axes, directions, strict=True):
        for axis, width in zip(row, widths, strict=True):
            cells = [one for one in lines if (one["direction"], one["width"]) == (direction, width)]
            for mask, style in zip(masks, ("-", "--"), strict=False):
                some = sorted((one for one in cells if one["mask"] == mask),
                              key=lambda one: int(one["length"]))
                N = [int(one["length"]) for one in some]
                axis.plot(N, [best(one)[1] for one in some], style, color=BEST, marker="o", ms=3,
                          label=f"best other, {mask}")
                axis.plot(N, [one["ours"]["rate"] for one in some], style, color=OURS, marker="o",
                          ms=3, label=f"cupy_flash, {mask}")
            axis.axhline(PEAK[kind], color=CEILING, ls=":", label="tensor cores, data sheet")
            axis.set_title(f"{direction}, d = {width}", fontsize=9)
            length_axis(axis, [int(one["length"]) for one in cells])
        row[0].set_ylabel("TFLOP/s")
    axes[0, 0].set_ylim(0)
    for axis in axes[-1]:
        axis.set_xlabel("length N", fontsize=8)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle(f"{NAMES.get(kind, kind)}, NVIDIA H200", fontsize=10)
    return figure


def length_axis(axis, N):
    """An axis of lengths, in powers of two."""
    axis.set_xscale("log", base=2)
    N = sorted({*N})
    axis.set_xticks(N, [short(n) for n in N], fontsize=8)
    axis.tick_params(axis="y", labelsize=8)
    axis.grid(alpha=0.3)


def short(n):
    """1024 as 1k."""
    return f"{n // 1024}k" if n >= 1024 else str(n)


def ratios(family, directions=("forward", "backward")):
    """Bars: the best peer's time / ours, for each cell; above 1 ours is faster."""
    lines = speed_records(family=family)
    cells = list(dict.fromkeys(_label(one) for one in lines))
    figure, axis = plt.subplots(figsize=(7.2, 0.5 * len(cells) + 1.2), layout="constrained")
    for shift, direction, color in zip((-0.2, 0.2), directions, (OURS, "#7fb0d8"), strict=False):
        for one in lines:
            if one["direction"] == direction and one["ratio"]:
                y = cells.index(_label(one)) + shift
                axis.barh(y, one["ratio"], 0.38, color=color)
                axis.text(one["ratio"] + 0.01, y, f"{one['ratio']:.2f}, {PEERS[one['best']]}",
                          va="center", fontsize=7, bbox={"color": "white", "pad": 1})
        axis.barh(0, 0, color=color, label=direction)
    axis.axvline(1, color=CEILING, ls=":", zorder=0)
    axis.set_yticks(range(len(cells)), cells, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.5 * max(one["ratio"] or 0 for one in lines))
    axis.set_xlabel("time of the best other / time of cupy_flash", fontsize=8)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower right", ncols=2, fontsize=8,
                  frameon=False)
    return figure


def _label(one):
    """A cell in words."""
    heads = f", heads {one['heads'].replace('kv', ' on ')}" if "kv" in one["heads"] else ""
    width = one["width"].replace("v", " and ")
    mask = one["mask"].replace("window", "window of ")
    return f"{mask}, N {one['length'].replace('x', ' on ')}, d {width}{heads}"


def decoding():
    """GB/s of one query on many keys, beside the memory's bandwidth."""
    lines = speed_records(family="decode")
    figure, axis = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
    for i, one in enumerate(lines):
        name, rate = best(one)
        for x, value, color in ((i - 0.2, one["ours"]["rate"], OURS), (i + 0.2, rate, BEST)):
            axis.bar(x, value, 0.38, color=color)
            axis.text(x, value, f"{value:,.0f}", ha="center", va="bottom", fontsize=7)
        axis.text(i + 0.2, 100, PEERS[name], ha="center", fontsize=7, color="white")
    axis.axhline(BANDWIDTH, color=CEILING, ls=":")
    axis.set_xticks(range(len(lines)), [
        f"batch {one['B']}, heads {one['heads'].replace('kv', ' on ')},\n"
        f"{int(one['length'][2:]):,} keys" for one in lines], fontsize=8)
    axis.bar(0, 0, color=OURS, label="cupy_flash")
    axis.bar(0, 0, color=BEST, label="best other")
    axis.set(ylabel="GB/s", ylim=(0, 1.25 * BANDWIDTH))
    axis.legend(fontsize=8, ncols=2, loc="upper left")
    return figure


def cpu():
    """The CPU path and torch's, GFLOP/s against the length; a row a type, a column a head dim."""
    lines = [one for one in records("cpu.jsonl") if one["Nq"] == one["Nk"]]
    figure, axes = plt.subplots(2, 2, sharex=True, sharey="row", figsize=(6.4, 4.6),
                                layout="constrained")
    for row, dtype in zip(axes, ("float32", "float64"), strict=True):
        for axis, d in zip(row, (64, 128), strict=True):
            for direction, style in (("forward", "-"), ("backward", "--")):
                some = [one for one in lines if (one["dtype"], one["d"], one["direction"],
                                                 one["causal"]) == (dtype, d, direction, True)]
                N = [one["Nq"] for one in some]
                for side, color, name in (("torch", BEST, "PyTorch"), ("ours", OURS, "cupy_flash")):
                    axis.plot(N, [one[f"gflops_{side}"] for one in some], style, color=color,
                              marker="o", ms=3, label=f"{name}, {direction}")
            axis.set_title(f"{dtype}, d = {d}, causal", fontsize=9)
            length_axis(axis, N)
        row[0].set(ylabel="GFLOP/s", ylim=0)
    for axis in axes[-1]:
        axis.set_xlabel("length N", fontsize=8)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2,
                  fontsize=8, frameon=False)
    figure.suptitle(f"{lines[0]['cpu']}, {lines[0]['threads']} cores, 8 heads", fontsize=10)
    return figure


def errors(names=("out", "dq"), data="mean 1"):
    """Largest error over largest value against the length, by type."""
    lines = records("gpu_errors.jsonl")
    kinds = ("bfloat16", "float16", "tf32", "tf32x3", "float64")
    figure, axes = plt.subplots(1, len(names), figsize=(6.4, 3), sharey=True, layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        for kind, color in zip(kinds, (OTHER, BEST, "#888888", OURS, "#444444"), strict=True):
            cells = {one["N"]: one["errors"][name] for one in lines
                     if (one["kind"], one["data"]) == (kind, data)}
            axis.plot(sorted(cells), [cells[N] for N in sorted(cells)], marker="o", ms=3,
                      color=color, label=NAMES.get(kind, kind))
        axis.set_yscale("log")
        axis.set_title(f"{name}", fontsize=9)
        length_axis(axis, cells)
        axis.set_xlabel("length N", fontsize=8)
    axes[0].set_ylabel("largest error / largest value", fontsize=8)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
                  fontsize=8, frameon=False)
    return figure


def memory():
    """Bytes beside the inputs against the length: planned for a CPU, measured on a GPU."""
    N = [2**i for i in range(10, 21, 2)]
    figure, axis = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    axis.plot(N, [4 * 4 * n * n for n in N], color=OTHER, label="one matrix of scores, float32")
    for direction, color in (("backward", "#7fb0d8"), ("forward", OURS)):
        axis.plot(N, [planned(direction, n) for n in N], color=color,
                  label=f"cupy_flash, {direction}, by plan")
        peak = next(one for one in records("gpu_memory.jsonl") if one["check"] == "peak")
        for n in (4096, 65536):
            axis.plot(n, peak[f"{direction}_{n}"], "o", color=color, ms=5,
                      label=f"the same, measured on an H200 ({direction})" if n == 4096 else None)
    axis.set_yscale("log", base=2)
    axis.set_yticks([2.0**i for i in (20, 25, 30, 35, 40)],
                    ["1 MiB", "32 MiB", "1 GiB", "32 GiB", "1 TiB"], fontsize=8)
    length_axis(axis, N)
    axis.set_xticks(N, [short(n) if n < 2**20 else "1M" for n in N])
    axis.set_xlabel("length N", fontsize=8)
    axis.set_title("float16, 4 heads, d = 64, causal", fontsize=9)
    axis.legend(fontsize=8)
    return figure


def planned(direction, N, shape=(1, 4), d=64, dtype="float16"):
    """Bytes of the results and the workspace of a causal call on this machine's CPU."""
    q = np.empty((*shape, N, d), dtype)         # never touched, so never real
    plans = dict(zip(("forward", "backward"), re.split("^backward:", cf.explain(
        q, q, q, causal=True, return_lse=True), flags=re.MULTILINE), strict=True))
    workspace = re.findall(r"^  workspace .*: ([\d,]+) bytes", plans[direction], re.MULTILINE)
    results = q.nbytes + 4 * q.size // d if direction == "forward" else 3 * q.nbytes
    return results + sum(int(number.replace(",", "")) for number in workspace)


def arguments(parser):
    """There are none."""


def main(_):
    """Write the chart of the README; its bytes depend on the records alone."""
    path = ROOT / "docs" / "images" / "speed.svg"
    with mpl.rc_context({"svg.hashsalt": "cupy_flash", "svg.fonttype": "none"}):
        figure = lengths("16-bit", "bfloat16")
        figure.savefig(path, metadata={"Date": None, "Description": stamp()})
    print(f"wrote {path.relative_to(ROOT)}")
    return 0


def stamp():
    """What the chart was drawn from, to be found again in the file."""
    rates = [(one["cell"], one["ours"]["rate"]) for one in speed_records(family="16-bit")]
    return f"16-bit cells: {len(rates)}, sum of rates {sum(rate for _, rate in rates):.2f}"

"""The two charts of the first page: how speed and memory grow with the length."""

import matplotlib.pyplot as plt

from bench import charts

lines = [one for one in charts.speed_records(family="16-bit", kind="bfloat16", width="128")
         if one["mask"] == "causal"]
figure, axes = plt.subplots(1, 2, figsize=(7.2, 3.2), layout="constrained")
for direction, style in (("forward", "-"), ("backward", "--")):
    some = sorted((one for one in lines if one["direction"] == direction),
                  key=lambda one: int(one["length"]))
    N = [int(one["length"]) for one in some]
    axes[0].plot(N, [charts.best(one)[1] for one in some], style, color=charts.BEST, marker="o",
                 ms=3, label=f"the best other, {direction}")
    axes[0].plot(N, [one["ours"]["rate"] for one in some], style, color=charts.OURS, marker="o",
                 ms=3, label=f"cupy_flash, {direction}")
charts.length_axis(axes[0], N)
axes[0].set(ylim=(0, 800))
axes[0].set_title("TFLOP/s on an H200, bfloat16, d = 128, causal", fontsize=9)
axes[0].legend(fontsize=7)
figure.supxlabel("length N", fontsize=8)
N = [2**i for i in range(10, 19, 2)]
for label, sizes, color in (("one matrix of scores", [16 * n * n for n in N], charts.OTHER),
                            ("cupy_flash, backward", [charts.planned("backward", n) for n in N],
                             "#7fb0d8"),
                            ("cupy_flash, forward", [charts.planned("forward", n) for n in N],
                             charts.OURS)):
    axes[1].plot(N, [size / 2**30 for size in sizes], color=color, marker="o", ms=3, label=label)
axes[1].set_yscale("log")
charts.length_axis(axes[1], N)
axes[1].set_title("GiB beside the inputs, 4 heads, d = 64", fontsize=9)
axes[1].legend(fontsize=7)

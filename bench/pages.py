"""Pages from the committed records; nothing is measured.

    python -m bench tables                          # writes all: docs/performance.md and others
    python -m bench tables speed --records mine.jsonl       # prints that of other records
    python -m bench tables accuracy
"""

from collections import defaultdict
from pathlib import Path

from . import RESULTS, ROOT
from .cells import select
from .records import Results, geometric_mean, newest, say

PEERS = {"cudnn": "cuDNN", "fa2": "FlashAttention-2", "fa3": "FlashAttention-3",
         "fa4": "FlashAttention-4", "efficient": "memory-efficient", "math": "math",
         "flex": "FlexAttention", "plain": "a plain kernel"}
KINDS = {"tf32x3": 'float32 (`precision="tf32x3"`, the default)',
         "tf32": 'float32, `precision="tf32"`'}

SPEED = """\
# Speed on a GPU

Calls are queued on one stream between two events, ours and the others' in turn, and the ratio is
the median over {rounds} or more rounds of the other's time / ours: **above 1 ours is faster**. All
results were compared with float64 at these shapes before. Half the spread of the rounds follows
"±"; in brackets are the least and the largest ratio of a round. Flops are those of two matrix
products in the forward pass and five in the backward pass, of what the mask leaves. cuDNN,
FlashAttention-2, memory-efficient and math are the backends of torch's
`scaled_dot_product_attention`; FlashAttention-3 is the package flash_attn3_jax, timed by the host's
clock, FlashAttention-4 is flash_attn.cute; "-" means that it is not installed or cannot do this,
and "the best" is the best of those named.
The family "portable" has ours with only the kernels that every GPU runs; in "decode" one query
reads many keys.

Written by `python -m bench tables`.
"""

ACCURACY = """\
# Accuracy on a GPU

Largest error over largest value of each result, causal attention with d = {d}, one head, against
the same formulas in float64 on the same (rounded) inputs. Results are taken in the accumulators'
type, float32 (float64 for float64), so that the rounding of the output does not hide anything.
"mean 0" is standard normal data; "mean 1" has 1 added to q, k, v and dout, which makes every sum
grow; with "late maxima" the largest scores come last. For float64 the reference is no more exact
than the result.

{gpu}, CUDA {cuda}, driver {driver}, CuPy {cupy}, {date}, commit {commit}. Written by
`python -m bench tables`.
"""


def arguments(parser):
    """Of the command line."""
    parser.add_argument("page", nargs="?", choices=PAGES, help="print it; without one, write all")
    parser.add_argument("--records", type=Path, help="file of its records")


def main(options):
    """Print a page, or write all."""
    for page, (path, records, text) in PAGES.items():
        lines = Results(options.records or RESULTS / records).lines()
        if options.page == page:
            print(text(lines), end="")
        elif options.page is None:
            (ROOT / path).write_text(text(lines))
            say(f"wrote {path}")
    return 0


def markdown(head, rows):
    """The lines of a table."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    yield from ("| " + " | ".join(map(str, row)) + " |" for row in rows)


def speed(lines):
    """The newest line of each cell counts, and of kernels changed since the page says so."""
    order = {cell.name: i for i, cell in enumerate(select())}
    lines = sorted(newest(lines), key=lambda one: order.get(one["cell"], len(order)))
    text = [SPEED.format(rounds=min((one["rounds"] for one in lines if one["ours"]), default=0))]
    for gpu in dict.fromkeys(one["gpu"] for one in lines):
        text += _gpu([one for one in lines if one["gpu"] == gpu])
    return "\n".join(text) + "\n"


def _gpu(lines):
    """The section of one GPU."""
    from .plans import stale

    last = max(lines, key=lambda one: one["date"])
    text = [f"## {last['gpu']}", "",
            f"Driver {last['driver_version']}, CUDA {dotted(last['cuda'])}, CuPy {last['cupy']}, "
            f"torch {last['torch']}, cuDNN {last['cudnn']}, {_all(lines, 'date')}, commit "
            f"{_all(lines, 'commit')}.", ""]
    old = sum(map(stale, lines))
    if old:
        text += [f"**Stale**: {old} of {len(lines)} cells were measured with kernels that have "
                 "changed since.", ""]
    text += markdown(
        ("family", "pass", "type", "against", "cells", "geometric mean", "lowest"),
        ((family, direction, KINDS.get(kind, kind), PEERS.get(peer, peer), len(found),
          f"{geometric_mean(found):.2f}", f"{min(found):.2f}")
         for family, direction, kind, peer, found in _summary(lines)))
    for group, rows in _groups(lines).items():
        text += ["", *_details(group, rows)]
    return [*text, ""]


def _all(lines, field):
    return ", ".join(dict.fromkeys(one[field] for one in lines))


def dotted(version):
    """13000 -> 13.0."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _groups(lines):
    """Lines by (family, direction, kind)."""
    found = defaultdict(list)
    for one in lines:
        found[one["family"], one["direction"], one["kind"]].append(one)
    return found


def _summary(lines):
    """(family, direction, kind, peer, ratios) of each group; first against a cell's best peer.

    That row names the peers: the best of two is less than the best of four.
    """
    for group, rows in _groups(lines).items():
        names = sorted({name for one in rows for name in one["ratios"]}, key=_place)
        best = [one["ratio"] for one in rows if one["ratio"]]
        if best:
            there = ", ".join(PEERS.get(name, name) for name in names)
            yield *group, f"the best of {there}", best
        for name in names:
            yield *group, name, [one["ratios"][name] for one in rows if name in one["ratios"]]


def summaries(lines):
    """The same in lines for the terminal."""
    return [f"{family} {direction} {kind}, against {peer}: {len(found)} cells, geometric mean "
            f"{geometric_mean(found):.3f}, lowest {min(found):.3f}"
            for family, direction, kind, peer, found in _summary(lines)]


def _place(name):
    """Where a peer stands in the tables."""
    return [*PEERS, name].index(name), name


def _details(group, rows):
    """The table of one group, a row a cell."""
    family, direction, kind = group
    peers = [name for name in PEERS if any(name in one["peers"] for one in rows)]
    yield f"### {family}: {direction}, {KINDS.get(kind, kind)} ({rows[0]['unit']})"
    yield ""
    yield from markdown(
        ("d", "mask", "N", "batch", "heads", "ours", *(PEERS[name] for name in peers),
         "ratio to the best"),
        ((one["width"], _mask(one), one["length"], one["B"], one["heads"], _rate(one["ours"]),
          *(_rate(one["peers"].get(name)) for name in peers), _ratio(one)) for one in rows))


def _mask(one):
    """What changes the scores, in words."""
    return " ".join(filter(None, (one["mask"], one.get("option"))))


def _rate(side):
    """Rate and half its spread."""
    return f"{side['rate']:.0f} ±{50 * side['spread']:.0f} %" if side else "-"


def _ratio(one):
    """Ratio to the best peer, and its range over the rounds."""
    if not one["ratio"]:
        return "-"
    low, high = one["ratio_range"]
    return f"{one['ratio']:.2f} ({low:.2f} to {high:.2f})"


def accuracy(lines):
    """The newest line of each kind, length and data counts."""
    names = ("out", "lse", "dq", "dk", "dv")
    titles = {"float64": "float64", **KINDS, "bfloat16": "bfloat16", "float16": "float16"}
    lines = [one for one in lines if "data" in one]
    cells = {(one["kind"], one["data"], one["N"]): one["errors"] for one in lines}
    last = lines[-1]
    text = [ACCURACY.format(**last | {name: dotted(last[name]) for name in ("cuda", "driver")})]
    for kind, title in titles.items():
        rows = [((f"{N:,}", data), errors) for (one, data, N), errors in sorted(cells.items())
                if one == kind]
        if rows:
            text += [f"## {title}", "", *markdown(("N", "data", *names), (
                (*place, *(f"{errors[name]:.1e}" for name in names)) for place, errors in rows)),
                ""]
    return "\n".join(text) + "\n"


def cpu(lines):
    """Ours beside torch on a CPU, geometric means below."""
    last = lines[0]
    text = [f"CPU path against torch {last['torch']} `scaled_dot_product_attention`, "
            f"{last['heads']} heads, {last['threads']} threads, {last['cpu']}, {last['date']}, "
            f"commit {_all(lines, 'commit')}.",
            "A ratio above 1 means ours is faster; in brackets the quartiles of the rounds.", "",
            *markdown(("dtype", "d", "Nq x Nk", "mask", "pass", "ours GFLOP/s", "torch GFLOP/s",
                       "ratio"), (
                (one["dtype"], one["d"], f"{one['Nq']} x {one['Nk']}",
                 _mask(one | {"mask": "causal" if one["causal"] else "full"}), one["direction"],
                 f"{one['gflops_ours']:.0f}", f"{one['gflops_torch']:.0f}",
                 f"{one['ratio']:.2f} ({one['ratio_low']:.2f} to {one['ratio_high']:.2f})")
                for one in lines)), ""]
    groups = defaultdict(list)
    for one in lines:
        if one["Nq"] in (2048, 8192):
            groups[one["dtype"], one["direction"]].append(one["ratio"])
    text += [f"- {dtype} {direction}, N = 2048 and 8192: geometric mean "
             f"{geometric_mean(found):.2f}, lowest {min(found):.2f}"
             for (dtype, direction), found in groups.items()]
    return "\n".join(text) + "\n"


# Its place, the records that it shows, and its text from their lines.
PAGES = {"speed": ("docs/performance.md", "gpu_speed.jsonl", speed),
         "accuracy": ("docs/accuracy.md", "gpu_errors.jsonl", accuracy),
         "cpu": ("bench/results/cpu.md", "cpu.jsonl", cpu)}

"""The page of speeds, from the JSON lines of `run.py`."""

from speed_cells import select
from speed_lines import geometric_mean, newest, stale

PEERS = {"cudnn": "cuDNN", "fa2": "FlashAttention-2", "fa3": "FlashAttention-3",
         "fa4": "FlashAttention-4", "efficient": "memory-efficient", "math": "math"}
KINDS = {"tf32x3": 'float32 (`precision="tf32x3"`, the default)',
         "tf32": 'float32, `precision="tf32"`'}

HEAD = """\
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

Written by `python bench/run.py --table`.
"""


def table(lines):
    """Markdown; the newest line of each cell counts, and of kernels changed since it says so."""
    order = {cell.name: i for i, cell in enumerate(select())}
    lines = sorted(newest(lines), key=lambda one: order.get(one["cell"], len(order)))
    text = [HEAD.format(rounds=min((one["rounds"] for one in lines if one["ours"]), default=0))]
    for gpu in dict.fromkeys(one["gpu"] for one in lines):
        text += _gpu([one for one in lines if one["gpu"] == gpu])
    return "\n".join(text) + "\n"


def _gpu(lines):
    """The section of one GPU."""
    last = max(lines, key=lambda one: one["date"])
    cuda = f"{last['cuda'] // 1000}.{last['cuda'] % 1000 // 10}"
    text = [f"## {last['gpu']}", "",
            f"Driver {last['driver_version']}, CUDA {cuda}, CuPy {last['cupy']}, torch "
            f"{last['torch']}, cuDNN {last['cudnn']}, {_all(lines, 'date')}, commit "
            f"{_all(lines, 'commit')}.", ""]
    old = sum(map(stale, lines))
    if old:
        text += [f"**Stale**: {old} of {len(lines)} cells were measured with kernels that have "
                 "changed since.", ""]
    text += ["| family | pass | type | against | cells | geometric mean | lowest |",
             "|---|---|---|---|---|---|---|"]
    text += [f"| {family} | {direction} | {KINDS.get(kind, kind)} | {PEERS.get(peer, peer)} | "
             f"{len(found)} | {geometric_mean(found):.2f} | {min(found):.2f} |"
             for family, direction, kind, peer, found in _summary(lines)]
    for group, rows in _groups(lines).items():
        text += ["", *_details(group, rows)]
    return [*text, ""]


def _all(lines, field):
    return ", ".join(dict.fromkeys(one[field] for one in lines))


def _groups(lines):
    """Lines by (family, direction, kind)."""
    found = {}
    for one in lines:
        found.setdefault((one["family"], one["direction"], one["kind"]), []).append(one)
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
    columns = ["d", "mask", "N", "batch", "heads", "ours", *(PEERS[name] for name in peers),
               "ratio to the best"]
    text = [f"### {family}: {direction}, {KINDS.get(kind, kind)} ({rows[0]['unit']})", "",
            "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for one in rows:
        fields = [one["width"], one["mask"], one["length"], one["B"], one["heads"],
                  _rate(one["ours"]), *(_rate(one["peers"].get(name)) for name in peers),
                  _ratio(one)]
        text.append("| " + " | ".join(map(str, fields)) + " |")
    return text


def _rate(side):
    """Rate and half its spread."""
    return f"{side['rate']:.0f} ±{50 * side['spread']:.0f} %" if side else "-"


def _ratio(one):
    """Ratio to the best peer, and its range over the rounds."""
    if not one["ratio"]:
        return "-"
    low, high = one["ratio_range"]
    return f"{one['ratio']:.2f} ({low:.2f} to {high:.2f})"

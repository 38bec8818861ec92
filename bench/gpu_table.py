"""The page of errors, from the JSON lines of `gpu_check.py errors`."""

KINDS = {"float64": "float64", "tf32x3": 'float32 (`precision="tf32x3"`, the default)',
         "tf32": 'float32, `precision="tf32"`', "bfloat16": "bfloat16", "float16": "float16"}
NAMES = ("out", "lse", "dq", "dk", "dv")

HEAD = """\
# Accuracy on a GPU

Largest error over largest value of each result, causal attention with d = {d}, one head, against
the same formulas in float64 on the same (rounded) inputs. Results are taken in the accumulators'
type, float32 (float64 for float64), so that the rounding of the output does not hide anything.
"mean 0" is standard normal data; "mean 1" has 1 added to q, k, v and dout, which makes every sum
grow; with "late maxima" the largest scores come last. For float64 the reference is no more exact
than the result.

{gpu}, CUDA {cuda}, driver {driver}, CuPy {cupy}, {date}, commit {commit}. Written by
`python bench/gpu_check.py table`.
"""


def table(lines):
    """Markdown; the newest line of each cell counts."""
    cells = {(line["kind"], line["N"], line["data"]): line for line in lines}
    last = lines[-1]
    text = [HEAD.format(**{**last, "cuda": _dotted(last["cuda"]),
                           "driver": _dotted(last["driver"])})]
    for kind, title in KINDS.items():
        rows = sorted((key[1:], line) for key, line in cells.items() if key[0] == kind)
        if not rows:
            continue
        text += [f"## {title}", "", "| N | data | " + " | ".join(NAMES) + " |",
                 "|---|---|" + "---|" * len(NAMES)]
        for (N, data), line in sorted(rows, key=lambda row: (row[0][1], row[0][0])):
            numbers = " | ".join(f"{line['errors'][name]:.1e}" for name in NAMES)
            text.append(f"| {N:,} | {data} | {numbers} |")
        text.append("")
    return "\n".join(text)


def _dotted(version):
    """13000 -> 13.0."""
    return f"{version // 1000}.{version % 1000 // 10}"

"""From times to ratios: what a line of results says, and which cells have one."""

import re
from importlib.util import find_spec
from math import exp, log
from statistics import median

from cupy_flash.backends.cuda import source
from cupy_flash.backends.cuda.unit import headers_of

# Modules of the peers that do not come with torch.
MODULES = {"fa3": "flash_attn3_jax", "fa4": "flash_attn.cute"}


def absent():
    """Reasons by name, of the peers of `MODULES` that are not installed."""
    found = {}
    for name, module in MODULES.items():
        try:
            there = find_spec(module) is not None
        except ModuleNotFoundError:     # of the package around it
            there = False
        if not there:
            found[name] = f"{module} is not installed"
    return found


def side(times, work, unit):
    """Median, rate and spread of the rounds of one side; times in ms."""
    middle = median(times)
    scale = {"TFLOP/s": 1e9, "GB/s": 1e6}[unit]
    return {"ms": round(middle, 6), "rate": round(work / middle / scale, 2),
            "spread": round((max(times) - min(times)) / middle, 4),
            "times": [round(taken, 6) for taken in times]}


def ratios(times):
    """Of each peer and round: peer's time / ours, above 1 if ours is faster.

    Both are times of one round, so that a clock which changes from round to round cancels.
    """
    return {name: [b / a for a, b in zip(times["ours"], taken, strict=True)]
            for name, taken in times.items() if name != "ours"}


def line(cell, times, missing):
    """The fields of a cell that come from its times (name -> ms of each round).

    missing: name -> reason, of those that could not be timed.
    """
    found = {name: side(taken, cell.work, cell.unit) for name, taken in times.items()}
    ours = found.pop("ours", None)
    rounds = ratios(times) if ours else {}
    against = {name: round(median(values), 4) for name, values in rounds.items()}
    best = min(against, key=against.get, default=None)
    return {"family": cell.family, "cell": cell.name, "direction": cell.direction,
            "kind": cell.kind, "mask": cell.mask, "length": cell.length, "width": cell.width,
            "B": cell.B, "heads": cell.heads, "unit": cell.unit,
            "rounds": max(map(len, times.values()), default=0), "ours": ours, "peers": found,
            "missing": missing, "ratios": against, "best": best, "ratio": against.get(best),
            "ratio_range": [round(end(rounds[best]), 4) for end in (min, max)] if best else None}


def sources_of(kernels):
    """Digest of the CUDA sources that kernels with these names are made of, now.

    Empty if one of them is a kernel no more.
    """
    try:
        return source.digest(*headers_of(kernels))[:16]
    except KeyError:
        return ""


def stale(line):
    """Whether the CUDA sources of a line's kernels have changed since."""
    return line["sources"] != sources_of(line["kernels"])


def finished(lines, gpu):
    """Names of the cells that were looked at on this GPU with the kernels and the peers of today.

    A peer that was not installed then and is now leaves its cells unfinished: without it their
    ratio is not to the best.
    """
    still = set(absent().values())
    return {one["cell"] for one in lines if one["gpu"] == gpu and not stale(one)
            and all(why in still for why in one["missing"].values() if "not installed" in why)}


def newest(lines):
    """The last line of each cell and GPU, in the order in which cells first appear."""
    return list({(one["gpu"], one["cell"]): one for one in lines}.values())


def geometric_mean(values):
    return exp(sum(map(log, values)) / len(values))


def reason(error, notes=()):
    """Why something could not be done, in one short line: warnings if there are, else the error.

    torch says in warnings why a backend refused; where files lie on this machine is nobody's
    business.
    """
    texts = [re.sub(r"\s*\(Triggered internally.*", "", str(note), flags=re.DOTALL)
             for note in notes]
    texts = [text for text in texts if not re.search("not used because|runtime disabled", text)]
    text = " ".join(dict.fromkeys(texts)) or f"{type(error).__name__}: {error}"
    return re.sub(r"/(?:[\w.+-]+/)+", "", " ".join(text.split()))[:240]

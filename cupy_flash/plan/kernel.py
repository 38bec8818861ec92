"""A kernel as the planner sees it: a record of what it is compiled from, what it needs, and whether
and how it serves a problem.

What kernels of different families have in common in being planned is here, too.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..options import OPTIONS
from .types import CudaConfig, Refusal

FRAGMENT = 16               # head dims are padded to whole fragments
# Scores stay q.k until the exponential, where one factor brings scale and base in, unless that is
# not positive, or near the ends of float32.
SCALES = 2.0**-60, 2.0**60
# What a block does: one task after the other, however many blocks there are; the same, by as many
# blocks as there are multiprocessors, each of which it fills; the one task that has its number.
TASKS, RESIDENT, ONE_TASK = "tasks", "resident", "one task a block"
MOST_BLOCKS = 2**31 - 1
SPLIT_KEYS = 512        # a split below this costs more in merging than idle multiprocessors
SCORE_ROW = {4: 40, 8: 48}  # bytes of the struct of the CUDA sources, by those of a sum
CHANGES_SCORES = {option.text for option in OPTIONS if option.changes_scores}
# What a unit for the special instructions of an architecture needs beside the architecture.
NVRTC = "12.9"


class Offer(NamedTuple):
    """How a kernel would compute a problem.

    Attributes
    ----------
    config : CudaConfig
    smem_bytes : int
        Dynamic shared memory of a block.
    tasks : int
    reason : str
        Why with these tiles.
    around : CudaConfig or None
        Of a backward kernel that stands between two small ones: what these are compiled for.
    """

    config: CudaConfig
    smem_bytes: int
    tasks: int
    reason: str
    around: CudaConfig | None = None


class Box(NamedTuple):
    """What one copy by the TMA unit moves of an array: `order` has its axes, the innermost first,
    and `size` the entries of each."""

    order: tuple[int, int, int, int]
    size: tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel, whatever it is launched for.

    Attributes
    ----------
    entry : str
        Its function in the CUDA sources.
    header : str
        The file that has the function.
    params : str
        The struct that it takes, one of `backends.cuda.structs`.
    grid : {"tasks", "resident", "one task a block"}
        What a block does.
    target : str
        The architecture whose special instructions it has, ``"90a"``; ``""``: none, it runs on
        every GPU.
    maps : tuple of str
        The operands that it has tensor maps of.
    direction : {"forward", "backward", ""}
        The pass that it computes, maybe with the help of others; ``""``: it is such a help.
    """

    entry: str
    header: str
    params: str
    grid: str = TASKS
    target: str = ""
    maps: tuple[str, ...] = ()
    direction: str = ""

    def parameters(self, problem, launch):
        """Parameters beside those of every kernel of its direction, by name."""
        return {}

    def boxes(self, problem, config):
        """The `Box` of each operand in `maps`; None for one that is not moved by the TMA unit."""
        return {}


class Parts(NamedTuple):
    """The entries of the kernels that do what the one that computes a backward pass does not: dq
    beside it, a dbias that is a sum, and the normalisers before it."""

    dq: str = "dq_wmma"
    dbias: str = "dbias_wmma"
    normalise: str = "normalise"


PARTS = Parts()


@dataclass(frozen=True, eq=False)
class Candidate(Kernel):
    """A kernel that has a table of tiles, of which a problem gets one or none.

    Attributes
    ----------
    family : str
        ``"wmma"``, ``"sm80"``, ``"sm90"`` or ``"simt"``: the kernels that share their way of
        multiplying.
    splits : bool
        Whether it can do a part of the keys and leave the rest to others.
    rows : tuple, or dict of str to tuple
        The table of its tiles, each with the reason; in a dict by `kind_of`.
    parts : Parts
        Of a backward kernel: its helpers. Scores must be the same to the bit in all of a pass.
    """

    family: str = ""
    splits: bool = False
    rows: Any = ()
    parts: Parts = PARTS

    def offer(self, problem, device):
        """Whether and how the kernel computes a problem on a device.

        Returns
        -------
        Offer or Refusal
        """
        if self.target and self.target not in device.targets:
            return Refusal(self.entry, f"it needs sm_{self.target}, and NVRTC {NVRTC} or newer")
        found = self.best(problem, device)
        if isinstance(found, str):
            return Refusal(self.entry, found)
        if self.grid == ONE_TASK and found.tasks > MOST_BLOCKS:
            return Refusal(self.entry, f"{found.tasks:,} tasks are more than a grid has blocks")
        return found

    def blocks_of(self, config):
        """Blocks for each multiprocessor, of which splits make as many if there are few tasks."""
        return 2

    def best(self, problem, device):
        """The `Offer` of the best row of the table; or why there is none, in words."""
        raise NotImplementedError


def wanted(problem):
    """The constant of a backward kernel that computes some gradients of q, k and v and not all."""
    asked = [name in problem.wrt for name in ("dq", "dk", "dv")]
    return () if all(asked) else (("wants", sum(bit << i for i, bit in enumerate(asked))),)


def changes_scores(config):
    """Whether a kernel is compiled for options that change scores."""
    return not CHANGES_SCORES.isdisjoint(config.options)


def kind_of(dtype, precision=None):
    """The key of a table of tiles: both 16-bit types share theirs, float32 has two."""
    return "16-bit" if dtype in ("float16", "bfloat16") else precision or dtype


def itemsize(element):
    """Bytes of an element."""
    return {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[element]


def total(pieces):
    """Bytes of shared memory of the pieces that a block has of it, each a name and its bytes."""
    return sum(bytes for _, bytes in pieces)

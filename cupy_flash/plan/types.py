"""A plan is data: which kernels run, with which tiles, on which scratch memory."""

from dataclasses import dataclass

import numpy as np

from ..device import Device
from ..problem import Problem


@dataclass(frozen=True)
class Buffer:
    """Workspace of a plan; `extent` elements of `dtype`."""

    name: str
    extent: int
    dtype: str

    @property
    def nbytes(self):
        return self.extent * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class CpuConfig:
    """How the CPU kernels tile a problem.

    `Br` and `Bc` change nothing but the order of the sums. `lazy` and `round_P` are there to repeat
    the roundings of another device; their defaults are the most exact ones that cost nothing.

    Attributes
    ----------
    Br, Bc : int
        Packed query rows and keys of a tile.
    lazy : float or None
        A row's reference moves when its maximum passes it by this much (0: always); None: ln(2^8),
        in float64 ln(2^30), the thresholds of the GPU kernels.
    round_P : bool
        Round P and dS to the input type before their products, as tensor cores must.
    """

    # 96 is a multiple of the vectors (16, 8) and of the micro-kernel's 6 rows; five tiles of it at
    # d = 128 stay in 512 KiB of L2.
    Br: int = 96
    Bc: int = 96
    lazy: float | None = None
    round_P: bool = False


@dataclass(frozen=True)
class Launch:
    """One kernel, run by `threads` workers that take `tasks` tasks."""

    entry: str
    config: CpuConfig
    tasks: int
    threads: int
    splits: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """All launches of one pass, in order, and the workspace they share."""

    direction: str
    problem: Problem
    device: Device
    launches: tuple[Launch, ...]
    workspace: tuple[Buffer, ...]

    @property
    def workspace_bytes(self):
        return sum(buffer.nbytes for buffer in self.workspace)

    def __str__(self):
        lines = [f"{self.direction}: {self.problem}", f"  on {self.device}"]
        if self.problem.copied:
            lines.append(f"  copied, because the last axis has no unit stride: "
                         f"{', '.join(self.problem.copied)}")
        for launch in self.launches:
            config = launch.config
            lines.append(f"  {launch.entry}: Br {config.Br}, Bc {config.Bc}, {launch.tasks} tasks on "
                         f"{launch.threads} threads; {launch.reason}")
        if not self.launches:
            lines.append("  nothing to compute")
        for buffer in self.workspace:
            lines.append(f"  workspace {buffer.name}: {buffer.nbytes:,} bytes")
        return "\n".join(lines)

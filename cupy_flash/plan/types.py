"""A plan is data: which kernels run, with which tiles, on which scratch memory."""

from dataclasses import dataclass
from math import log

import numpy as np

from ..device import Device, GpuDevice
from ..problem import Problem

# How far a row's maximum may pass its reference: by a factor of 2^8. lse = m + ln l is rounded like
# the larger of the two, so 2^30, which float64 could hold, would cost it three bits.
LAZY = 8 * log(2)


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
    Br, Bc : int or None
        Packed query rows and keys of a tile; None: the planner's choice.
    lazy : float or None
        A row's reference moves when its maximum passes it by this much (0: always); None: `LAZY`.
    round_P : bool
        Round P and dS to the input type before their products, as tensor cores must.
    in_place : bool
        Forward with few rows: K and V are read where they are. The planner decides.
    """

    Br: int | None = None
    Bc: int | None = None
    lazy: float | None = None
    round_P: bool = False
    in_place: bool = False


@dataclass(frozen=True)
class CudaConfig:
    """What a CUDA kernel is compiled for; every field but `lazy` is part of the compiled text.

    Attributes
    ----------
    element : str
        Name of the element type of q, k, v.
    precision : str or None
        ``"tf32"`` or ``"tf32x3"`` for float32, None for the other types.
    d, d_v : int
        Head dims rounded up to whole fragments.
    Br, Bc : int
        Packed query rows and keys of a tile.
    warps : int
        Warps of a block.
    options : tuple of str
        The options that are compiled in: a call's own, by `Option.text`.
    lazy : float
        As in `CpuConfig`; an argument of the kernel.
    constants : tuple of (str, int)
        What else a tuned kernel is compiled for, by name. `blocks`, if there, is how many blocks a
        multiprocessor must have room for.
    """

    element: str
    precision: str | None
    d: int
    d_v: int
    Br: int
    Bc: int
    warps: int
    options: tuple[str, ...]
    lazy: float = 0.0
    constants: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Launch:
    """One kernel over `tasks` tasks: by `threads` workers, or by blocks of `threads` on a GPU.

    `splits` is how many parts the keys (in backward on the CPU: the rows) are cut into;
    `smem_bytes` is the dynamic shared memory of a block.
    """

    entry: str
    config: CpuConfig | CudaConfig
    tasks: int
    threads: int
    splits: int
    reason: str
    smem_bytes: int = 0


@dataclass(frozen=True)
class Refusal:
    """Why a kernel does not compute a problem."""

    entry: str
    reason: str


# Made once for a problem, so compared and hashed as an object, like it.
@dataclass(frozen=True, eq=False)
class Plan:
    """All launches of one pass, in order, and the workspace they share.

    `refusals` are those of the kernels that come before the chosen one and do not serve.
    """

    direction: str
    problem: Problem
    device: Device | GpuDevice
    launches: tuple[Launch, ...]
    workspace: tuple[Buffer, ...]
    refusals: tuple[Refusal, ...] = ()

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
            where = (f"blocks of {launch.threads} threads, {launch.smem_bytes:,} bytes shared"
                     if isinstance(config, CudaConfig) else f"tasks on {launch.threads} threads")
            lines.append(f"  {launch.entry}: Br {config.Br}, Bc {config.Bc}, {launch.tasks} "
                         f"{where}; {launch.reason}")
        if not self.launches:
            lines.append("  nothing to compute")
        reasons = {}
        for refusal in self.refusals:
            reasons.setdefault(refusal.reason, []).append(refusal.entry)
        lines += [f"  not {', '.join(entries)}: {reason}" for reason, entries in reasons.items()]
        for buffer in self.workspace:
            lines.append(f"  workspace {buffer.name}: {buffer.nbytes:,} bytes")
        return "\n".join(lines)

"""Plans for GPUs: which kernels, with which tiles, how much shared memory, how many blocks."""

from dataclasses import dataclass, replace
from math import ceil

from . import (
    cuda_backward_sm80,
    cuda_backward_sm90,
    cuda_dbias,
    cuda_forward_sm80,
    cuda_forward_sm90,
    cuda_simt,
    cuda_wmma,
    long_sums,
)
from .kernel import FRAGMENT, SPLIT_KEYS, Kernel, Refusal
from .types import LAZY, Buffer, CudaConfig, Launch, Plan

ROWS_PER_BLOCK = 4      # of combine and backward_sum, one warp each
SUMS_PER_BLOCK = 32 * ROWS_PER_BLOCK        # of dq_sum, one thread each

# All kernels. Of those that compute a pass the first that offers to is taken.
KERNELS = (
    *cuda_forward_sm90.KERNELS, *cuda_backward_sm90.KERNELS,
    *cuda_simt.KERNELS,
    *cuda_forward_sm80.KERNELS, *cuda_backward_sm80.KERNELS,
    *cuda_wmma.KERNELS,
    Kernel("combine", "rows/combine.cuh", "ForwardParams"),
    Kernel("backward_preprocess", "rows/preprocess.cuh", "BackwardParams"),
    Kernel("backward_postprocess", "rows/postprocess.cuh", "BackwardParams"),
    Kernel("backward_sum", "rows/backward_sum.cuh", "BackwardParams"),
    Kernel("dbias_sum", "rows/dbias_sum.cuh", "BackwardParams"),
    Kernel("dq_sum", "rows/dq_sum.cuh", "DqParams"),
    Kernel("dsink", "rows/dsink.cuh", "BackwardParams"),
)
_BY_ENTRY = {kernel.entry: kernel for kernel in KERNELS}


@dataclass(frozen=True)
class Tuning:
    """What a plan chooses from, and what it goes by.

    Attributes
    ----------
    kernels : tuple of Kernel
        In order of preference.
    split_keys : int
        Keys of a split, at least.
    """

    kernels: tuple[Kernel, ...] = KERNELS
    split_keys: int = SPLIT_KEYS


def kernel_of(entry):
    """The record of a kernel by its entry."""
    return _BY_ENTRY[entry]


def _choose(direction, problem, device, tuning):
    """The first kernel that offers to compute a pass, its offer, and the refusals before it."""
    refusals = []
    for kernel in tuning.kernels:
        if kernel.direction == direction and device.family in ("", kernel.family):
            offer = kernel.offer(problem, device)
            if not isinstance(offer, Refusal):
                return kernel, offer, tuple(refusals)
            refusals.append(offer)
    raise _unserved(refusals, device)


def _unserved(refusals, device):
    """The error where no kernel offers to compute a pass."""
    if not device.family:
        return NotImplementedError(
            f"{refusals[-1].reason}; pass NumPy arrays (cupy.asnumpy(x)) to compute on the CPU")
    families = sorted({kernel.family for kernel in KERNELS if kernel.direction})
    if device.family not in families:
        return ValueError(
            f"the environment variable CUPY_FLASH_KERNELS is {device.family!r}, which is no family "
            f"of kernels: expected one of {', '.join(families)}, or no such variable")
    reasons = "; ".join(f"{refusal.entry}: {refusal.reason}" for refusal in refusals)
    return NotImplementedError(
        f"the environment variable CUPY_FLASH_KERNELS asks for {device.family}, which does not "
        f"serve this call ({reasons}); unset it, and the planner chooses")


def plan_forward(problem, device, tuning):
    """A forward kernel, and `combine` after it if the keys were split."""
    p = problem
    kernel, offer, refusals = _choose("forward", p, device, tuning)
    first = _launch_over_keys(kernel, offer, p, device, tuning)
    launches, splits, rows, workspace = [first], first.splits, _rows(p), []
    if splits > 1:
        workspace = [Buffer("out_partial", splits * rows * p.d_v, p.accumulator),
                     Buffer("lse_partial", splits * rows, p.accumulator),
                     Buffer("l_partial", splits * rows, p.accumulator)]
        launches.append(_row_launch("combine", p, rows, splits, "adds up the splits, in order"))
    return _plan("forward", p, device, launches, workspace, refusals)


def plan_backward(problem, device, tuning):
    """One loop over the rows for all gradients, or a kernel for dk and dv and one for dq.

    Where dbias has no element for each score, it has a kernel of its own.
    """
    p = problem
    kernel, offer, refusals = _choose("backward", p, device, tuning)
    main = _launch_over_rows(kernel, offer, p, device)
    fused, dbias = offer.around is not None, dict(main.config.constants).get("dbias")
    around = offer.around or cuda_backward_sm80.around(main.config)
    launches, workspace = _normalise(p, kernel.parts.normalise, device, tuning)
    before = replace(around, constants=cuda_dbias.cleared(main))
    launches.append(_around("backward_preprocess", p, before, "lse and delta of each row"))
    rows = _tiles_of_rows(p, around) * around.Br
    workspace.append(Buffer("state", 2 * rows, p.accumulator))
    if dbias or any(x in p.wrt for x in (("dq", "dk", "dv") if fused else ("dk", "dv"))):
        launches.append(main)
    if "dq" in p.wrt and fused:
        launches.append(_around("backward_postprocess", p, around, "dq from its sums"))
        workspace.append(Buffer("dq_sums", rows * around.d, p.accumulator))
    elif "dq" in p.wrt:
        dq, buffers = _dq(p, kernel.parts.dq, device, tuning)
        launches += dq
        workspace += buffers
    sums, buffers = _sum_of_splits(p, main)
    if p.wants_dbias:
        sums += _dbias(p, kernel, main, device, tuning)
        buffers += cuda_dbias.buffers(p, main) if dbias else []
    if p.wants_dsink:
        sums.append(_row_launch("dsink", p, p.heads_q, 1, "sums over all rows of a head, in order",
                                rows_per_block=1, smem=32 * ROWS_PER_BLOCK * 8))
    return _plan("backward", p, device, launches + sums, workspace + buffers, refusals)


def _dbias(problem, kernel, main, device, tuning):
    """What dbias needs behind the main kernel, if anything."""
    if not dict(main.config.constants).get("dbias"):
        launch = _part(kernel.parts.dbias, problem, device, tuning)
        if kernel.entry == cuda_backward_sm80.BACKWARD.entry:
            launch = replace(launch, reason=f"{launch.reason}; {cuda_dbias.sum_of(problem)[1]}")
        return [launch]
    if not cuda_dbias.buffers(problem, main):
        return []
    config, tasks, smem = cuda_dbias.sum_launch(problem, main)
    return [_launch("dbias_sum", config, tasks, 1, smem, "dbias from its sums")]


def _around(entry, problem, config, reason):
    """A small kernel before or behind the ones that compute gradients."""
    config = replace(config, options=problem.compiled("backward", False))
    return _launch(entry, config, _tiles_of_rows(problem, config), 1, 0, reason)


def _tiles_of_rows(problem, config):
    """Tiles of packed rows of all key heads."""
    p = problem
    return p.batch * p.heads_k * ceil(p.group * p.Nq / config.Br)


def _launch_over_keys(kernel, offer, problem, device, tuning):
    """A kernel whose blocks own rows, each for a part of the keys if there are few rows."""
    splits, reason = 1, offer.reason
    if kernel.splits:
        blocks = kernel.blocks_of(offer.config) * device.sms
        splits = _splits(problem, offer, blocks, tuning.split_keys)
    if splits > 1:
        reason += f"; {splits} splits of the keys, since {offer.tasks} tiles of rows leave SMs idle"
    return _launch(kernel.entry, offer.config, offer.tasks * splits, splits, offer.smem_bytes,
                   reason)


def _dq(problem, entry, device, tuning):
    """The launches and buffers of a kernel that computes dq beside the one that was chosen."""
    kernel, offer = _offer_of(entry, problem, device, tuning)
    launch = _launch_over_keys(kernel, offer, problem, device, tuning)
    if launch.splits == 1:
        return [launch], []
    elements = _rows(problem) * problem.d
    sums = _row_launch("dq_sum", problem, elements, launch.splits, "adds up the splits, in order",
                       rows_per_block=SUMS_PER_BLOCK)
    return [launch, sums], [Buffer("dq_parts", launch.splits * elements, problem.accumulator)]


def _launch_over_rows(kernel, offer, problem, device):
    """A kernel whose blocks own keys, each for a part of the rows if there are very many."""
    blocks, reason = kernel.blocks_of(offer.config) * device.sms, offer.reason
    splits = long_sums.splits(problem, offer, blocks)
    if "pieces" in dict(offer.config.constants):
        reason += (f"; sums over {dict(offer.config.constants)['pieces']} rows at a time, in "
                   f"{splits} splits of the rows")
    return _launch(kernel.entry, offer.config, offer.tasks * splits, splits, offer.smem_bytes,
                   reason)


def _sum_of_splits(problem, main):
    """The launches and buffers that a walk in pieces needs beside itself."""
    p = problem
    buffers = [(name, columns) for name, columns in (("dk", p.d), ("dv", p.d_v)) if name in p.wrt]
    if "pieces" not in dict(main.config.constants) or not buffers:
        return [], []
    keys = p.batch * p.heads_k * p.Nk
    launch = _row_launch("backward_sum", p, keys, main.splits, "adds up the splits, in order")
    return [launch], [Buffer(f"{name}_sums", main.splits * keys * columns, p.accumulator)
                      for name, columns in buffers]


def _normalise(problem, entry, device, tuning):
    """m and ln l of rows whose lse cannot hold them, beside a large bias or ALiBi.

    And which rows see no key, where a sink is all that their lse says.
    """
    p = problem
    if not (p.bias_shape or p.has_alibi or (p.has_sink and p.has_mask)):
        return [], []
    launch = replace(_part(entry, p, device, tuning),
                     reason="m and ln l of rows with a large lse")
    return [launch], [Buffer("normalisers", 2 * _rows(p), p.accumulator)]


def _rows(problem):
    return problem.batch * problem.heads_q * problem.Nq


def _part(entry, problem, device, tuning):
    """The launch of a kernel of a backward pass beside the one that was chosen."""
    return _launch_of(*_offer_of(entry, problem, device, tuning))


def _offer_of(entry, problem, device, tuning):
    """A kernel and its offer, which the pass takes for granted."""
    (kernel,) = (kernel for kernel in tuning.kernels if kernel.entry == entry)
    offer = kernel.offer(problem, device)
    if isinstance(offer, Refusal):
        raise _unserved([offer], device)
    return kernel, offer


def _splits(problem, offer, blocks, split_keys):
    """Parts of the keys: 1, or as many as make so many blocks."""
    tasks, Bc = offer.tasks, offer.config.Bc
    if tasks == 0 or 2 * tasks >= blocks:
        return 1
    most = min(blocks // tasks, problem.Nk // split_keys)
    if most <= 1:
        return 1
    tiles = ceil(ceil(problem.Nk / Bc) / most)              # of a split; then no split is empty
    return ceil(problem.Nk / (tiles * Bc))


def _row_launch(entry, problem, rows, splits, reason, rows_per_block=ROWS_PER_BLOCK, smem=0):
    """A kernel with a warp a row, which knows nothing of tiles: few variants serve all problems."""
    element, precision = problem.dtype, problem.precision
    options = problem.compiled("backward", False)
    if entry == "combine":
        element, precision = problem.accumulator, None
        options = problem.compiled("forward", False)
    config = CudaConfig(element, precision, FRAGMENT, FRAGMENT, ROWS_PER_BLOCK, FRAGMENT,
                        ROWS_PER_BLOCK, options, lazy=LAZY)
    return _launch(entry, config, ceil(rows / rows_per_block), splits, smem, reason)


def _launch_of(kernel, offer):
    """The launch of a kernel that has offered to compute a pass or a part of it."""
    return _launch(kernel.entry, offer.config, offer.tasks, 1, offer.smem_bytes, offer.reason)


def _launch(entry, config, tasks, splits, smem, reason):
    return Launch(entry, config, tasks, 32 * config.warps, splits, reason, smem)


def _plan(direction, problem, device, launches, workspace, refusals):
    """The plan without the launches that have nothing to do."""
    return Plan(direction, problem, device, tuple(x for x in launches if x.tasks),
                tuple(b for b in workspace if b.extent), refusals)

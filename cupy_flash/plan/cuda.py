"""Plans for GPUs: which kernels, with which tiles, how much shared memory, how many blocks."""

from dataclasses import replace
from math import ceil

from . import cuda_fused, cuda_hopper, cuda_hopper_backward, cuda_registers, long_sums
from .cuda_tiles import FRAGMENT, choose, lazy
from .types import Buffer, CudaConfig, Launch, Plan

SPLIT_KEYS = 512        # a split below this costs more in merging than idle multiprocessors
ROWS_PER_BLOCK = 4      # of delta and combine, one warp each


def plan_forward(problem, device):
    """The kernel for sm_90a where it serves, otherwise one for every GPU."""
    tuned, obstacle = cuda_hopper.choose(problem, device)
    if not tuned:
        return _plan_forward_everywhere(problem, device, obstacle)
    config, smem, reason = tuned
    launch = replace(_launch("hopper_forward", config, cuda_hopper.count_tasks(problem, config), 1,
                             smem, reason), resident=True)
    return _plan("forward", problem, device, [launch], [])


def _plan_forward_everywhere(problem, device, obstacle):
    """A forward kernel, and `combine` after it if the keys were split.

    obstacle: why none for sm_90a; None if it was not one.
    """
    p = problem
    entry, config, smem, reason = _forward_kernel(p, device)
    if obstacle:
        reason += f"; not by wgmma: {obstacle}"
    tasks = p.batch * p.heads_k * ceil(p.group * p.Nq / config.Br)
    splits = _splits(p, tasks, config, device)
    if splits > 1:
        reason += f"; {splits} splits of the keys, since {tasks} tiles of rows leave SMs idle"
    launches = [_launch(entry, config, tasks * splits, splits, smem, reason)]
    rows = _rows(p)
    workspace = []
    if splits > 1:
        workspace = [Buffer("out_partial", splits * rows * p.d_v, p.accumulator),
                     Buffer("lse_partial", splits * rows, p.accumulator),
                     Buffer("l_partial", splits * rows, p.accumulator)]
        launches.append(_row_launch("combine", p, rows, splits, "adds up the splits, in order"))
    return _plan("forward", p, device, launches, workspace)


def plan_backward(problem, device):
    """One walk over the rows for all gradients; the general kernels for what has none."""
    tuned, obstacle = cuda_hopper_backward.choose(problem, device)
    if tuned:
        row, config, smem = tuned
        main = _launch(row.entry, config, _key_tiles(problem, config), 1, smem, row.reason)
        return _plan_one_walk(problem, device, main, cuda_hopper_backward.around(config))
    config, smem, reason = cuda_fused.choose(problem, device)
    if config is None:
        return _plan_general_backward(problem, device, reason)
    reason += f"; not by wgmma: {obstacle}"
    main = _launch_over_rows("backward_fused", problem, config, smem, reason, device)
    around = replace(config, features=False, constants=config.constants[:len(cuda_fused.CONSTANTS)])
    return _plan_one_walk(problem, device, main, around)


def _key_tiles(problem, config):
    return problem.batch * problem.heads_k * ceil(problem.Nk / config.Bc)


def _launch_over_rows(entry, problem, config, smem, reason, device):
    """A kernel whose blocks own keys, each for a part of the rows if there are very many."""
    tasks = _key_tiles(problem, config)
    splits = long_sums.splits(problem, config, tasks, device)
    if "pieces" in dict(config.constants):
        reason += (f"; sums over {dict(config.constants)['pieces']} rows at a time, in {splits} "
                   "splits of the rows")
    return _launch(entry, config, tasks * splits, splits, smem, reason)


def _sum_of_splits(problem, main):
    """The launches and buffers that a walk in pieces needs beside itself."""
    p = problem
    if "pieces" not in dict(main.config.constants):
        return [], []
    keys = p.batch * p.heads_k * p.Nk
    launch = _row_launch("backward_sum", p, keys, main.splits, "adds up the splits, in order")
    return [launch], [Buffer("dk_sums", main.splits * keys * p.d, p.accumulator),
                      Buffer("dv_sums", main.splits * keys * p.d_v, p.accumulator)]


def _plan_one_walk(problem, device, main, around):
    """The kernel of all gradients, between two small ones that are compiled for `around`."""
    p = problem
    tiles = p.batch * p.heads_k * ceil(p.group * p.Nq / main.config.Br)
    launches, workspace = _normalise(p, device)
    prepare = replace(around, features=bool(launches))
    launches += [
        _launch("backward_prepare", prepare, tiles, 1, 0, "lse and delta by tiles, zeros for dq"),
        main,
        _launch("backward_finish", around, tiles, 1, 0, "dq from its sums"),
    ]
    state, sums = cuda_fused.workspace(p, main.config)
    more, buffers = _sum_of_splits(p, main)
    launches += more
    workspace += [Buffer("state", state, p.accumulator), Buffer("dq_sums", sums, p.accumulator),
                  *buffers]
    if p.bias_shape and 0 not in p.bias_shape and not cuda_fused.writes_dbias(p):
        launches += [_delta(p), _dbias(p, device)]
        workspace.append(_delta_buffer(p))
    return _plan("backward", p, device, launches, workspace)


def _plan_general_backward(problem, device, why):
    """`delta`, one kernel for dk and dv, one for dq, and `dbias` if there is a bias."""
    p = problem
    launches, workspace = _normalise(p, device)
    launches.append(_delta(p))
    config, smem, reason = choose("backward_dkdv", p, device)
    config = long_sums.tuned(p, "backward_dkdv", config, device)
    main = _launch_over_rows("backward_dkdv", p, config, smem, f"{why}; {reason}", device)
    more, buffers = _sum_of_splits(p, main)
    launches += [main, *more]
    config, smem, reason = choose("backward_dq", p, device)
    tasks = p.batch * p.heads_k * ceil(p.group * p.Nq / config.Br)
    launches.append(_launch("backward_dq", config, tasks, 1, smem, reason))
    if p.bias_shape:
        launches.append(_dbias(p, device))
    workspace += [_delta_buffer(p), *buffers]
    return _plan("backward", p, device, launches, workspace)


def _normalise(problem, device):
    """m and ln l of rows whose lse cannot hold them, beside a large bias or ALiBi."""
    p = problem
    if not (p.bias_shape or p.has_alibi):
        return [], []
    config, smem, _ = choose("forward", p, device)
    tasks = p.batch * p.heads_k * ceil(p.group * p.Nq / config.Br)
    launch = _launch("normalise", config, tasks, 1, smem, "m and ln l of rows with a large lse")
    return [launch], [Buffer("normalisers", 2 * _rows(p), p.accumulator)]


def _delta(problem):
    return _row_launch("delta", problem, _rows(problem), 1,
                       "rowsum(dO * O) - dlse, once for all that follow")


def _delta_buffer(problem):
    return Buffer("delta", _rows(problem), problem.accumulator)


def _rows(problem):
    return problem.batch * problem.heads_q * problem.Nq


def _dbias(problem, device):
    config, smem, reason = choose("dbias", problem, device)
    b, h, n, c = problem.bias_shape
    tasks = b * h * ceil(n / config.Br) * ceil(c / config.Bc)
    return _launch("dbias", config, tasks, 1, smem, reason)


def _forward_kernel(problem, device):
    """Entry, config, bytes of shared memory and reason: in registers where that kernel serves."""
    tuned, obstacle = cuda_registers.choose(problem, device)
    if tuned:
        return "forward_registers", *tuned
    config, smem, reason = choose("forward", problem, device)
    return "forward", config, smem, f"{reason}; the general kernel: {obstacle}"


def _splits(problem, tasks, config, device):
    """Parts of the keys: 1, or as many as give every multiprocessor two blocks."""
    if tasks == 0 or tasks >= device.sms:
        return 1
    most = min(2 * device.sms // tasks, problem.Nk // SPLIT_KEYS)
    if most <= 1:
        return 1
    tiles = ceil(ceil(problem.Nk / config.Bc) / most)       # of a split; then no split is empty
    return ceil(problem.Nk / (tiles * config.Bc))


def _row_launch(entry, problem, rows, splits, reason):
    """A kernel with a warp a row, which knows nothing of tiles: few variants serve all problems."""
    element, precision = problem.dtype, problem.precision
    if entry == "combine":
        element, precision = problem.accumulator, None
    config = CudaConfig(element, precision, FRAGMENT, FRAGMENT, ROWS_PER_BLOCK, FRAGMENT,
                        ROWS_PER_BLOCK, features=False, lazy=lazy(problem))
    return _launch(entry, config, ceil(rows / ROWS_PER_BLOCK), splits, 0, reason)


def _launch(entry, config, tasks, splits, smem, reason):
    return Launch(entry, config, tasks, 32 * config.warps, splits, reason, smem)


def _plan(direction, problem, device, launches, workspace):
    """The plan without the launches that have nothing to do."""
    return Plan(direction, problem, device, tuple(x for x in launches if x.tasks),
                tuple(b for b in workspace if b.extent))

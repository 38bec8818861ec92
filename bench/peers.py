"""What is timed: ours, torch's backends, and FlashAttention-3 and -4 where they are installed.

All work on the same memory, and on the one stream of CuPy and torch; JAX alone has streams of its
own.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import cupy as cp
import torch
from speed_data import bound, errors
from speed_lines import absent, reason
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cupy_flash as cf


class CannotError(Exception):
    """Why a peer has no part in a cell."""


class WrongError(Exception):
    """Which result is wrong, and how much."""


@dataclass
class Side:
    """One implementation at one cell.

    call: number of the call -> its results, for the sets of inputs in turn.
    tensors: results -> torch tensors (B, heads, N, width).
    wait: waits for results on a stream of another library; None: they are on the common stream.
    errors: of each result, see `speed_data.errors`.
    """

    call: Callable[[int], Any]
    tensors: Callable[[Any], tuple]
    wait: Callable[[Any], Any] | None = None
    errors: dict | None = None


def sides(cell, data):
    """Sides whose results are right, by name, and the reasons why others are missing.

    Ours comes first; without it there is nothing to compare, and no peer is looked at.
    """
    able, missing = {}, {}
    for name, make in {"ours": ours, **PEERS[cell.dtype]}.items():
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            try:
                able[name] = _checked(cell, data, make(cell, data))
            except CannotError as error:
                missing[name] = str(error)
            except Exception as error:          # whatever a peer raises, the others go on
                missing[name] = reason(error, [note.message for note in notes])
        if not able:
            break
    return able, missing


def _checked(cell, data, side):
    """The side, after its results have been compared with the answers."""
    side.errors = errors(cell, side.tensors(side.call(0)), data.answers, torch)
    allowed = bound(cell)
    wrong = {name: error for name, error in side.errors.items() if not error <= allowed}
    if wrong:
        raise WrongError(", ".join(f"{name} is off by {error:.1e}" for name, error in wrong.items())
                         + f", allowed {allowed:.0e}")
    return side


def ours(cell, data):
    """cupy_flash; backward is given what forward returned, as torch keeps it."""
    options = {"causal": cell.causal, "precision": cell.precision}
    if cell.window:
        options["window"] = (cell.window - 1, 0)
    sets = data.cupy
    if cell.direction == "forward":
        return Side(lambda i: (cf.attention(*sets[i % len(sets)][:3], **options),), _tensors)
    saved = [cf.attention(*one[:3], return_lse=True, **options) for one in sets]

    def call(i):
        q, k, v, dout = sets[i % len(sets)]
        return cf.attention_backward(dout, q, k, v, *saved[i % len(sets)], **options)[:3]

    return Side(call, _tensors)


def _tensors(arrays):
    """CuPy's arrays as tensors; its bfloat16 cannot leave through DLPack under its own name."""
    return tuple(torch.from_dlpack(x) if x.dtype.name != "bfloat16"
                 else torch.from_dlpack(x.view(cp.int16)).view(torch.bfloat16) for x in arrays)


def _torch_side(forward, cell, sets, swapped=False):
    """The side of a torch function (q, k, v) -> out; swapped: its arrays are (B, N, heads, ...)."""
    def tensors(results):
        return tuple(x.transpose(1, 2) if swapped else x for x in results)

    if cell.direction == "forward":

        def call(i):
            with torch.no_grad():
                return (forward(*sets[i % len(sets)][:3]),)

        return Side(call, tensors)
    graphs = []
    for q, k, v, dout in sets:
        leaves = [x.detach().requires_grad_(True) for x in (q, k, v)]
        graphs.append((forward(*leaves), leaves, dout))

    def pull(i):
        out, leaves, dout = graphs[i % len(sets)]
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return Side(pull, tensors)


def _sdpa(backend):
    """Maker of a backend of torch's scaled_dot_product_attention."""
    def make(cell, data):
        if cell.window:
            raise CannotError("torch's scaled_dot_product_attention has no window")
        # With TF32 allowed, the products of `math` are the fast ones; nothing else looks at it.
        torch.set_float32_matmul_precision("high" if cell.precision == "tf32" else "highest")

        def forward(q, k, v):
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    q, k, v, is_causal=cell.causal, enable_gqa=cell.Hq != cell.Hk)

        return _torch_side(forward, cell, data.torch)

    return make


def _fa2(cell, data):
    """FlashAttention-2 in torch; for a window, which SDPA does not hand on, the operator itself."""
    if not cell.window:
        return _sdpa(SDPBackend.FLASH_ATTENTION)(cell, data)

    def forward(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, cell.Nq, cell.Nk, 0.0, False, False,
            window_size_left=cell.window - 1, window_size_right=0)[0]
        return out.transpose(1, 2)

    return _torch_side(forward, cell, data.torch)


def _swapped(data):
    """Copies of the sets as (B, N, heads, width), the layout of FlashAttention-3 and -4."""
    return [[x.transpose(1, 2).contiguous() for x in one] for one in data.torch]


def _need(name):
    """Raise unless the module of the peer is there."""
    if name in absent():
        raise CannotError(absent()[name])


def _fa3(cell, data):
    """FlashAttention-3 through the package flash_attn3_jax."""
    _need("fa3")
    if cell.d != cell.d_v or cell.d > 128:
        raise CannotError("flash_attn3_jax has no kernels for these head dims")
    import jax
    from flash_attn3_jax.flash import _flash_mha_bwd, _flash_mha_fwd

    options = (cell.d**-0.5, cell.causal, (-1, -1))
    if cell.window:
        options = (cell.d**-0.5, False, (cell.window - 1, 0))
    copies = _swapped(data)
    sets = [[jax.numpy.from_dlpack(x) for x in one] for one in copies]
    forward = jax.jit(lambda q, k, v: _flash_mha_fwd(q, k, v, *options))
    if cell.direction == "forward":
        run, arguments = (lambda *x: forward(*x)[:1]), [one[:3] for one in sets]
    else:
        run = jax.jit(lambda dout, *rest: _flash_mha_bwd(dout, *rest, *options))
        arguments = [(dout, q, k, v, *forward(q, k, v)) for q, k, v, dout in sets]

    def tensors(results):
        jax.block_until_ready(results)
        return tuple(torch.from_dlpack(x).transpose(1, 2) for x in results)

    def call(i, keep=copies):       # JAX's arrays are views of the copies
        return run(*arguments[i % len(arguments)])

    return Side(call, tensors, jax.block_until_ready)


def _fa4(cell, data):
    """FlashAttention-4, kernels in CuTe DSL; both passes, backward by its autograd function."""
    _need("fa4")
    from flash_attn.cute import flash_attn_func

    options = {"causal": cell.causal}
    if cell.window:
        options = {"window_size": (cell.window - 1, 0)}

    def forward(q, k, v):
        out = flash_attn_func(q, k, v, **options)
        return out[0] if isinstance(out, tuple) else out

    return _torch_side(forward, cell, _swapped(data), swapped=True)


_SIXTEEN_BIT = {"cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION), "fa2": _fa2, "fa3": _fa3, "fa4": _fa4}
_MATH = {"math": _sdpa(SDPBackend.MATH)}
PEERS = {"bfloat16": _SIXTEEN_BIT, "float16": _SIXTEEN_BIT, "float64": _MATH,
         "float32": {"efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION), **_MATH}}


@cache
def versions():
    """Of the libraries that peers come from."""
    found = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    for package in ("flash-attn3-jax", "flash-attn-4"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found

"""What ours is timed beside on a GPU: torch's backends, FlexAttention, FlashAttention-3 and -4.

All work on the same memory, and on the one stream of CuPy and torch; JAX alone has streams of its
own. In a few dimensions it is a plain kernel.
"""

import warnings
from dataclasses import dataclass
from functools import cache

import cupy as cp
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import cupy_flash as cf

from . import data
from .cells import SIXTEEN_BIT
from .clock import Side
from .plain_kernel import plain
from .records import MODULES, absent, installed, reason
from .torch_side import CannotError, sdpa, tensors, torch_call
from .truth import errors, known

MOST_MATH = 2e10        # bytes of scores that torch's `math` may take


class WrongError(Exception):
    """Which result is wrong, and how much."""


@dataclass
class Data:
    """Sets of inputs as CuPy's arrays and as tensors over the same memory, answers to the first."""

    cupy: list
    torch: list
    answers: dict


def make(cell):
    """The `Data` of a cell."""
    if cp.cuda.get_current_stream().ptr != torch.cuda.current_stream().cuda_stream:
        raise SystemExit("CuPy and torch work on different streams")
    count = data.sets(cell, cp.cuda.Device().attributes["L2CacheSize"])
    arrays = data.make(cell, cp, count)
    views = [tensors(one, tensor) for one in arrays]
    with torch.device("cuda"):
        return Data(arrays, views, known(cell, views[0], torch))


def tensor(x):
    """A CuPy array as a tensor; not every type can leave through DLPack under its own name."""
    if x.dtype.name == "bfloat16":
        return torch.from_dlpack(x.view(cp.int16)).view(torch.bfloat16)
    if x.dtype.name == "bool":
        return torch.from_dlpack(x.view(cp.uint8)).view(torch.bool)
    return torch.from_dlpack(x)


def sides(cell, given):
    """Sides whose results are right, by name, and the reasons why others are missing.

    Ours comes first; without it there is nothing to compare, and no peer is looked at.
    """
    able, missing = {}, {}
    for name, make_side in {"ours": ours, **peers_of(cell)}.items():
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            try:
                able[name] = _checked(cell, given, make_side(cell, given))
            except CannotError as error:
                missing[name] = str(error)
            except Exception as error:          # whatever a peer raises, the others go on
                missing[name] = reason(error, [note.message for note in notes])
        if not able:
            break
    return able, missing


def _checked(cell, given, side):
    """The side, after its results have been compared with the answers."""
    results = dict(zip(data.names(cell), side.tensors(side.call(0)), strict=False))
    side.errors = errors(cell, results, given.answers, torch)
    allowed = data.bound(cell)
    wrong = {name: error for name, error in side.errors.items() if not error <= allowed}
    if wrong:
        raise WrongError(", ".join(f"{name} is off by {error:.1e}" for name, error in wrong.items())
                         + f", allowed {allowed:.0e}")
    return side


def ours(cell, given):
    """cupy_flash."""
    return Side(data.ours(cf, cell, given.cupy), lambda found: tuple(map(tensor, found)))


def _sdpa(backend):
    """Maker of a backend of torch's scaled_dot_product_attention."""
    def make_side(cell, given):
        if backend == SDPBackend.MATH and 8 * cell.B * cell.Hq * cell.Nq * cell.Nk > MOST_MATH:
            raise CannotError("the scores would not fit")
        # With TF32 allowed, the products of `math` are the fast ones; nothing else looks at it.
        torch.set_float32_matmul_precision("high" if cell.precision == "tf32" else "highest")
        inner = sdpa(cell)

        def attend(q, k, v, mask):
            with sdpa_kernel(backend):
                return inner(q, k, v, mask)

        return Side(torch_call(cell, given.torch, attend))

    return make_side


def _fa2(cell, given):
    """FlashAttention-2 in torch; for a window, which SDPA does not hand on, the operator itself."""
    if not cell.window:
        return _sdpa(SDPBackend.FLASH_ATTENTION)(cell, given)

    def attend(q, k, v, _):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, cell.Nq, cell.Nk, 0.0, False, False,
            window_size_left=cell.window - 1, window_size_right=0)[0]
        return out.transpose(1, 2)

    return Side(torch_call(cell, given.torch, attend))


@cache
def _flex():
    """FlexAttention, compiled for every shape anew, and the maker of its masks."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.cache_size_limit = 256
    return torch.compile(flex_attention, dynamic=False), create_block_mask


def _flex_side(cell, given):
    """FlexAttention, where the option is a function of places or lengths."""
    if {"bias", "sink"} & dict(cell.arrays).keys() or ("mask", "11qk") in cell.arrays:
        raise CannotError("not a function of places")
    if cell.dtype == "float64":
        raise CannotError("FlexAttention has no float64")
    flex, create_block_mask = _flex()
    options = given.torch[0].options

    def seen(b, h, i, j):
        found = i - j >= 0 if cell.causal else i >= 0
        if cell.window:
            found = found & (i - j < cell.window)
        if "kv_lens" in options:
            found = found & (j < options["kv_lens"][b])
        return found & options["mask"][b, 0, 0, j] if "mask" in options else found

    def score(s, b, h, i, j):
        if cell.softcap:
            s = cell.softcap * torch.tanh(s / cell.softcap)
        return s - options["alibi_slopes"][h] * (i - j).abs() if "alibi_slopes" in options else s

    words = {"enable_gqa": cell.Hq != cell.Hk}
    if cell.softcap or "alibi_slopes" in options:
        words["score_mod"] = score
    if cell.causal or {"kv_lens", "mask"} & options.keys():
        words["block_mask"] = create_block_mask(
            seen, cell.B if {"kv_lens", "mask"} & options.keys() else None, None, cell.Nq, cell.Nk,
            device="cuda")
    # Masks are those of the first set.
    sets = [one._replace(options={}) for one in given.torch[:1 if options else None]]
    return Side(torch_call(cell, sets, lambda q, k, v, _: flex(q, k, v, **words)))


def _swapped(given):
    """Copies of the sets as (B, N, heads, width), the layout of FlashAttention-3 and -4."""
    return [one._replace(**{name: getattr(one, name).transpose(1, 2).contiguous()
                            for name in ("q", "k", "v", "dout")}) for one in given.torch]


def _need(name, cell):
    """Raise unless the module of the peer is there, and the cell has no options."""
    if name in absent():
        raise CannotError(absent()[name])
    if cell.arrays or cell.softcap:
        raise CannotError(f"{MODULES[name]} has no such option")


def _fa3(cell, given):
    """FlashAttention-3 through the package flash_attn3_jax."""
    _need("fa3", cell)
    if cell.d != cell.d_v or cell.d > 128:
        raise CannotError("flash_attn3_jax has no kernels for these head dims")
    import jax
    from flash_attn3_jax.flash import _flash_mha_bwd, _flash_mha_fwd

    options = (cell.d**-0.5, cell.causal, (-1, -1))
    if cell.window:
        options = (cell.d**-0.5, False, (cell.window - 1, 0))
    copies = _swapped(given)
    sets = [[jax.numpy.from_dlpack(x) for x in one[:4]] for one in copies]
    forward = jax.jit(lambda q, k, v: _flash_mha_fwd(q, k, v, *options))
    if cell.direction == "forward":
        run, arguments = (lambda *x: forward(*x)[:1]), [one[:3] for one in sets]
    else:
        run = jax.jit(lambda dout, *rest: _flash_mha_bwd(dout, *rest, *options))
        arguments = [(dout, q, k, v, *forward(q, k, v)) for q, k, v, dout in sets]

    def seen(results):
        jax.block_until_ready(results)
        return tuple(torch.from_dlpack(x).transpose(1, 2) for x in results)

    def call(i, keep=copies):       # JAX's arrays are views of the copies
        return run(*arguments[i % len(arguments)])

    return Side(call, seen, jax.block_until_ready)


def _fa4(cell, given):
    """FlashAttention-4, kernels in CuTe DSL; both passes, backward by its autograd function."""
    _need("fa4", cell)
    from flash_attn.cute import flash_attn_func

    options = {"causal": cell.causal}
    if cell.window:
        options = {"window_size": (cell.window - 1, 0)}

    def attend(q, k, v, _):
        out = flash_attn_func(q, k, v, **options)
        return out[0] if isinstance(out, tuple) else out

    return Side(torch_call(cell, _swapped(given), attend, swapped=True))


def _plain(cell, given):
    """A kernel of CUDA cores alone."""
    if cell.direction == "backward":
        raise CannotError("the plain kernel has no backward pass")
    return Side(plain(cell, given.cupy), lambda found: tuple(map(tensor, found)))


_MATH = {"math": _sdpa(SDPBackend.MATH)}
_EFFICIENT = {"efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION), **_MATH}
_FAST = {"cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION), "fa2": _fa2, "fa3": _fa3, "fa4": _fa4}
_BY_DTYPE = {"float32": _EFFICIENT, "float64": _MATH}


def peers_of(cell):
    """Makers of sides by name."""
    if cell.family == "small-d":
        return {"plain": _plain}
    found = _FAST if cell.dtype in SIXTEEN_BIT else _BY_DTYPE[cell.dtype]
    if cell.family in ("options", "shapes", "rows"):
        found = {**found, **(_EFFICIENT if cell.dtype != "float64" else {})}
    return {**found, **({"flex": _flex_side} if cell.family == "options" else {})}


@cache
def versions():
    """Of the libraries that peers come from."""
    found = {name: installed(name) for name in ("flash-attn3-jax", "flash-attn-4")}
    return {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
            **{name: number for name, number in found.items() if number}}

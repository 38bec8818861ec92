"""Calls of torch on tensors of its own, on a CPU as on a GPU."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from .data import Set


class CannotError(Exception):
    """Why a peer has no part in a cell."""


def tensors(one, convert=torch.from_numpy):
    """A `Set` as tensors over the same memory."""
    return Set(*map(convert, one[:4]), {name: convert(x) for name, x in one.options.items()})


def sdpa(cell):
    """torch's attention, as `attend` of `torch_call` is."""
    with_mask = {"mask", "bias", "kv_lens"}
    if cell.window or cell.softcap or not dict(cell.arrays).keys() <= with_mask:
        raise CannotError("torch's scaled_dot_product_attention has no such option")

    def attend(q, k, v, mask):
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=cell.causal,
                                            enable_gqa=cell.Hq != cell.Hk)

    return attend


def torch_call(cell, sets, attend, swapped=False):
    """Number of a call -> results, for the sets in turn.

    attend: (q, k, v, mask or None) -> out; swapped: its arrays are (B, N, heads, width).
    """
    def seen(results):
        return tuple(x.transpose(1, 2) if swapped and x.ndim == 4 else x for x in results)

    if cell.direction == "forward":
        masks = [mask_of(cell, one.options) for one in sets]

        def call(i):
            with torch.no_grad():
                return seen((attend(*sets[i % len(sets)][:3], masks[i % len(sets)]),))

        return call
    graphs = []
    for one in sets:
        leaves = [x.detach().requires_grad_(True) for x in one[:3]]
        options = dict(one.options)
        if "bias" in options:       # a leaf of its own shape: dbias is summed as ours is
            options["bias"] = options["bias"].detach().requires_grad_(True)
            leaves.append(options["bias"])
        graphs.append((attend(*leaves[:3], mask_of(cell, options)), leaves, one.dout))

    def pull(i):
        out, leaves, dout = graphs[i % len(graphs)]
        return seen(torch.autograd.grad(out, leaves, dout, retain_graph=True))

    return pull


def mask_of(cell, options):
    """What the options of a cell are for torch: a mask of Booleans, a bias, or None."""
    shape = cell.shape_of("bhqk")
    if "kv_lens" in options:
        lens = options["kv_lens"]
        seen = torch.arange(cell.Nk, device=lens.device) < lens[:, None]
        return seen[:, None, None].expand(shape)
    mask = options.get("mask", options.get("bias"))
    return None if mask is None else mask.expand(shape)

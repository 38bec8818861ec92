"""Attention as the formulas say it: whole score matrices in float64, and nothing clever.

Every other path of the package is measured against this file. It therefore shares no line with
them: it builds its own mask, keeps the whole (Nq, Nk) matrices and never tiles. With
``O = softmax(S) V`` and ``S = cap(scale * Q K^T) + bias - slope * |distance|``, and with a sink as
one more score of each row, whose value is 0::

    P = exp(S - lse)            delta = rowsum(dO * O)          dP = dO V^T
    P_sink = exp(sink - lse)    dsink = sum over rows of P_sink * (dlse - delta)
    dA = P * (dP - delta + dlse)                dbias = dA summed over what was broadcast
    dS = dA * cap'(scale * Q K^T)
    dQ = scale * dS K           dK = scale * dS^T Q             dV = P^T dO

`attention` and `attention_backward` compute that in `compute_dtype`. `baseline` and
`baseline_backward` compute the same as a plain program in the arrays' own dtype would: scores,
softmax and sums in the accumulator dtype, P and dS rounded once before their products. Its
backward knows of the softmax what an interface with `lse` keeps, so its P is ``exp(S - lse)`` and
carries the rounding of `lse`: at scores of 200 that alone is 100 units of P. From |lse| = 2^13 on,
where `lse` has no digits left for P, it uses the softmax itself. The error of these two is the
yardstick for every other path.

The options are those of `cupy_flash.attention`, with the same meaning and the same defaults.
"""

from typing import NamedTuple

import numpy as np


def attention(q, k, v, *, compute_dtype=np.float64, **options):
    """Return `(out, lse)` in `compute_dtype`, shapes as in `cupy_flash.attention`."""
    f = _forward(q, k, v, np.dtype(compute_dtype), _unrounded, **options)
    return f.out.reshape(*q.shape[:-1], v.shape[-1]), f.lse.reshape(q.shape[:-1])


def attention_backward(dout, q, k, v, *, dlse=None, compute_dtype=np.float64, **options):
    """Return `(dq, dk, dv, dbias, dsink)` in `compute_dtype`.

    `dbias` is None without `bias`, `dsink` without `sink`.
    """
    f = _forward(q, k, v, np.dtype(compute_dtype), _unrounded, **options)
    return _backward(f, dout, dlse, q, k, v, options, _unrounded)


def baseline(q, k, v, *, precision=None, **options):
    """Return `(out, lse)` of a plain program in the dtype of `q`, not rounded at the end.

    `precision="tf32"` (float32 only) rounds the operands of every product to TF32.
    """
    f = _forward(q, k, v, _accumulator(q.dtype), _rounding(q.dtype, precision), **options)
    return f.out.reshape(*q.shape[:-1], v.shape[-1]), f.lse.reshape(q.shape[:-1])


def baseline_backward(dout, q, k, v, *, dlse=None, precision=None, out_dtype=None, **options):
    """Return `(dq, dk, dv, dbias, dsink)` of a plain program in the dtype of `q`.

    out_dtype: type in which the program kept `out`, and so delta, between the passes; None is the
    accumulators' type.
    """
    rounded = _rounding(q.dtype, precision)
    f = _forward(q, k, v, _accumulator(q.dtype), rounded, **options)
    with np.errstate(all="ignore"):
        if out_dtype is not None:
            f = f._replace(out=f.out.astype(out_dtype).astype(f.out.dtype))
        P, P_sink = (np.where(np.isneginf(S), 0, np.exp(S - f.lse[..., None]))
                     for S in (f.S, f.sinks))
    large = np.abs(f.lse[..., None]) >= 2.0**13
    f = f._replace(P=np.where(large, f.P, P), P_sink=np.where(large, f.P_sink, P_sink))
    return _backward(f, dout, dlse, q, k, v, options, rounded)


class _Forward(NamedTuple):
    """What backward needs: operands as (B, Hq, N, d) with unseen rows zeroed, P and its kin."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    visible: np.ndarray
    scale: float
    cap_slope: object
    S: np.ndarray
    P: np.ndarray
    sinks: np.ndarray
    P_sink: np.ndarray
    lse: np.ndarray
    out: np.ndarray


def _forward(q, k, v, dtype, rounded, *, scale=None, causal=False, q_offset=None, window=None,
             mask=None, bias=None, softcap=None, alibi_slopes=None, sink=None, q_lens=None,
             kv_lens=None):
    """Everything up to `out` and `lse`; `rounded` is applied to the operands of each product."""
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    q, k, v = (_four_axes(x).astype(dtype) for x in (q, k, v))
    (B, Hq, Nq, _), (Hk, Nk) = q.shape, k.shape[1:3]
    k, v = (np.repeat(x, Hq // max(Hk, 1), axis=1) for x in (k, v))

    q_lens = _column(Nq if q_lens is None else q_lens, B)
    kv_lens = _column(Nk if kv_lens is None else kv_lens, B)
    i, j = np.arange(Nq)[:, None], np.arange(Nk)
    position = i + (kv_lens - q_lens if q_offset is None else int(q_offset))
    visible = np.broadcast_to((i < q_lens) & (j < kv_lens), (B, Hq, Nq, Nk))
    left, right = (None, None) if window is None else window
    if causal:
        visible = visible & (j <= position)
    if left is not None:
        visible = visible & (j >= position - int(left))
    if right is not None:
        visible = visible & (j <= position + int(right))
    if mask is not None:
        visible = visible & mask
    if bias is not None:
        bias = _four_axes(bias).astype(dtype)
        visible = visible & (bias != -np.inf)

    sinks = np.full(Hq, -np.inf) if sink is None else np.asarray(sink)
    sinks = np.where(i < q_lens, sinks.astype(dtype)[:, None, None], -np.inf).astype(dtype)

    # A row that nothing reads may hold NaN, and 0 * NaN is NaN: select it away.
    q = np.where(visible.any(3)[..., None], q, 0)
    k, v = (np.where(visible.any(2)[..., None], x, 0) for x in (k, v))

    with np.errstate(all="ignore"):
        S = scale * (rounded(q) @ rounded(k).swapaxes(2, 3))
        cap_slope = 1.0
        if softcap:
            t = np.tanh(S / float(softcap))
            S, cap_slope = float(softcap) * t, 1 - t * t
        if bias is not None:
            S = S + bias
        if alibi_slopes is not None:
            slopes = np.asarray(alibi_slopes, dtype)[..., None, None]
            S = S - slopes * np.abs(position - j).astype(dtype)
        S = np.where(visible, S, -np.inf)

        m = np.maximum(S.max(axis=3, keepdims=True, initial=-np.inf), sinks)
        m_ref = np.where(m == -np.inf, 0, m)
        P, P_sink = np.exp(S - m_ref), np.exp(sinks - m_ref)
        l = P.sum(axis=3, keepdims=True) + P_sink
        # A sum of no terms is 0, whatever l is.
        P = np.where(visible.any(3)[..., None], P / np.where(l == 0, 1, l), 0)
        P_sink = P_sink / np.where(l == 0, 1, l)
        lse = (m_ref + np.log(l))[..., 0]
        out = rounded(P) @ rounded(v)
    return _Forward(q, k, v, visible, scale, cap_slope, S, P, sinks, P_sink, lse, out)


def _backward(f, dout, dlse, q, k, v, options, rounded):
    """The gradients in the shapes of the user's `q`, `k`, `v`, `bias` and `sink`."""
    P, dtype = f.P, f.P.dtype
    dout = np.where(f.visible.any(3)[..., None], _four_axes(dout).astype(dtype), 0)
    dlse = 0 if dlse is None else np.asarray(dlse).astype(dtype).reshape(f.lse.shape)[..., None]

    def hidden_zero(x):
        return np.where(f.visible, x, 0)

    with np.errstate(all="ignore"):
        dP = hidden_zero(rounded(dout) @ rounded(f.v).swapaxes(2, 3))
        delta = (rounded(dout) * f.out).sum(axis=3, keepdims=True)
        # Kernels keep one number a row, so dlse goes into delta first: what that rounds off is all
        # that is left of dP - delta where a row sees one key.
        dA = hidden_zero(P * (dP - (delta - dlse)))
        dsink = np.where(np.isneginf(f.sinks), 0, -(f.P_sink * (delta - dlse)))
        dS = rounded(hidden_zero(dA * f.cap_slope))
        dq = f.scale * (dS @ rounded(f.k))
        dk = f.scale * (dS.swapaxes(2, 3) @ rounded(f.q))
        dv = rounded(P).swapaxes(2, 3) @ rounded(dout)
    bias = options.get("bias")
    dbias = None if bias is None else _sum_to(dA, bias.shape)
    dsink = None if options.get("sink") is None else dsink.sum(axis=(0, 2, 3))
    return dq.reshape(q.shape), _sum_group(dk, k.shape), _sum_group(dv, v.shape), dbias, dsink


def _four_axes(x):
    """`x` with leading axes of length one, up to (B, H, N, d) or (B, Hq, Nq, Nk)."""
    x = np.asarray(x)
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _column(lens, B):
    """One length or B lengths as int64 that broadcast against (B, Hq, Nq, Nk)."""
    return np.broadcast_to(np.asarray(lens, np.int64), (B,))[:, None, None, None]


def _sum_group(gradient, shape):
    """Sum over the query heads that read the same key head."""
    B, Hq, N, d = gradient.shape
    Hk = 1 if len(shape) == 2 else shape[-3]
    return gradient.reshape(B, Hk, Hq // max(Hk, 1), N, d).sum(axis=2).reshape(shape)


def _sum_to(dA, shape):
    """Sum over the axes along which an array of `shape` was broadcast."""
    full = (1,) * (4 - len(shape)) + tuple(shape)
    axes = tuple(axis for axis in range(4) if full[axis] == 1 and dA.shape[axis] != 1)
    return dA.sum(axis=axes, keepdims=True).reshape(shape)


def _accumulator(dtype):
    """float64 for float64, float32 for everything else."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _rounding(dtype, precision):
    """The function that rounds an operand of a product as a plain program would."""
    if precision == "tf32":
        return _to_tf32
    if np.dtype(dtype).itemsize == 2:
        return lambda x: x.astype(dtype).astype(x.dtype)
    return _unrounded


def _unrounded(x):
    return x


def _to_tf32(x):
    """Round float32 to the 10 mantissa bits of TF32, to nearest even; finite stays finite."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    bits = (bits + np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1)))
    y = (bits & np.uint32(0xFFFFE000)).view(np.float32).reshape(x.shape)
    return np.where(np.isfinite(x) & np.isfinite(y), y, x)

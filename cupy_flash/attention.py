"""The public functions: bind the call, make a plan, run it.

``*unnamed`` and ``**unknown`` take in what nobody should pass, so that the refusal can say what to
write instead; see `words`.
"""

import os
from functools import cache
from typing import Any, NamedTuple

from . import console, device
from .bind import Options, bind_backward, bind_forward, check_pullback, describe_both
from .plan import make_plan
from .scalars import check_flag
from .words import arguments_of, exact, refusal

_NO_OPTIONS = Options()
# Whether every call says on stderr what it runs. Read once: the environment is slow to look at.
_PRINTS_PLANS = os.environ.get("CUPY_FLASH_PRINT_PLAN") == "1"


class Gradients(NamedTuple):
    """Gradients of `attention`, as `attention_backward` and the pullbacks return them.

    Attributes
    ----------
    dq : ndarray (..., Nq, d)
    dk : ndarray (..., Nk, d)
    dv : ndarray (..., Nk, d_v)
        Shapes and memory order of q, k, v; their dtype, or `grad_dtype`.
    dbias : ndarray
        Shape of `bias`, summed over the axes along which it was broadcast; its dtype, or
        `grad_dtype`.
    dsink : ndarray (Hq,)
        In the dtype of `sink`, always.

    What `wrt` leaves out is None, and so are dbias without a bias and dsink without a sink.

    Notes
    -----
    The formulas are those of `attention_backward`; dbias is dS there.

    Examples
    --------
    >>> import numpy as np, cupy_flash as cf
    >>> x = np.ones((3, 4), np.float32)
    >>> out, pullback = cf.attention_vjp(x, x, x, bias=np.zeros(3))
    >>> g = pullback(out)
    >>> g.dq.shape, g.dbias.shape, g.dbias.dtype
    ((3, 4), (3,), dtype('float64'))
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsink: Any = None


@exact
def attention(q, k, v, *unnamed, scale=None, causal=False, q_offset=None, window=None, mask=None,
              bias=None, softcap=None, alibi_slopes=None, sink=None, q_lens=None, kv_lens=None,
              precision=None, return_lse=False, out=None, out_dtype=None, **unknown):
    """Exact attention, ``softmax(scale * q @ k.T + ...) @ v``, without the Nq x Nk matrix.

    The sequence axis is the last but one, always: ``(N, d)``, ``(H, N, d)`` or ``(B, H, N, d)``,
    the same number of axes in q, k and v. Pass a ``(B, N, H, d)`` array as ``x.swapaxes(1, 2)``.
    All but q, k and v is passed by name.

    Parameters
    ----------
    q : ndarray (..., Nq, d)
        Queries; float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or float64. d from 1 to 256.
        Any strides; an input whose last axis has no unit stride is copied once.
    k : ndarray (..., Nk, d)
        Keys, dtype of `q`. q's heads must be a multiple of k's: query head ``h`` reads key head
        ``h // (Hq // Hk)`` (grouped or multi-query attention).
    v : ndarray (..., Nk, d_v)
        Values, dtype of `q`; d_v from 1 to 256.
    scale : float, optional
        Factor of the scores, any finite number on the host; default ``1 / sqrt(d)``.
    causal : bool
        Query ``i`` sees key ``j`` iff ``j <= i + q_offset``. With the default offset, Nq = 2 and
        Nk = 4 (first picture), Nq = 4 and Nk = 2 (second; the first two rows fully masked)::

            1 1 1 0        0 0
            1 1 1 1        0 0
                           1 0
                           1 1
    q_offset : int, optional
        Position of query 0 among the keys. Default ``Nk - Nq``: the newest query sees every key;
        with `kv_lens` or `q_lens` the true lengths count. 0 aligns the first query and key. From
        -2^40 to 2^40; without effect where neither `causal` nor `window` nor `alibi_slopes` looks
        at positions, so that ``causal=flag`` needs no second call.
    window : (left, right), optional
        Keys ``i + q_offset - left ... i + q_offset + right`` are visible, both ends included, each
        an integer from 0 on; None on a side: unlimited. Combined with `causal` by AND. The last W
        tokens, the query's own included, are ``window=(W - 1, 0)``.
    mask : ndarray of bool, optional
        True = may attend; broadcast to ``(B, Hq, Nq, Nk)`` without being expanded in memory.
    bias : ndarray, optional
        Of any of the four dtypes, broadcast likewise; added to the scores after `scale` and
        `softcap`. -inf hides the key.
    softcap : float, optional
        Scores become ``softcap * tanh(scores / softcap)``, before bias and masks. None or 0: off.
    alibi_slopes : ndarray (Hq,) or (B, Hq), optional
        float32 or float64; ``-slope * abs(i + q_offset - j)`` is added to the scores.
    sink : ndarray (Hq,), optional
        float32 (float64 for float64): the score of one more key of each query head, after all
        other options, whose value is 0. It takes weight from the keys, and `lse` has it. -inf: no
        sink for that head; +inf is a ValueError on the host. Of parts to `merge`, one has it.
    q_lens, kv_lens : ndarray (B,) of int32, optional
        True lengths inside the padded arrays, 0 to Nq and 0 to Nk. What lies behind them changes
        nothing; result rows behind `q_lens` are 0 with lse -inf. Causal attention is aligned by
        them: in a training batch padded on the right give both, or with `kv_lens` alone the last
        *padded* query is the one that sees every key, and the first true ones see none.
    precision : {"tf32x3", "tf32"}, optional
        float32 inputs only: "tf32x3" (default) is as exact as float32; "tf32" rounds q, k, v and
        the probabilities to TF32, an error of about 1e-3.
    return_lse : bool
        Also return the log-sum-exp of the scores.
    out : ndarray (..., Nq, d_v), optional
        Buffer for the result, of any strides, apart from all inputs; it is returned.
    out_dtype : dtype, optional
        None (dtype of `q`) or float32 (float64 for float64), to `merge` partial results.

    Returns
    -------
    out : ndarray (..., Nq, d_v)
        In the memory order of `q`. A fully masked row (no key is visible to it) is 0.
    lse : ndarray (..., Nq), if `return_lse`
        Natural logarithm, float32 (float64 for float64); the sink or -inf in a fully masked row.

    Raises
    ------
    TypeError
        An argument that is no array or number of a supported dtype, arrays of mixed kinds, arrays
        whose class adds a meaning (units, masks), or a word that this function does not have: for
        those of other libraries the message has the word here.
    ValueError
        Shapes, lengths or numbers out of range (on a GPU from 2^30 rows on), or an `out` that
        overlaps an input.
    NotImplementedError
        A GPU older than compute capability 8.0, or no CuPy for arrays on a GPU.

    Notes
    -----
    Dao et al., "FlashAttention" (2022); Dao, "FlashAttention-2" (2023), algorithm 1; memory O(N).
    `alibi_slopes`: Press et al., "Train Short, Test Long" (2022), section 3.
    A masked key cannot matter: finite values behind any mask, and NaN or infinities in keys that no
    query of a tile sees, change nothing.

    Examples
    --------
    >>> import numpy as np, cupy_flash as cf
    >>> x = np.random.default_rng(0).standard_normal((8, 1000, 64), dtype=np.float32)
    >>> cf.attention(x, x, x, causal=True).shape
    (8, 1000, 64)
    >>> out, lse = cf.attention(x, x, x, sink=np.zeros(8, np.float32), return_lse=True)
    """
    if unnamed or unknown:
        raise _refusal("attention", unnamed, unknown)
    if return_lse is not False:
        check_flag("return_lse", return_lse)
    options = Options(mask, bias, alibi_slopes, sink, q_lens, kv_lens, scale, causal, q_offset,
                      window, softcap, precision)
    results = _run("forward", *bind_forward(q, k, v, options, out, out_dtype, bool(return_lse)))
    out = results["out"] if out is None else out
    return (out, results["lse"]) if return_lse else out


@exact
def attention_backward(dout, q, k, v, out, lse, *unnamed, dlse=None, deterministic=False,
                       grad_dtype=None, dq=None, dk=None, dv=None, wrt=None, **options):
    """Gradients of `attention` with respect to q, k, v, bias and sink.

    Parameters
    ----------
    dout : ndarray (..., Nq, d_v)
        Gradient of the result; dtype of `q`, or float32 (float64 for float64).
    q, k, v : ndarray
        As in the forward call.
    out, lse : ndarray (..., Nq, d_v) and (..., Nq)
        What `attention` returned; `out` in the dtype of `q` or float32, `lse` in float32 (both
        float64 for float64). If the keys here are a part of all keys (ring attention), those of the
        whole: the gradients of the parts then add up. Not so in rows whose lse is beyond 2^21 in
        size (float64: 2^50), as after a bias of -3.4e38 for every key: it does not tell a part from
        the whole, and the keys here are taken for all.
    dlse : ndarray (..., Nq), optional
        Gradient of `lse`, in its dtype.
    deterministic : bool
        Bitwise equal from run to run. The CPU path always is, whatever the number of threads; on a
        GPU dq and dbias of a broadcast bias may otherwise differ in the last bits, and this takes
        longer.
    grad_dtype : dtype, optional
        Of all gradients but dsink: None (each in its operand's dtype) or float32 (float64 for
        float64).
    dq, dk, dv : ndarray, optional
        Buffers of the shapes of q, k, v and of the gradients' dtype, of any strides, apart from all
        inputs; they are returned.
    wrt : tuple of str, optional
        The operands whose gradients are wanted, of "q", "k", "v", "bias" and "sink", each once;
        None: of all that there are. What is left out is None in the result and is not computed;
        what is wanted has the same bits as without `wrt`.
    **options
        Those of the forward call: scale, causal, q_offset, window, mask, bias, softcap,
        alibi_slopes, sink, q_lens, kv_lens, precision.

    Returns
    -------
    Gradients
        (dq, dk, dv, dbias, dsink), None for what is not wanted. 0 for fully masked rows and for
        keys that no row sees.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `attention`.

    Notes
    -----
    Dao et al., "FlashAttention" (2022), appendix B.2: P = exp(S - lse), dP = dO V^T,
    delta = rowsum(dO * O) - dlse, dS = P * (dP - delta), dQ = scale dS K, dK = scale dS^T Q,
    dV = P^T dO, dsink = -sum of exp(sink - lse) delta over the rows of a head. Where lse is 2^13 or
    more in size, its rounding would spoil P: the softmax of such a row is computed anew, if all of
    its keys are here (on a GPU in calls with a bias or ALiBi).

    Examples
    --------
    >>> import numpy as np, cupy_flash as cf
    >>> x = np.random.default_rng(0).standard_normal((8, 100, 64), dtype=np.float32)
    >>> out, lse = cf.attention(x, x, x, causal=True, return_lse=True)
    >>> grads = cf.attention_backward(out, x, x, x, out, lse, causal=True, wrt=("q", "v"))
    >>> grads.dv.shape, grads.dk
    ((8, 100, 64), None)
    """
    options = _options("attention_backward", unnamed, options)
    return _gradients(dout, q, k, v, out, lse, options, dlse, deterministic, grad_dtype, wrt, dq,
                      dk, dv)


@exact
def attention_vjp(q, k, v, *unnamed, return_lse=False, deterministic=False, grad_dtype=None,
                  wrt=None, **options):
    """`attention` and the function that pulls gradients back through it.

    The pullback keeps the arrays themselves, not copies: q, k, v, the returned `out` and `lse`, and
    every array among the options (bias, mask, alibi_slopes, sink, q_lens, kv_lens). None of them
    may be changed before its last call, `out` included (``out += x`` gives wrong gradients,
    silently): write ``out = out + x``, or pass on ``out.copy()``.

    Parameters
    ----------
    q, k, v : ndarray
        As in `attention`.
    return_lse : bool
        The first result is then ``(out, lse)``, and the pullback takes ``(dout, dlse)``.
    deterministic, grad_dtype, wrt
        As in `attention_backward`.
    **options
        As in `attention`: scale, causal, q_offset, window, mask, bias, softcap, alibi_slopes,
        sink, q_lens, kv_lens, precision.

    Returns
    -------
    out : ndarray (..., Nq, d_v), or (out, lse)
    pullback : callable
        ``pullback(dout)`` or ``pullback(dout, dlse)`` returns `Gradients`, as often as it is
        called; shapes and dtypes as in `attention_backward`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `attention`; for all arguments before anything is computed.

    Notes
    -----
    The formulas are those of `attention_backward`.

    Examples
    --------
    >>> import numpy as np, cupy_flash as cf
    >>> x = np.random.default_rng(0).standard_normal((8, 100, 64), dtype=np.float32)
    >>> out, pullback = cf.attention_vjp(x, x, x, sink=np.zeros(8, np.float32), wrt=("q", "sink"))
    >>> grads = pullback(np.ones_like(out))
    >>> grads.dq.shape, grads.dsink.shape, grads.dk
    ((8, 100, 64), (8,), None)
    """
    options = _options("attention_vjp", unnamed, options)
    check_flag("return_lse", return_lse)
    check_pullback(q, k, v, options, deterministic, grad_dtype, wrt)
    results = _run("forward", *bind_forward(q, k, v, options))
    out, lse = results["out"], results["lse"]

    def pullback(dout, dlse=None):
        """Gradients for dout (..., Nq, d_v) and dlse (..., Nq)."""
        return _gradients(dout, q, k, v, out, lse, options, dlse, deterministic, grad_dtype, wrt)

    return ((out, lse) if return_lse else out), pullback


@exact
def explain(q, k, v, *unnamed, return_lse=False, out=None, out_dtype=None, dout=None, lse=None,
            dlse=None, deterministic=False, grad_dtype=None, dq=None, dk=None, dv=None, wrt=None,
            **options):
    """The plans of the forward and the backward pass for these arguments, as text.

    It takes the words of the calls that it explains, checks them as these do, and computes nothing.

    Parameters
    ----------
    q, k, v : ndarray
        As in `attention`.
    return_lse, out, out_dtype
        As in `attention`. `out` is the buffer there and the argument of the same name in
        `attention_backward`.
    dout, lse, dlse, deterministic, grad_dtype, dq, dk, dv, wrt
        As in `attention_backward`; without `dout`, `out` or `lse`, arrays as `attention` would
        return them are assumed.
    **options
        Of both: scale, causal, q_offset, window, mask, bias, softcap, alibi_slopes, sink, q_lens,
        kv_lens, precision.

    Returns
    -------
    str
        Kernels, tiles, tasks and threads with the reasons, workspace, and inputs that are copied.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As the calls.

    Notes
    -----
    docs/design.md has what a plan is.

    Examples
    --------
    >>> import numpy as np, cupy_flash as cf
    >>> x = np.zeros((8, 1000, 64), np.float32)
    >>> print(cf.explain(x, x, x, causal=True).split(",")[0])
    forward: batch 1
    """
    options = _options("explain", unnamed, options)
    arrays = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "dlse": dlse, "dq": dq,
              "dk": dk, "dv": dv}
    problems = describe_both(arrays, options, out_dtype=out_dtype, returns_lse=return_lse,
                             deterministic=deterministic, grad_dtype=grad_dtype, wrt=wrt)
    where = device.of(problems[0].gpu)
    plans = map(make_plan, ("forward", "backward"), problems, (where, where))
    return "\n".join(map(str, plans))


def _gradients(dout, q, k, v, out, lse, options, dlse, deterministic, grad_dtype, wrt, dq=None,
               dk=None, dv=None):
    """`Gradients` for `Options`, in which each word is one."""
    results = _run("backward", *bind_backward(dout, q, k, v, out, lse, options, dlse, deterministic,
                                              grad_dtype, dq, dk, dv, wrt))
    return Gradients(results.get("dq", dq), results.get("dk", dk), results.get("dv", dv),
                     results.get("dbias"), results.get("dsink"))


def _options(function, unnamed, options):
    """The options behind ``**options``; TypeError if a word is none of them."""
    if unnamed:
        raise _refusal(function, unnamed, options)
    if not options:
        return _NO_OPTIONS
    try:
        return Options(**options)
    except TypeError:
        raise _refusal(function, unnamed, options) from None


def _refusal(function, unnamed, given):
    """The error for arguments that the function of this name does not have."""
    functions = (attention, attention_backward, attention_vjp, explain)
    known = {f.__name__: arguments_of(f, Options._fields) for f in functions}
    return refusal(function, unnamed, given, known)


def _run(direction, problem, arrays):
    """The results that the caller gave no buffer for, by name."""
    if _PRINTS_PLANS:
        console.say(str(make_plan(direction, problem, device.of(problem.gpu))))
    backend = _backend("cpu" if problem.gpu is None else "cuda")
    return backend.run(direction, problem, arrays)


@cache
def _backend(kind):
    """The module that computes there; Numba and CuPy load with the first call that needs them."""
    if kind == "cuda":
        from .backends.cuda import launch
        return launch
    device.cpu()        # refuses a number of threads that Numba would refuse less clearly
    from .backends import cpu
    return cpu

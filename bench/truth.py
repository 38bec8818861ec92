"""The answers to a cell in float64, from which every program of the bench takes its errors."""

ROWS = 1024         # of a block: its scores take 128 MiB at Nk = 16,384


def answers(cell, q, k, v, dout, xp, options=None, dtype=None, rounded=lambda x: x):
    """out, lse, dq (group, Nq, ...), dk, dv (Nk, ...) of a key head, block of rows by block.

    q and dout are those of the query heads that read it. xp: torch, CuPy or NumPy. With another
    dtype and P, dS and the results `rounded` it is the baseline of a narrower type.
    """
    dtype, options = dtype or xp.float64, options or {}
    q, k, v, dout = (xp.asarray(x, dtype=dtype) for x in (q, k, v, dout))
    out, dq, lse = xp.empty_like(dout), xp.empty_like(q), xp.empty_like(q[..., 0])
    dk, dv, scale = xp.zeros_like(k), xp.zeros_like(v), cell.d**-0.5
    for head, row in ((h, r) for h in range(len(q)) for r in range(0, cell.Nq, ROWS)):
        rows = slice(row, min(row + ROWS, cell.Nq))
        keys = _seen(cell, rows)
        S, slope = _scores(cell, scale * (q[head, rows] @ k[keys].T), head, rows, keys, options, xp)
        m = xp.amax(S, axis=1, keepdims=True)
        P = xp.exp(S - m)
        l = P.sum(axis=1, keepdims=True)
        if "sink" in options:
            l += xp.exp(options["sink"][head] - m)
        P /= l
        lse[head, rows] = (m + xp.log(l))[:, 0]
        out[head, rows] = rounded(rounded(P) @ v[keys])
        dS = dout[head, rows] @ v[keys].T
        dS -= (out[head, rows] * dout[head, rows]).sum(axis=1, keepdims=True)
        dS *= P
        if slope is not None:
            dS *= slope
        dS = rounded(dS)
        dq[head, rows] = rounded(scale * (dS @ k[keys]))
        dk[keys] += scale * (dS.T @ q[head, rows])
        dv[keys] += rounded(P).T @ dout[head, rows]
    return {"out": out, "lse": lse, "dq": dq, "dk": rounded(dk), "dv": rounded(dv)}


def _seen(cell, rows):
    """The keys that some of the rows may see."""
    offset = cell.Nk - cell.Nq
    first = max(0, rows.start + offset - cell.window + 1) if cell.window else 0
    return slice(first, min(rows.stop + offset, cell.Nk) if cell.causal else cell.Nk)


def _scores(cell, S, head, rows, keys, options, xp):
    """Scores with all that changes them, and their derivative by those without, None if it is 1."""
    slope = None
    if cell.softcap:
        S = xp.tanh(S / cell.softcap)
        S, slope = cell.softcap * S, 1 - S * S

    def block(name):
        shape = (len(options[name]), cell.Nq, cell.Nk)
        return xp.broadcast_to(options[name], shape)[min(head, shape[0] - 1), rows, keys]

    if "bias" in options:
        S = S + xp.asarray(block("bias"), dtype=S.dtype)
    offset = cell.Nk - cell.Nq
    positions = xp.arange(keys.start, keys.stop)
    ahead = positions - xp.arange(rows.start + offset, rows.stop + offset)[:, None]
    if "alibi_slopes" in options:
        S = S - options["alibi_slopes"][head] * abs(ahead)
    if "mask" in options:
        S[~block("mask")] = -xp.inf
    if "kv_lens" in options:
        S[:, positions >= options["kv_lens"]] = -xp.inf
    if cell.causal:
        hidden = ahead > 0
        if cell.window:
            hidden |= ahead <= -cell.window
        S[hidden] = -xp.inf
    return S, slope


def of_head(cell, one, b, head):
    """q, k, v, dout and options of one key head of a `Set`, as `answers` takes them."""
    group = cell.Hq // cell.Hk
    rows = slice(head * group, (head + 1) * group)
    options = {}
    for name, x in one.options.items():
        if name == "kv_lens":
            options[name] = x[b]
        elif x.ndim == 1:
            options[name] = x[rows]
        else:
            x = x[b if len(x) > 1 else 0]
            options[name] = x[rows] if len(x) > 1 else x
    return (one.q[b, rows], one.k[b, head], one.v[b, head], one.dout[b, rows]), options


def known(cell, one, xp):
    """Answers to a `Set` at its first and its last key head: (b, key head) -> name -> array."""
    found = {}
    for place in {(0, 0), (cell.B - 1, cell.Hk - 1)}:
        arrays, options = of_head(cell, one, *place)
        found[place] = answers(cell, *arrays, xp, options)
    return found


def errors(cell, results, found, xp):
    """Relative error of each result where answers are known; NaN if any element is not finite.

    results: name -> array (B, heads, N, width).
    """
    group, errs = cell.Hq // cell.Hk, {}
    for name, x in results.items():
        if not xp.isfinite(x).all():
            errs[name] = float("nan")
            continue
        for (b, head), want in found.items():
            if name not in want:        # dbias and dsink, sums over heads
                continue
            rows = slice(head * group, (head + 1) * group)
            got = x[b, rows] if name in ("out", "dq") else x[b, head]
            difference = xp.asarray(got, dtype=xp.float64) - want[name]
            ratio = xp.linalg.norm(difference.ravel()) / xp.linalg.norm(want[name].ravel())
            errs[name] = max(errs.get(name, 0.0), float(ratio))
    return errs

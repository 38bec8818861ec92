"""The whole interface at once: hypothesis draws the shapes, dtypes, options and strides."""

import numpy as np
from answers import answers_to, floors, judge
from cases import DATA, DTYPES, Case, forms, inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import DRAWS
from test_layout import VIEWS, unaligned

import cupy_flash as cf
from cupy_flash.options import ARRAYS
from cupy_flash.plan import tuned

SIZES = st.one_of(st.integers(0, 8), st.integers(0, 130), st.sampled_from((95, 96, 97, 192, 193)))
HEAD_DIMS = st.one_of(st.integers(1, 40), st.sampled_from((63, 64, 65, 80, 96, 128, 192, 255, 256)))
SIDES = st.one_of(st.none(), st.integers(0, 3), st.integers(0, 220))


@st.composite
def problems(draw, data=tuple(DATA)):
    """A `Case` with any options."""
    ndim = draw(st.integers(2, 4))
    Hk = 1 if ndim == 2 else draw(st.integers(1, 3))
    B = 1 if ndim < 4 else draw(st.integers(1, 3))
    Nq, Nk = draw(SIZES), draw(SIZES)
    dtype = draw(st.sampled_from(tuple(DTYPES)))
    d = draw(HEAD_DIMS)
    arrays = {name: draw(st.none() | st.sampled_from(forms(option, ndim)))
              for name, option in ARRAYS.items()}
    return Case(
        "drawn", Nq=Nq, Nk=Nk, d=d, d_v=draw(st.just(d) | HEAD_DIMS), B=B, Hk=Hk,
        Hq=1 if ndim == 2 else Hk * draw(st.integers(1, 4)), ndim=ndim, dtype=dtype,
        scale=draw(st.sampled_from((None, None, 0.0, -0.2, 0.7))),
        causal=draw(st.booleans()),
        q_offset=draw(st.none() | st.integers(-140, 140)),
        window=draw(st.none() | st.tuples(SIDES, SIDES)),
        softcap=draw(st.sampled_from((None, None, 0, 0.5, 5.0, 50.0))),
        precision=draw(st.sampled_from((None, "tf32", "tf32x3"))) if dtype == "float32" else None,
        arrays=tuple((name, axes) for name, axes in arrays.items() if axes is not None),
        data=draw(st.sampled_from(data)) if min(Nq, Nk) > 0 else "normal",
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def compute(backend, x, views=(), **more):
    """Forward and backward; each array in turn is seen through the next of `views`.

    Backward gets `out` in the accumulator dtype: with two keys nearly alike, dP - delta can be
    smaller than what rounding `out` to 16 bits does to delta, and no rule holds then.
    """
    y = backend.move(x)
    arrays = {"q": y.q, "k": y.k, "v": y.v, "dout": y.dout, "dlse": y.dlse}
    arrays |= {n: y.options[n] for n in ARRAYS if n in y.options}
    for (name, array), view in zip(arrays.items(), views, strict=False):
        # A GPU can neither read nor write an element across its alignment: test_layout has that.
        if backend.name == "cuda" and view is unaligned:
            continue
        if view is not None and array.ndim >= 2:
            arrays[name] = view(array, backend.xp)
    q, k, v, dout, dlse = (arrays.pop(n) for n in ("q", "k", "v", "dout", "dlse"))
    options = y.options | arrays
    out, lse = cf.attention(q, k, v, return_lse=True, **options)
    wide = cf.attention(q, k, v, out_dtype=lse.dtype, **options)
    g = cf.attention_backward(dout, q, k, v, wide, lse, dlse=dlse, **options, **more)
    results = {"out": out, "lse": lse, **g._asdict()}
    return {name: None if a is None else backend.asnumpy(a) for name, a in results.items()}


@settings(max_examples=100)
@given(problem=problems(), views=st.lists(st.none() | st.sampled_from(VIEWS), max_size=7))
def test_agrees_with_the_reference(backend, problem, views):
    x = inputs(problem)
    judge(f"{problem}", compute(backend, x, views), *answers_to(x), floors(x), DRAWS)


@settings(max_examples=40)
@given(problem=problems(), Br=st.integers(1, 12), Bc=st.integers(1, 20),
       lazy=st.sampled_from((None, 0.0, 1.0, 60.0)))   # e^89 overflows in float32
def test_tiles_change_nothing_but_rounding(backend, problem, Br, Bc, lazy):
    x = inputs(problem)
    with tuned(Br=16 * Br, Bc=6 * Bc, lazy=lazy):
        got = compute(backend, x)
    judge(f"{problem}", got, *answers_to(x), floors(x), DRAWS)


@settings(max_examples=40)
@given(problem=problems(("normal", "mean1")))
def test_rows_that_see_nothing_and_keys_that_nobody_sees(backend, problem):
    """Exact zeros, and never a NaN, wherever nothing is seen."""
    x = inputs(problem)
    got = compute(backend, x)
    want, _ = answers_to(x)
    for name, array in got.items():
        assert array is None or not np.isnan(array).any(), name
    empty = np.isneginf(want.lse)
    assert (np.isneginf(got["lse"]) == empty).all()
    assert (got["out"][empty] == 0).all() and (got["dq"][empty] == 0).all()
    # A key that nobody sees has an exactly zero dv in the reference: P^T dO sums only zeros.
    unseen = (want.dv == 0).all(axis=-1)
    assert (got["dk"][unseen] == 0).all() and (got["dv"][unseen] == 0).all()

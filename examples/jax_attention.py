"""
Attention in JAX: jit, grad, vmap, x64
======================================

JAX takes a function of ours as an operation whose gradient it is told. Called eagerly, on a CPU
or a GPU, the arrays go over by DLPack, where they are. Under ``jit``, ``vmap`` and the like the
compiled program calls back to the host: on a CPU that is the same memory; for a GPU it would be a
silent copy of everything, and is refused while the program is compiled.

Mask, bias (with its gradient), lengths and a traced scale are supported; with ``jax_enable_x64``,
float64 stays float64.
"""

import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import cupy_flash as cf

# %%
# The public function. What JAX may trace (arrays, a scale that is one) goes in as operands, in a
# fixed order; what has to be known while compiling goes in as `options`.


def attention(q, k, v, mask=None, bias=None, *, scale=None, q_lens=None, kv_lens=None, **options):
    """`cupy_flash.attention` of JAX arrays, differentiable in q, k, v, bias and scale.

    Parameters
    ----------
    q, k, v : jax.Array (N, d), (H, N, d) or (B, H, N, d)
    mask, bias : jax.Array, optional
        As in `cupy_flash.attention`.
    scale : float or jax.Array, optional
        A traced scale is multiplied into q, and so has a gradient.
    q_lens, kv_lens : jax.Array (B,) of int32, optional
    **options
        causal, window, softcap, q_offset, precision: no arrays.

    Returns
    -------
    jax.Array (..., Nq, d_v)
    """
    if isinstance(scale, jax.Array):
        q, scale = q * scale.astype(q.dtype), 1.0
    return _attention((("scale", scale), *options.items()), q, k, v, mask, bias, q_lens, kv_lens)


NAMES = ("mask", "bias", "q_lens", "kv_lens")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, *operands):
    """The operation; options: pairs of name and value, operands: q, k, v and those of `NAMES`."""
    return _forward(options, *operands)[0]


def _forward(options, *operands):
    """The output, and what backward needs."""
    q, _, v = operands[:3]
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    shapes = (jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype),
              jax.ShapeDtypeStruct(q.shape[:-1], wide))

    def compute(q, k, v, *rest):
        return cf.attention(q, k, v, return_lse=True, **_given(options, rest))

    out, lse = _call(compute, shapes, operands)
    return out, (operands, out, lse)


def _backward(options, saved, dout):
    """The gradients of all operands; None for mask and lengths."""
    operands, out, lse = saved
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype)
                   for x in (*operands[:3], operands[4]) if x is not None)

    def compute(dout, out, lse, q, k, v, *rest):
        grads = cf.attention_backward(dout, q, k, v, out, lse, **_given(options, rest))
        return grads[: len(shapes)]

    dq, dk, dv, *dbias = _call(compute, shapes, (dout, out, lse, *operands))
    return dq, dk, dv, None, dbias[0] if dbias else None, None, None


_attention.defvjp(_forward, _backward)


def _given(options, rest):
    """The keyword arguments of a call."""
    arrays = {name: x for name, x in zip(NAMES, rest, strict=True) if x is not None}
    return arrays | dict(options)


# %%
# How a computation is called: with arrays that exist, at once and where they are; with traced
# ones, by a callback of the compiled program, which only a program for the CPU may have.


def _call(compute, shapes, operands):
    """`compute` on the operands; None among them stays None."""
    given = [x for x in operands if x is not None]

    def with_none(*arrays):
        arrays = iter(arrays)
        return compute(*(None if x is None else next(arrays) for x in operands))

    if not any(isinstance(x, jax.core.Tracer) for x in given):
        return tuple(map(_to_jax, with_none(*given)))
    if _traced_for() != "cpu":
        raise NotImplementedError(
            "cupy_flash.attention is under jit, vmap or the like for a GPU, where each call would "
            "copy its arrays to the host and back: call it eagerly, which works by DLPack, or "
            "compile for the CPU under `with jax.default_device(jax.devices('cpu')[0])`")

    def on_the_host(*arrays):
        return tuple(with_none(*map(np.asarray, arrays)))

    def callback(*arrays):
        return jax.pure_callback(on_the_host, shapes, *arrays, vmap_method="sequential")

    # A program for another device, by whatever way it came to that, cannot be compiled from this.
    return jax.lax.platform_dependent(*given, cpu=callback)


def _traced_for():
    """The platform that programs are compiled for where nothing else is said."""
    device = jax.config.jax_default_device or jax.devices()[0]
    return getattr(device, "platform", device)


def _to_jax(x):
    """A result as an array of JAX; CuPy's bfloat16 cannot leave under its own name."""
    if isinstance(x, np.ndarray):
        return jnp.asarray(x)
    if x.dtype.name == "bfloat16":
        return jax.lax.bitcast_convert_type(jnp.from_dlpack(x.view("uint16")), jnp.bfloat16)
    return jnp.from_dlpack(x)


# %%
# Held against JAX's own attention, output and gradients, eagerly and under ``jit``.


def theirs(q, k, v, bias):
    """JAX's attention, which has the heads on the last axis but one."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, bias, is_causal=True).swapaxes(1, 2)


def ours(q, k, v, bias):
    """The same by `attention`."""
    return attention(q, k, v, bias=bias, causal=True)


def compare():
    """The largest differences of output and gradients."""
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, (2, 4, 100, 32)) for key in keys[:3]]
    arrays.append(jax.random.normal(keys[3], (1, 4, 100, 100)))
    want = theirs(*arrays), *_grad(theirs)(*arrays)
    ways = {"eager": (ours, _grad(ours)), "jit": (jax.jit(ours), jax.jit(_grad(ours)))}
    if _traced_for() != "cpu":
        del ways["jit"]
    found = {}
    for way, (f, gradient) in ways.items():
        got = f(*arrays), *gradient(*arrays)
        found[way] = [float(jnp.max(jnp.abs(a - b))) for a, b in zip(got, want, strict=True)]
        names = zip(("out", "dq", "dk", "dv", "dbias"), found[way], strict=True)
        print(f"{way:6}" + "".join(f"  {name} {x:.0e}" for name, x in names))
    return found


def _grad(f):
    """Gradients of a sum of sines, with respect to all arrays."""
    return jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))), (0, 1, 2, 3))


differences = compare()

# %%
# A traced scale is a parameter like any other: the bandwidth of a kernel regression, fitted by
# ``jax.grad`` under ``jit``.

x_key, noise_key = jax.random.split(jax.random.key(1))
x = jax.random.uniform(x_key, (2000, 1), minval=-3, maxval=3)
y = jnp.sin(2 * x) + 0.3 * jax.random.normal(noise_key, x.shape)


def predict(log_h, points, places, values):
    """The estimate of Nadaraya and Watson: one more column makes the distance a product."""
    q = jnp.concatenate([points, jnp.ones_like(points)], axis=1)
    k = jnp.concatenate([places, -(places**2) / 2], axis=1)
    return attention(q, k, values, scale=jnp.exp(-2 * log_h))


def loss(log_h):
    """The mean squared error on every fourth point, from the others."""
    known = np.arange(len(x)) % 4 != 0
    estimate = predict(log_h, x[::4], x[known], y[known])
    return jnp.mean((estimate - y[::4]) ** 2)


step = jax.value_and_grad(loss)
step = jax.jit(step) if _traced_for() == "cpu" else step
log_h, path = jnp.float32(0.0), []
for _ in range(25):
    error, slope = step(log_h)
    path.append((float(jnp.exp(log_h)), float(error)))
    log_h -= jnp.clip(5 * slope, -0.5, 0.5)
print(f"h goes from {path[0][0]:.2f} to {path[-1][0]:.3f}, the squared error from "
      f"{path[0][1]:.3f} to {path[-1][1]:.4f}; the noise has 0.09")

points = jnp.linspace(-3, 3, 300)[:, None]
figure, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
axis.plot(x[::4], y[::4], ".", ms=2, color="#aaaaaa")
axis.plot(points, predict(jnp.float32(0.0), points, x, y), color="#d98a2b", label="h = 1, at first")
axis.plot(points, predict(log_h, points, x, y), color="#2a6fb0", label=f"h = {path[-1][0]:.3f}")
axis.legend()
plt.show()

"""`cupy_flash.attention` as a differentiable function of JAX, under ``jit``, ``grad`` and ``vmap``.

JAX runs the two functions below outside its compiled program and hands them NumPy arrays. The
gradient is ours, so JAX never looks inside. With ``jax_enable_x64``, float64 stays float64.

    pip install jax .
    python examples/jax_adapter.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import cupy_flash as cf


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def attention(q, k, v, causal=False, scale=None):
    """Attention on JAX arrays of shape (B, H, N, d), (H, N, d) or (N, d)."""
    return _forward(q, k, v, causal, scale)[0]


def _forward(q, k, v, causal, scale):
    """The output, and what backward needs."""
    statistics = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    shapes = (jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype),
              jax.ShapeDtypeStruct(q.shape[:-1], statistics))

    def on_the_host(q, k, v):
        out, lse = cf.attention(*_folded(q, k, v), causal=causal, scale=scale, return_lse=True)
        return out.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1])

    out, lse = jax.pure_callback(on_the_host, shapes, q, k, v, vmap_method="broadcast_all")
    return out, (q, k, v, out, lse)


def _backward(causal, scale, saved, dout):
    """The gradients of q, k and v."""
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in saved[:3])

    def on_the_host(dout, q, k, v, out, lse):
        (lse,) = _folded(lse, axes=3)
        grads = cf.attention_backward(*_folded(dout, q, k, v, out), lse, causal=causal,
                                      scale=scale)
        return tuple(g.reshape(x.shape) for g, x in zip(grads[:3], (q, k, v), strict=True))

    return jax.pure_callback(on_the_host, shapes, dout, *saved, vmap_method="broadcast_all")


def _folded(*arrays, axes=4):
    """NumPy arrays of at most so many axes: those that ``vmap`` puts in front become one."""
    arrays = map(np.asarray, arrays)
    return [x.reshape(-1, *x.shape[1 - axes:]) if x.ndim > axes else x for x in arrays]


attention.defvjp(_forward, _backward)


def main():
    """Compare output and gradients with JAX's own attention."""
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 4, 100, 32)) for key in keys)

    def ours(q, k, v):
        return jnp.sum(jnp.sin(attention(q, k, v, True)))

    def theirs(q, k, v):
        # JAX has the heads on the last axis but one.
        out = jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in (q, k, v)), is_causal=True)
        return jnp.sum(jnp.sin(out))

    differences = []
    for f in (lambda f: f, lambda f: jax.grad(f, argnums=(0, 1, 2))):
        results = (jax.tree.leaves(jax.jit(f(g))(q, k, v)) for g in (ours, theirs))
        differences.append(max(float(jnp.max(jnp.abs(a - b)))
                               for a, b in zip(*results, strict=True)))
    print(f"the sums differ by {differences[0]:.0e}, the gradients by at most "
          f"{differences[1]:.0e}")
    return differences


if __name__ == "__main__":
    main()

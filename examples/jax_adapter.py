"""`cupy_flash.attention` as a differentiable function of JAX, under ``jit`` and ``grad``.

JAX runs the two functions below outside its compiled program and hands them NumPy arrays. The
gradient is ours, so JAX never looks inside.

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
    shapes = (jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype),
              jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32))

    def on_the_host(q, k, v):
        return cf.attention(*map(np.asarray, (q, k, v)), causal=causal, scale=scale,
                            return_lse=True)

    out, lse = jax.pure_callback(on_the_host, shapes, q, k, v)
    return out, (q, k, v, out, lse)


def _backward(causal, scale, saved, dout):
    """The gradients of q, k and v."""
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in saved[:3])

    def on_the_host(dout, *saved):
        grads = cf.attention_backward(np.asarray(dout), *map(np.asarray, saved), causal=causal,
                                      scale=scale)
        return grads[:3]

    return jax.pure_callback(on_the_host, shapes, dout, *saved)


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

"""Floating point operations of attention, the same for every implementation and device."""


def forward_flops(batch, heads, Nq, Nk, d, d_v, causal=False):
    """Two products of 2 Nq Nk d flops; half when causal."""
    return 2 * batch * heads * Nq * Nk * (d + d_v) / (2 if causal else 1)


def backward_flops(batch, heads, Nq, Nk, d, d_v, causal=False):
    """Five products: Q K^T, dO V^T, P^T dO, dS^T Q, dS K."""
    return 2 * batch * heads * Nq * Nk * (3 * d + 2 * d_v) / (2 if causal else 1)

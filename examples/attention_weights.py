"""
Weights, column sums and entropy without the matrix
===================================================

The matrix of probabilities never exists, and is seldom needed. What people want to know of it
follows from `lse` and from calls of `attention`:

- a chosen entry or row is ``exp(score - lse)``, one scalar product for each weight;
- what each key receives, the sums of the columns, is ``P^T 1``: the gradient of values with one
  column;
- the entropy of a row is ``lse - sum_j P_ij S_ij``, and ``sum_j P_ij S_ij`` is the scalar product
  of a query with the output of ``attention(q, k, k)``.
"""

import glassllm
import matplotlib.pyplot as plt
import numpy as np
from glassllm.autograd import rope
from glassllm.nn import Attention

import cupy_flash as cf

try:
    import cupy
    xp = cupy if cupy.is_available() else np
except ImportError:
    xp = np
host = np.asarray if xp is np else cupy.asnumpy

# %%
# Queries and keys of a trained model, a small transformer in plain NumPy: those of its last layer,
# caught while it reads a sentence.

TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank"
caught = []


def catching(self, x, layer, trace=None, cache=None, start=0):
    """The attention layer of the model, which keeps its queries and keys."""
    N = x.shape[1]
    q = rope(self._split_heads(x @ self.W_Q, self.n_heads), self.cos[:N], self.sin[:N]).data
    k = rope(self._split_heads(x @ self.W_K, self.n_kv_heads), self.cos[:N], self.sin[:N]).data
    caught.append((q[0].astype(np.float32), k[0].astype(np.float32)))
    return original(self, x, layer, trace, cache, start)


model, tokenizer = glassllm.load_pretrained("en")
tokens = np.array(tokenizer.encode(TEXT))
original, Attention.__call__ = Attention.__call__, catching
try:
    model.loss(tokens[None, :-1], tokens[None, 1:])
finally:
    Attention.__call__ = original
q, k = map(xp.asarray, caught[-1])
names = [tokenizer.decode([token]) for token in tokens[:-1]]
print(f"{q.shape[0]} query heads, {k.shape[0]} key heads, {q.shape[1]} tokens")

# %%
# The three quantities as functions. Query head h reads key head ``h // group``.


def rows(q, k, lse, chosen):
    """Probabilities of some query rows, (H, rows, Nk), of causal attention."""
    k = xp.repeat(k, len(q) // len(k), axis=0)      # only to write the product down in one line
    scores = q[:, chosen] @ k.swapaxes(1, 2) / xp.sqrt(q.shape[-1])
    seen = xp.arange(k.shape[1]) <= xp.array(chosen)[:, None]
    return xp.where(seen, xp.exp(scores - lse[:, chosen, None]), 0)


def column_sums(q, k):
    """What each key of each key head receives from all queries, (Hk, Nk)."""
    ones = xp.ones((*k.shape[:2], 1), k.dtype)
    out, pullback = cf.attention_vjp(q, k, ones, causal=True)
    return pullback(xp.ones_like(out)).dv[..., 0]


def entropy(q, k):
    """The entropy of each row's probabilities in nats, (H, Nq)."""
    mean_key, lse = cf.attention(q, k, k, causal=True, return_lse=True)
    return lse - xp.sum(q * mean_key, axis=-1) / xp.sqrt(q.shape[-1])


# %%
# They agree with the matrix, which is small enough here to be written down.

_, lse = cf.attention(q, k, k, causal=True, return_lse=True)
P = rows(q, k, lse, list(range(q.shape[1])))
by_matrix = -xp.sum(P * xp.log(xp.where(P > 0, P, 1)), axis=-1)
differences = {"rows": xp.abs(P.sum(axis=-1) - 1).max(),
               "columns": xp.abs(P.reshape(len(k), -1, *P.shape[1:]).sum(axis=(1, 2))
                                 - column_sums(q, k)).max(),
               "entropy": xp.abs(by_matrix - entropy(q, k)).max()}
print({name: f"{float(value):.0e}" for name, value in differences.items()})

# %%
# What the last token attends to, which tokens are attended to most, and how widely attention
# spreads.

figure, axes = plt.subplots(3, 1, figsize=(8, 6.4), layout="constrained", sharex=True)
last = rows(q, k, lse, [q.shape[1] - 1])[:, 0]
axes[0].imshow(host(last), aspect="auto", cmap="Blues")
axes[0].set(title="weights of the last token, a row for each head", yticks=range(len(q)))
for head, sums in enumerate(host(column_sums(q, k))):
    axes[1].bar(np.arange(len(sums)) + 0.4 * head - 0.2, sums, 0.4, label=f"key head {head}")
axes[1].set(title="sum of all weights that a token receives")
axes[1].legend(fontsize=8)
axes[2].plot(host(entropy(q, k)).T, lw=1)
axes[2].plot(np.log(1 + np.arange(q.shape[1])), "k:", label="as large as it can be")
axes[2].set(title="entropy of each head", xticks=range(len(names)))
axes[2].set_xticklabels([name.replace(" ", "·").replace("\n", "¶") for name in names], rotation=90,
                        fontsize=7)
axes[2].legend(fontsize=8)
plt.show()

# %%
# Nothing of this grows with the square of the length. For 20,000 tokens in 4 heads the matrix would
# have 6 GB; these are a few hundred kilobytes.

rng = np.random.default_rng(0)
q, k = xp.asarray(rng.standard_normal((2, 4, 20_000, 32), dtype=np.float32))
received, spread = column_sums(q, k), entropy(q, k)
print(f"the column sums add up to {float(received.sum()):,.0f}, a row of ones for each of "
      f"{q.shape[0] * q.shape[1]:,} queries; mean entropy {float(spread.mean()):.2f} nats")

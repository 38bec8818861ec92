"""
A language model on our attention
=================================

``glassllm`` is a small transformer in plain NumPy with grouped heads, rotary positions and a
key/value cache; trained weights come with the package. Its attention layer builds the whole
matrix of scores. Here one call of `attention` takes its place, and the model writes the same
text. Each new token asks with a single query for all cached keys, and a prompt with many:
causality is aligned to the newest query, which is right in both cases.
"""

import contextlib

import glassllm
import matplotlib.pyplot as plt
import numpy as np
from glassllm.autograd import Tensor, rope
from glassllm.nn import Attention

import cupy_flash as cf

try:
    import cupy
    xp = cupy if cupy.is_available() else np
except ImportError:
    xp = np
host = np.asarray if xp is np else cupy.asnumpy

TOKENS = 150        # past 128, the model starts a new window of context
PROMPTS = {"en": "Alice was beginning to", "pt": "Capitu olhou para"}

# %%
# The layer. Four query heads share two key heads: nothing has to be repeated, and no mask is built.


def attention_layer(self, x, layer, trace=None, cache=None, start=0):
    """The forward pass of ``glassllm.nn.Attention`` for generation, around `cf.attention`."""
    B, N, _ = x.shape
    q = self._split_heads(x @ self.W_Q, self.n_heads)
    k = self._split_heads(x @ self.W_K, self.n_kv_heads)
    v = self._split_heads(x @ self.W_V, self.n_kv_heads).data
    cos, sin = self.cos[start : start + N], self.sin[start : start + N]
    q, k = rope(q, cos, sin).data, rope(k, cos, sin).data
    if cache is not None:
        if cache.k is not None:
            k = np.concatenate([cache.k, k], axis=2)
            v = np.concatenate([cache.v, v], axis=2)
        cache.k, cache.v = k, v
    out, lse = cf.attention(*map(xp.asarray, (q, k, v)), causal=True, return_lse=True)
    calls.append((layer, q, k, host(lse)))
    return Tensor(host(out).swapaxes(1, 2).reshape(B, N, -1)) @ self.W_O


calls = []


@contextlib.contextmanager
def replaced_attention():
    """Use `attention_layer` in every model within the `with` block."""
    original = Attention.__call__
    Attention.__call__ = attention_layer
    try:
        yield
    finally:
        Attention.__call__ = original


def generate(language, prompt, count):
    """Return prompt and the `count` most likely next tokens, and the same as text."""
    model, tokenizer = glassllm.load_pretrained(language)
    prompt_ids = tokenizer.encode(prompt)
    tokens = [step.token for step in model.generate(prompt_ids, count, greedy=True)]
    return [*prompt_ids, *tokens], tokenizer.decode([*prompt_ids, *tokens])


# %%
# One text for each language, twice, and a comparison of the tokens.


def same_text(language, count):
    """Write a text with either attention; raise AssertionError if they differ."""
    tokens, text = generate(language, PROMPTS[language], count)
    calls.clear()
    with replaced_attention():
        our_tokens, our_text = generate(language, PROMPTS[language], count)
    assert our_tokens == tokens, f"the texts differ:\n{text}\n{our_text}"
    return tokens, our_text


if __name__ == "__main__":
    for language in ("pt", "en"):
        tokens, text = same_text(language, TOKENS)
        print(f"--- {language}: {len(calls)} calls of cupy_flash.attention, {TOKENS} identical "
              f"tokens\n{text}\n")

# %%
# What a token looked at: the weights of one query are ``exp(score - lse)``, at the cost of one
# scalar product each. Here of the 40th token written, in the last layer, a row for each head.

if __name__ == "__main__":
    layers = 1 + max(layer for layer, *_ in calls)
    _, q, k, lse = calls[40 * layers - 1]
    scores = q[0, :, -1:] @ np.repeat(k[0], 2, axis=0).swapaxes(1, 2) / np.sqrt(q.shape[-1])
    weights = np.exp(scores[:, 0] - lse[0, :, -1:])
    tokenizer = glassllm.load_pretrained("en")[1]
    names = [tokenizer.decode([token]).replace(" ", "·").replace("\n", "¶") for token in tokens]
    first = max(0, weights.shape[1] - 40)
    figure, axis = plt.subplots(figsize=(8, 2.3), layout="constrained")
    axis.imshow(weights[:, first:], aspect="auto", cmap="Blues")
    axis.set(yticks=range(len(weights)), ylabel="head", xticks=range(weights.shape[1] - first))
    axis.set_xticklabels(names[first : weights.shape[1]], rotation=90, fontsize=7)
    plt.show()

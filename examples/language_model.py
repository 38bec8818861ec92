"""A language model with real weights writes the same text with its attention replaced by ours.

``glassllm`` is a small transformer in plain NumPy with grouped heads, rotary positions and a
key/value cache; trained weights come with the package. Its attention layer builds the whole matrix
of scores; here one call of `cupy_flash.attention` takes its place. Each new token then asks with a
single query for all cached keys, and a prompt with many: causality is aligned to the newest query,
which is right in both cases.

    pip install ".[examples]"
    python examples/language_model.py
"""

import argparse
import contextlib

import glassllm
import numpy as np
from glassllm.autograd import Tensor, rope
from glassllm.nn import Attention

import cupy_flash as cf

PROMPTS = {"en": "Alice was beginning to", "pt": "Capitu olhou para"}


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
    # Four query heads share two key heads here: nothing has to be repeated, and no mask is built.
    out = cf.attention(q, k, v, causal=True)
    attention_layer.calls += 1
    return Tensor(out.swapaxes(1, 2).reshape(B, N, -1)) @ self.W_O


attention_layer.calls = 0


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
    """Return the `count` most likely next tokens, and prompt and tokens as text."""
    model, tokenizer = glassllm.load_pretrained(language)
    prompt_ids = tokenizer.encode(prompt)
    tokens = [step.token for step in model.generate(prompt_ids, count, greedy=True)]
    return tokens, tokenizer.decode([*prompt_ids, *tokens])


def main(argv=None):
    """Write one text for each language, twice, and compare the tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100, help="default: %(default)s")
    count = parser.parse_args(argv).tokens
    for language, prompt in PROMPTS.items():
        tokens, text = generate(language, prompt, count)
        attention_layer.calls = 0
        with replaced_attention():
            our_tokens, our_text = generate(language, prompt, count)
        print(f"--- {language}, with the attention of glassllm\n{text}")
        print(f"--- {language}, with {attention_layer.calls} calls of cupy_flash.attention\n"
              f"{our_text}")
        assert our_tokens == tokens, "the texts differ"
        print(f"--- all {count} tokens are identical\n")


if __name__ == "__main__":
    main()

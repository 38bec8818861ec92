"""Attention as one operation of an autograd engine that is not ours.

Whoever wrote an engine needs two functions: forward, and a function that turns the gradient of
the output into gradients of the inputs. `cupy_flash.attention_vjp` returns just these. Here the
engine is that of ``glassllm``, a transformer in plain NumPy: its attention layer is replaced, and
the gradients of all parameters stay what they were. Then the model learns one sentence by heart.

    pip install ".[examples]"
    python examples/own_autograd.py
"""

import glassllm
import numpy as np
from glassllm.autograd import Tensor, rope
from glassllm.nn import Attention

import cupy_flash as cf

SENTENCE = "Attention is a kernel regression, said the Cat, and so I grin."


def attention(q, k, v, **options):
    """`cupy_flash.attention` on tensors of the engine: all that an adapter takes."""
    out, pullback = cf.attention_vjp(q.data, k.data, v.data, **options)

    def backward(dout):
        grads = pullback(dout)
        for tensor, gradient in zip((q, k, v), grads[:3], strict=True):
            tensor._accumulate(gradient)

    return Tensor(out, (q, k, v), backward)


def attention_layer(self, x, layer, trace=None, cache=None, start=0):
    """The forward pass of ``glassllm.nn.Attention`` for training."""
    B, N, _ = x.shape
    q = rope(self._split_heads(x @ self.W_Q, self.n_heads), self.cos[:N], self.sin[:N])
    k = rope(self._split_heads(x @ self.W_K, self.n_kv_heads), self.cos[:N], self.sin[:N])
    v = self._split_heads(x @ self.W_V, self.n_kv_heads)
    out = attention(q, k, v, causal=True)
    return out.transpose(0, 2, 1, 3).reshape(B, N, -1) @ self.W_O


def gradients(model, tokens):
    """The loss of predicting each token from those before it, and the gradient by parameter."""
    parameters = model.named_parameters()
    for parameter in parameters.values():
        parameter.grad = None
    loss = model.loss(tokens[None, :-1], tokens[None, 1:])
    loss.backward()
    return float(loss.data), {name: p.grad for name, p in parameters.items()}


def main():
    """Compare the gradients, then train for some steps."""
    model, tokenizer = glassllm.load_pretrained("en")
    tokens = np.array(tokenizer.encode(SENTENCE))
    loss, theirs = gradients(model, tokens)
    original = Attention.__call__
    Attention.__call__ = attention_layer
    try:
        our_loss, ours = gradients(model, tokens)
        largest = max(np.max(np.abs(g)) for g in theirs.values())
        difference = max(np.max(np.abs(ours[name] - g)) for name, g in theirs.items())
        print(f"loss {loss:.6f} with their attention, {our_loss:.6f} with ours; the gradients of "
              f"{len(ours)}\nparameter arrays differ by at most {difference:.0e}, "
              f"the largest entry being {largest:.2f}")
        assert difference < 1e-5 * largest, "the gradients differ"
        for step in range(31):
            loss, grads = gradients(model, tokens)
            if step % 10 == 0:
                print(f"step {step:2d}: loss {loss:.4f}")
            for name, parameter in model.named_parameters().items():
                parameter.data -= np.float32(0.05) * grads[name]
    finally:
        Attention.__call__ = original
    return loss


if __name__ == "__main__":
    main()

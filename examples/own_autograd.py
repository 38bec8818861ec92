"""
Attention in an autograd of one's own
=====================================

Whoever wrote an autograd engine needs two functions: forward, and one that turns the gradient of
the output into gradients of the inputs. `attention_vjp` returns just these. Here the engine is
that of ``glassllm``, a transformer in plain NumPy: its attention layer is replaced, the gradients
of all parameters stay what they were, and then the model learns one sentence by heart.
"""

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

SENTENCE = "Attention is a kernel regression, said the Cat, and so I grin."

# %%
# The adapter: an operation of the engine with its backward function. The engine keeps NumPy
# arrays; on a machine with a GPU attention is computed there.


def attention(q, k, v, **options):
    """`cupy_flash.attention` on tensors of the engine."""
    out, pullback = cf.attention_vjp(*(xp.asarray(x.data) for x in (q, k, v)), **options)

    def backward(dout):
        grads = pullback(xp.asarray(dout))
        for tensor, gradient in zip((q, k, v), grads[:3], strict=True):
            tensor._accumulate(host(gradient))

    return Tensor(host(out), (q, k, v), backward)


def attention_layer(self, x, layer, trace=None, cache=None, start=0):
    """The forward pass of ``glassllm.nn.Attention`` for training."""
    B, N, _ = x.shape
    q = rope(self._split_heads(x @ self.W_Q, self.n_heads), self.cos[:N], self.sin[:N])
    k = rope(self._split_heads(x @ self.W_K, self.n_kv_heads), self.cos[:N], self.sin[:N])
    v = self._split_heads(x @ self.W_V, self.n_kv_heads)
    out = attention(q, k, v, causal=True)
    return out.transpose(0, 2, 1, 3).reshape(B, N, -1) @ self.W_O


# %%
# The loss and the gradients of all parameters, with the layer of the engine and with ours.


def gradients(model, tokens):
    """The loss of predicting each token from those before it, and the gradient by parameter."""
    parameters = model.named_parameters()
    for parameter in parameters.values():
        parameter.grad = None
    loss = model.loss(tokens[None, :-1], tokens[None, 1:])
    loss.backward()
    return float(loss.data), {name: p.grad for name, p in parameters.items()}


model, tokenizer = glassllm.load_pretrained("en")
tokens = np.array(tokenizer.encode(SENTENCE))
loss, theirs = gradients(model, tokens)
original, Attention.__call__ = Attention.__call__, attention_layer
try:
    our_loss, ours = gradients(model, tokens)
    largest = max(np.max(np.abs(g)) for g in theirs.values())
    difference = max(np.max(np.abs(ours[name] - g)) for name, g in theirs.items())
    print(f"loss {loss:.6f} with the engine's attention, {our_loss:.6f} with ours")
    print(f"the gradients of {len(ours)} arrays differ by at most {difference:.0e}; "
          f"the largest entry is {largest:.2f}")

    # Gradient descent, with our attention in every layer.
    losses = []
    for _ in range(40):
        loss, grads = gradients(model, tokens)
        losses.append(loss)
        for name, parameter in model.named_parameters().items():
            parameter.data -= np.float32(0.05) * grads[name]
finally:
    Attention.__call__ = original
print(f"after {len(losses)} steps the loss is {losses[-1]:.4f}")

# %%
figure, axis = plt.subplots(figsize=(6, 2.6), layout="constrained")
axis.semilogy(losses, color="#2a6fb0")
axis.set(xlabel="step", ylabel="loss")
axis.set_title(f'learning "{SENTENCE}"', fontsize=9)
plt.show()

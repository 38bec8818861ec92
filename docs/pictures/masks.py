"""Masks that are broadcast: keys, documents, and a prefix that everybody sees."""

import numpy as np
from grid import draw, weights

padding = np.array([1, 1, 0, 1, 1, 0], bool)
document = np.array([0, 0, 0, 1, 1, 2])
prefix = np.tri(6, dtype=bool) | (np.arange(6) < 3)
draw(("mask=keep", weights(6, 6, mask=padding)),
     ("mask=doc[:, None] == doc\ncausal=True",
      weights(6, 6, mask=document[:, None] == document, causal=True)),
     ("mask=tri | (j < 3)", weights(6, 6, mask=prefix)))

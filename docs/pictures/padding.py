"""A sequence of 4 in a buffer of 6: what lengths do to causal attention."""

import numpy as np
from grid import draw, weights

four = np.int32([4])
draw(("causal=True\nkv_lens=[4]: a trap", weights(6, 6, causal=True, kv_lens=four), 4),
     ("causal=True\nq_lens=[4], kv_lens=[4]",
      weights(6, 6, causal=True, q_lens=four, kv_lens=four), 4),
     ("kv_lens=[4]", weights(6, 6, kv_lens=four), 4))

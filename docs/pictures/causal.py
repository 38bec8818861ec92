"""Causal attention, for as many queries as keys, fewer, and more; two alignments."""

from grid import draw, weights

draw(("6 queries, 6 keys\ncausal=True", weights(6, 6, causal=True)),
     ("3 queries, 6 keys\ncausal=True", weights(3, 6, causal=True)),
     ("6 queries, 3 keys\ncausal=True", weights(6, 3, causal=True)),
     ("6 queries, 6 keys\ncausal=True, q_offset=0", weights(6, 6, causal=True, q_offset=0)),
     ("3 queries, 6 keys\ncausal=True, q_offset=0", weights(3, 6, causal=True, q_offset=0)),
     ("6 queries, 3 keys\ncausal=True, q_offset=0", weights(6, 3, causal=True, q_offset=0)))

"""Taking turns: query tiles that several workers compute at once add to dK and dV one by one.

The tiles of a chunk form a queue. Each goes through the keys from the first to the last, and may
add to the keys before `end` when the tile before it has; so the tiles follow each other, one tile
of keys apart, and each sum has the order in which one worker alone would add.
"""

from collections import namedtuple

import numpy as np
from numba import carray

from .jit import as_pointer, tile_function
from .team import read, rest, stopped, write

# The query tile `tile` of a key head with this many chunks. done: address of a word for each tile
# of the head, up to which key it and all tiles before it in its chunk have added.
Turns = namedtuple("Turns", "done tile chunks")
ALL_KEYS = np.iinfo(np.int64).max


@tile_function
def wait_for_turn(turns, end, shared, worker):
    """Wait until the tile before has added to the keys before `end`; False if the call stopped.

    That one is done or under way, for tasks are taken in this order: nobody waits in a circle.
    """
    if turns.tile < turns.chunks:
        return True
    done = carray(as_pointer(turns.done), (turns.tile,), np.int64)
    spins = 0
    while read(done, turns.tile - turns.chunks) < end:
        if stopped(shared, worker):
            return False
        spins = rest(spins)
    return True


@tile_function
def end_turn(turns, end):
    """Let the next tile add to the keys before `end`."""
    done = carray(as_pointer(turns.done), (turns.tile + 1,), np.int64)
    write(done, turns.tile, end)

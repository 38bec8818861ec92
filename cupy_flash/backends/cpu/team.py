"""How the workers of a launch come, stop and go: what they share, in compiled code.

The caller is worker 0. The others compute only between its arrival and its departure: it opens the
gate, closes it when it is done, and waits for whoever is inside. All of that happens in compiled
code, where no Python exception can come between: when a kernel returns, nothing computes any more,
however many interrupts there were.

A main thread's caller lets Python's signal handlers run every `PERIOD`. What they raise is kept,
stops all workers at their next tile, and is raised when the kernel has returned.
"""

import ctypes
import time

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import tile_function

# The words of the array that the workers of one launch share, eight to a cache line; the first one
# is counted by `next_task`. Only worker 0 touches LAST_LOOK and LOOKS. ERROR: three words, the
# addresses of what a signal handler raised. INSIDE: worker 0's word; each has a line of its own.
GATE, CANCEL, WATCHES, LAST_LOOK, LOOKS, ERROR, INSIDE = 8, 16, 24, 25, 26, 28, 32
LINE = 8
OPEN, CLOSED = 1, 2
PERIOD = 20_000_000     # nanoseconds between two looks for signals: a tenth of what people notice
LOOKS_PER_CLOCK = 8     # key tiles between two looks at the clock, which takes 1/100 of a tile
SPINS = 100             # looks at a word, some microseconds, before a worker sleeps
NAP = 20                # microseconds

_WORD, _INT, _BYTE = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()


def shared_words(workers, watches):
    """What the workers of one launch share; `watches`: worker 0 looks for signals."""
    shared = np.zeros(INSIDE + LINE * workers, np.int64)
    shared[WATCHES] = watches
    return shared


def close(shared):
    """`leave` for a caller that did not get into its kernel or out of it by itself."""
    shared[CANCEL] = 1
    shared[GATE] = CLOSED
    while shared[INSIDE + LINE :: LINE].any():
        time.sleep(1e-4)


def raise_kept(shared):
    """Raise what a signal handler raised while the kernel ran."""
    if shared[ERROR]:
        kept = [ctypes.c_void_p(int(word) or None) for word in shared[ERROR : ERROR + 3]]
        shared[ERROR] = 0
        ctypes.pythonapi.PyErr_Restore(*kept)   # which ctypes then raises


def _word_at(context, builder, signature, args):
    """The address of the word args[1] of the array args[0]."""
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.gep(data, [args[1]])


@intrinsic
def read(typingctx, words, index):
    """words[index], before anything that comes after."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_word_at(context, builder, signature, args), "seq_cst", 8)

    return types.int64(words, types.intp), codegen


@intrinsic
def write(typingctx, words, index, value):
    """words[index] = value, after everything that comes before."""

    def codegen(context, builder, signature, args):
        address = _word_at(context, builder, signature, args)
        builder.store_atomic(args[2], address, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(words, types.intp, types.int64), codegen


def _call(builder, name, result, *args):
    """A call of the C function `name`."""
    kind = ir.FunctionType(result, [x.type for x in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


@intrinsic
def nap(typingctx):
    """Let others have the processor for some microseconds."""

    def codegen(context, builder, signature, args):
        _call(builder, "usleep", _INT, _INT(NAP))
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def now(typingctx):
    """Nanoseconds of the monotonic clock."""

    def codegen(context, builder, signature, args):
        spec = cgutils.alloca_once(builder, ir.ArrayType(_WORD, 2))     # a struct timespec
        _call(builder, "clock_gettime", _INT, _INT(time.CLOCK_MONOTONIC), spec)
        seconds, rest = (builder.load(cgutils.gep_inbounds(builder, spec, 0, i)) for i in (0, 1))
        return builder.add(builder.mul(seconds, _WORD(1_000_000_000)), rest)

    return types.int64(), codegen


@intrinsic
def handler_raised(typingctx, shared):
    """Let Python's signal handlers run; keep what they raise. Whether they raised."""

    def codegen(context, builder, signature, args):
        error = _word_at(context, builder, signature, (args[0], _WORD(ERROR)))
        python = context.get_python_api(builder)
        state = python.gil_ensure()
        raised = builder.icmp_signed("!=", _call(builder, "PyErr_CheckSignals", _INT), _INT(0))
        with builder.if_then(raised):
            places = [builder.bitcast(builder.gep(error, [_WORD(i)]), _BYTE) for i in range(3)]
            _call(builder, "PyErr_Fetch", ir.VoidType(), *places)
        python.gil_release(state)
        return raised

    return types.boolean(shared), codegen


@tile_function
def enter(shared, worker):
    """A worker comes; False if it must not, because the caller has gone."""
    if worker == 0:
        shared[LAST_LOOK] = now()
        write(shared, GATE, OPEN)
        return True
    # First the word, then the gate; `leave` the other way round: one of the two sees the other.
    write(shared, INSIDE + LINE * worker, 1)
    if read(shared, GATE) == OPEN:
        return True
    write(shared, INSIDE + LINE * worker, 0)
    return False


@tile_function
def leave(shared, worker):
    """A worker goes; the caller when all others have gone."""
    if worker != 0:
        write(shared, INSIDE + LINE * worker, 0)
        return
    write(shared, GATE, CLOSED)
    for other in range(INSIDE + LINE, shared.size, LINE):
        spins = 0
        while read(shared, other) != 0:
            stopped(shared, worker)
            spins = rest(spins)


@tile_function
def rest(spins):
    """What a worker does between two looks at a word that another one has to change."""
    if spins >= SPINS:
        nap()
    return spins + 1


@tile_function
def stopped(shared, worker):
    """Whether the call was given up. To be asked once per tile of keys."""
    if worker == 0 and shared[WATCHES] != 0:
        shared[LOOKS] += 1
        if shared[LOOKS] % LOOKS_PER_CLOCK == 0:
            look_for_signals(shared)
    return read(shared, CANCEL) != 0


@tile_function
def look_for_signals(shared):
    """Every `PERIOD`: let signal handlers run; if one raises, give the call up."""
    time_now = now()
    if time_now - shared[LAST_LOOK] < PERIOD:
        return
    shared[LAST_LOOK] = time_now
    if handler_raised(shared):
        shared[WATCHES] = 0     # one exception is enough; the next signal waits for Python
        write(shared, CANCEL, 1)

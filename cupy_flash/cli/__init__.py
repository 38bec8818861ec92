"""The command line: ``python -m cupy_flash {demo,doctor,info,selftest,warmup}``.

Each command lives in the module of its name, with `add_arguments(parser)` and `run(arguments)`,
which returns the exit status. A command's module is imported only when the command is run.
"""

import argparse
import importlib
import os
import sys
from contextlib import suppress

from cupy_flash import console
from cupy_flash._version import __version__

COMMANDS = {
    "demo": "recognise handwritten digits by attention, beside plain NumPy (needs [examples])",
    "doctor": "try the GPU path step by step, and say what is missing and what mends it",
    "info": "print versions, devices, caches and threads: the text to put into a report",
    "selftest": "compare some dozens of small cases with a slow, exact reference on every device",
    "warmup": "compile the kernels now, so that no later call waits for it",
}


def main(argv=None) -> int:
    """Run one command.

    Without a command it prints what there is.

    Parameters
    ----------
    argv : list of str, optional
        The arguments after the program's name; `sys.argv` without it.

    Returns
    -------
    int
        The exit status: 0 when all went well, 130 after Ctrl-C, 141 when nobody reads on.
    """
    try:
        try:
            return _run(sys.argv[1:] if argv is None else list(argv))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        console.say("interrupted")
        return 130                      # as shells say it: 128 + SIGINT
    except BrokenPipeError:             # whoever reads has read enough, as `head` does
        _drop_output()
        return 141                      # 128 + SIGPIPE


def _run(argv):
    """Run one command; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m cupy_flash",
        description="Exact attention for NumPy and CuPy arrays.",
    )
    parser.add_argument("--version", action="version", version=f"cupy_flash {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name in argv:
            _module(name).add_arguments(command)
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    return _module(arguments.command).run(arguments)


def _drop_output():
    """Let what is still buffered go nowhere, or Python complains of it when it ends."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _module(name):
    """The module of a command."""
    return importlib.import_module(f"cupy_flash.cli.{name}")

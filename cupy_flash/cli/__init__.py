"""The command line: ``python -m cupy_flash {demo,doctor,info,selftest,warmup}``.

Each command lives in the module of its name, with `add_arguments(parser)` and `run(arguments)`,
which returns the exit status. A command's module is imported only when the command is run.
"""

import argparse
import importlib
import sys

COMMANDS = {
    "demo": "recognise handwritten digits by attention, beside plain NumPy (needs [examples])",
    "doctor": "try the GPU path step by step, and say what is missing and what mends it",
    "info": "print versions, devices, caches and threads: the text to put into a report",
    "selftest": "compare some dozens of small cases with a slow, exact reference on every device",
    "warmup": "compile the kernels now, so that no later call waits for it",
}


def main(argv=None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : list of str, optional
        The arguments after the program's name; `sys.argv` without it.

    Returns
    -------
    int
        The exit status: 0 when all went well.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="python -m cupy_flash",
        description="Exact attention for NumPy and CuPy arrays.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name in argv:
            _module(name).add_arguments(command)
    arguments = parser.parse_args(argv)
    return _module(arguments.command).run(arguments)


def _module(name):
    """The module of a command."""
    return importlib.import_module(f"cupy_flash.cli.{name}")

"""python -m bench COMMAND ...: all measurements."""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib import import_module

# Command: its module, and what it does.
COMMANDS = {
    "compare": ("compare", "time an old commit and a new one in turn, and compare their results"),
    "speed": ("speed", "time a GPU against torch, FlashAttention-3 and -4 and others"),
    "cpu": ("cpu", "time a CPU against torch"),
    "accuracy": ("accuracy", "errors against float64 on a GPU, of arrays or row by row"),
    "fuzz": ("fuzz", "random problems on a GPU; every kernel under compute-sanitizer"),
    "memory": ("memory", "peak memory, offsets beyond 2^31, long sequences on a GPU"),
    "first-call": ("first_call", "how long the first call of a process takes"),
    "interrupts": ("interrupts", "interrupt the CPU path and look for what it writes afterwards"),
    "machine-code": ("machine_code", "compare the machine code of two commits, without a GPU"),
    "tables": ("pages", "write the pages of the records"),
    "charts": ("charts", "write the chart of the README"),
}


def parser_of(command):
    """The parser of a command, and its module."""
    module = import_module(f"bench.{COMMANDS[command][0]}")
    parser = ArgumentParser(prog=f"python -m bench {command}", description=module.__doc__,
                            formatter_class=RawDescriptionHelpFormatter)
    module.arguments(parser)
    return parser, module


def main(words):
    """Run a command; the status."""
    if not words or words[0] not in COMMANDS:
        print(__doc__, *(f"  {name:12} {what}" for name, (_, what) in COMMANDS.items()),
              "\nEach has --help.", sep="\n")
        return int(words[:1] not in ([], ["-h"], ["--help"]))
    parser, module = parser_of(words[0])
    return module.main(parser.parse_args(words[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""python -m bench COMMAND ...: all measurements."""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib import import_module

# Command: its module, and what it does.
COMMANDS = {
    "compare": ("compare", "time an old commit and a new one in turn, and compare their results"),
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

"""The command line: one file a command, imported when its command is typed, so that ``--help`` waits for nothing.

Exit codes: 0 done, 1 an error (said in a sentence), 2 wrong usage, 130 interrupted; ``launch`` passes on the script's own.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from ..errors import EasympError, nearest
from ..protocols import Command
from ..version import __version__

# A command is a file of its name here, with `arguments(parser)` and `run(args)`.
COMMANDS = {
    "launch": "run a script on several processes",
    "test": "train something small on every rank, and compare it with what must come out",
    "env": "show what this machine has, and what would be decided on it",
    "config": "look at this machine, ask what is open, and write easymp.toml",
    "compare": "run a script under several plans: time, memory, loss and accuracy side by side",
    "estimate": "say how much memory a model needs, and what fits this machine",
    "completion": "print the script by which bash, zsh or fish completes these words",
    "checkpoint": "list, inspect, verify, merge, convert, compare and prune checkpoints",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (sys.argv's without it); returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _main(words)
    except EasympError as error:
        print(f"easymp: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has seen enough; what Python flushes at its end goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as end:  # argparse has said what there was to say
        return end.code if isinstance(end.code, int) else 0


def _main(words: list[str]) -> int:
    front = _front()
    if not words:
        front.print_help()
        return 2
    if words[0].startswith("-"):
        front.parse_args(words)  # --help and --version end here, and so does anything else
        return 2
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        front.error(
            f"there is no command {name!r}{nearest(name, COMMANDS) or '.'} Known: {', '.join(COMMANDS)}"
        )
    command: Command = importlib.import_module(f".{name}", __name__)
    return command.run(parser_of(name, command).parse_args(rest))


def parser_of(name: str, command: Command) -> argparse.ArgumentParser:
    """What reads the words after ``easymp NAME``."""
    parser = argparse.ArgumentParser(
        f"easymp {name}",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.arguments(parser)
    return parser


def _front() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {words}" for name, words in COMMANDS.items())
    parser = argparse.ArgumentParser(
        "easymp",
        usage="easymp [--version] COMMAND …",
        description="Training in PyTorch, on the hardware that is here.",
        epilog=f"commands:\n{listing}\n\n`easymp COMMAND --help` says more about one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"easymp {__version__}")
    return parser

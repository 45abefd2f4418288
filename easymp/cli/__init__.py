"""The command line: one file a command, imported when its command is typed, so that ``--help`` is fast.

Exit codes: 0 done, 1 an error, 2 wrong usage, 130 interrupted; ``launch`` passes on the script's own.
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

# A command is a module of this name here, with `arguments(parser)` and `run(args)`.
COMMANDS = {
    "launch": "run a script on several processes",
    "test": "train something small on every rank, and compare it with the known answer",
    "env": "show this machine, and the plan that a run has on it",
    "config": "ask how to train on this machine, and write easymp.toml",
    "compare": "run a script under several plans: time, memory, loss and accuracy side by side",
    "prove": "show that a script trains under a plan as on one process in fp32, or what differs",
    "rehearse": "run a script's start as ranks of a world that does not exist: bytes, collectives, what would fail",
    "replay": "run a training again up to an update, bit for bit, and look at it",
    "plot": "draw the curves that runs have logged, as a page or a picture",
    "estimate": "estimate the memory that a model needs, and whether it fits this machine",
    "completion": "print a script by which bash, zsh or fish completes these words",
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
    except BrokenPipeError:  # as by `| head`; Python flushes the rest at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as end:  # argparse has printed its message
        return end.code if isinstance(end.code, int) else 0


def _main(words: list[str]) -> int:
    parser = front()
    if not words:
        parser.print_help()
        return 2
    if words[0].startswith("-"):
        parser.parse_args(words)  # --help and --version end here, and so does anything else
        return 2
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        parser.error(
            f"there is no command {name!r}{nearest(name, COMMANDS) or '.'} Known: {', '.join(COMMANDS)}"
        )
    module, parser = module_of(name), parser_of(name)
    if hasattr(module, "reworded"):
        rest = module.reworded(rest, parser)
    return module.run(parser.parse_args(rest))


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of a command."""
    command = module_of(name)
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        f"easymp {name}", description=command.__doc__, formatter_class=form, allow_abbrev=False
    )
    command.arguments(parser)
    return parser


def module_of(name: str) -> Command:
    """The module of a command."""
    return importlib.import_module(f".{name}", __name__)


def front() -> argparse.ArgumentParser:
    """The parser of ``easymp`` alone, which lists the commands."""
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

"""The command line: one file a command, imported when its command is typed, so that ``--help`` is fast.

Exit codes of every command, decided by `exit_code`: 0 it held or is done, 1 a verdict against the run or file, 2 wrong
usage or no verdict, 130 interrupted. A script that fails is a verdict. ``launch`` passes on the script's own code.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from ..errors import CheckpointError, EasympError, NoCheckpointError, nearest
from ..settings import NAMES
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
    "plot": "draw the curves that runs have logged",
    "estimate": "estimate the memory that a model needs, and whether it fits this machine",
    "completion": "print a script by which bash, zsh or fish completes these words",
    "checkpoint": "list, inspect, verify, merge, convert and prune checkpoints",
}

# Options of the launchers of accelerate, DeepSpeed and torch, and easymp's names for them.
LAUNCHERS = {
    **dict.fromkeys(("num_processes", "nproc_per_node", "num_gpus"), "processes"),
    **dict.fromkeys(("num_machines", "num_nodes", "nnodes"), "nodes"),
    **dict.fromkeys(
        ("main_process_ip", "main_process_port", "master_addr", "master_port", "rdzv_endpoint"), "main_address"
    ),
    "machine_rank": "node_rank",
    "config_file": "config",
}

HELD, VERDICT, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (sys.argv's without it); returns the exit code."""
    try:
        return exit_code(run_command(list(sys.argv[1:] if argv is None else argv)))
    except (EasympError, KeyboardInterrupt, BrokenPipeError, SystemExit) as error:
        if isinstance(error, EasympError):
            print(f"easymp: {error}", file=sys.stderr)
        elif isinstance(error, BrokenPipeError):  # as by `| head`; Python flushes the rest at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_code(error)


def exit_code(outcome: int | BaseException) -> int:
    """The exit code of every command: its own code, or what an error that ended it means.

    A damaged checkpoint is a verdict; a path without one, and any other error of easymp, is wrong usage.
    """
    if not isinstance(outcome, BaseException):
        return outcome
    if isinstance(outcome, SystemExit):  # argparse has printed its message
        return outcome.code if isinstance(outcome.code, int) else HELD
    if isinstance(outcome, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(outcome, NoCheckpointError):
        return USAGE
    return VERDICT if isinstance(outcome, (CheckpointError, BrokenPipeError)) else USAGE


class HelpFormatter(argparse.HelpFormatter):
    """Fits paragraphs to the terminal's width, and keeps the lines of indented ones."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(p if "\n  " in p else textwrap.fill(p, width, break_on_hyphens=False) for p in paragraphs)


class Parser(argparse.ArgumentParser):
    """Names the option or the choice that is nearest to a misspelt one."""

    def error(self, message: str) -> NoReturn:
        if unknown := re.search(r"unrecognized arguments: --([\w-]+)", message):
            message += self.nearest_option(unknown[1])
            message += " (the script's own arguments follow --)" * ("[-- ARGUMENTS]" in (self.usage or ""))
        elif choice := re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)", message):
            message += nearest(choice[1], re.findall(r"'(.+?)'", choice[2]))
        super().error(message)

    def nearest_option(self, name: str) -> str:
        """A hint to the option that `--name` stands for: another launcher's, one of a setting, or a misspelt one."""
        flags, setting = set(options(self)), name.replace("-", "_")
        setting = LAUNCHERS.get(setting, setting)
        flag = "--precision" if setting == "mixed_precision" else f"--{setting.replace('_', '-')}"
        if flag in flags:
            return f", did you mean {flag!r}?"
        if setting in NAMES and "--set" in flags:
            return f": write --set {setting}=VALUE"
        return nearest(f"--{name}", flags)


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:  # argparse has no public list of a parser's arguments
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from options(subparser)


def run_command(argv: list[str]) -> int:
    """Run the command line `argv`; returns the command's own exit code."""
    parser = main_parser()
    if not argv:
        parser.print_help()
        return USAGE
    if argv[0].startswith("-"):
        parser.parse_args(argv)  # --help and --version end here, and so does anything else
        return USAGE
    name, arguments = argv[0], argv[1:]
    if name not in COMMANDS:
        parser.error(f"there is no command {name!r}{nearest(name, COMMANDS) or '.'} Known: {', '.join(COMMANDS)}")
    module, parser = module_of(name), parser_of(name)
    if hasattr(module, "reworded"):
        arguments = module.reworded(arguments, parser)
    exit_code: int = module.run(parser.parse_args(arguments))
    return exit_code


def parser_of(name: str) -> Parser:
    command = module_of(name)
    parser = Parser(f"easymp {name}", description=command.__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    command.arguments(parser)
    return parser


def module_of(name: str) -> Any:
    return importlib.import_module(f".{name}", __name__)


def main_parser() -> Parser:
    """The parser of ``easymp`` alone, which lists the commands."""
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    parser = Parser(
        "easymp",
        usage="easymp [--version] COMMAND …",
        description="Training in PyTorch, on the hardware of this machine.",
        epilog=f"commands:\n{listing}\n\n`easymp COMMAND --help` tells more about a command.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"easymp {__version__}")
    return parser

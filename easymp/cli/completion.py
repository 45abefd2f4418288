"""Print a script by which a shell completes easymp's commands, flags and their values.

examples:
  easymp completion bash >> ~/.bashrc
  easymp completion zsh > "${fpath[1]}/_easymp"       then start a new zsh
  easymp completion fish > ~/.config/fish/completions/easymp.fish

The script needs no Python when it completes. After an update of easymp, make it again.
"""

from __future__ import annotations

import argparse

from . import COMMANDS, front, module_of
from .terminal import library

SHELLS = ("bash", "fish", "zsh")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="which")


def run(args: argparse.Namespace) -> int:
    shtab = library("shtab", "to complete words in a shell")
    root = front()
    commands = root.add_subparsers(metavar="COMMAND")
    for name, words in COMMANDS.items():
        parser = commands.add_parser(name, help=words)
        module_of(name).arguments(parser)
        _complete_files(parser, shtab.FILE)
    print(shtab.complete(root, args.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser, file: object) -> None:
    for action in parser._actions:  # argparse has no public list of a parser's arguments
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _complete_files(inner, file)
        elif action.choices is None and action.nargs != 0:
            action.complete = file  # type: ignore[attr-defined]

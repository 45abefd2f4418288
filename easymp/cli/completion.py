"""Print a script by which a shell completes easymp's commands, flags and their values.

examples:
  easymp completion bash >> ~/.bashrc
  easymp completion zsh > "${fpath[1]}/_easymp"       then start a new zsh
  easymp completion fish > ~/.config/fish/completions/easymp.fish

The script needs no Python when it completes. After an update of easymp, make it again.
"""

from __future__ import annotations

import argparse

from . import COMMANDS, main_parser, module_of
from .terminal import require_packages


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "fish", "zsh"), help="the shell")


def run(args: argparse.Namespace) -> int:
    require_packages("cli", "shtab")
    import shtab

    parser = main_parser()
    subparsers = parser.add_subparsers(metavar="COMMAND")
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary)
        module_of(name).arguments(subparser)
        _complete_files(subparser, shtab.FILE)
    print(shtab.complete(parser, args.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser, pattern: object) -> None:
    """Let values without choices complete as names of files."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                _complete_files(subparser, pattern)
        elif action.choices is None and action.nargs != 0:
            action.complete = pattern  # type: ignore[attr-defined]  # an attribute that shtab reads

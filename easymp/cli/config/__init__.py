"""Look at this machine, ask at most six questions, each with a default, and write easymp.toml.

An existing file is edited: the changes are shown, and a backup is kept beside it. Nothing is written before the last
question.

examples:
  easymp config                                  ask
  easymp config --yes                            take the defaults
  easymp config --dry-run                        write nothing
  easymp config --yes --set processes=2 --set mixed_precision=bf16
  easymp config --file runs/cluster.toml         another file
  easymp config --from ds_config.json            import a file of DeepSpeed or Accelerate
  easymp config --yes --for 64x80GB              for another machine: 8 nodes of 8 GPUs

Exit codes: 0 written, or nothing to change; 2 wrong usage, or questions and no terminal; 130 left.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from ...base.lazy import modules_at_first_use
from ...errors import SettingError
from ..terminal import MACHINE_HELP, ended_by_signals

if TYPE_CHECKING:
    from . import foreign, wizard
else:
    modules_at_first_use(globals(), "foreign")
    modules_at_first_use(globals(), "wizard")  # it imports torch


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--yes", action="store_true", help="take the defaults")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="answer ahead, or any other setting")
    add("--dry-run", action="store_true", help="show the file, and write nothing")
    add("--from", dest="foreign", metavar="FILE", help="import a configuration of Accelerate or DeepSpeed")
    add("--for", dest="machine", metavar="MACHINE", help=MACHINE_HELP)
    default = "the one that EASYMP_CONFIG names, or easymp.toml in the working directory"
    add("--file", metavar="PATH", help=f"to write (default: {default})")


def run(args: argparse.Namespace) -> int:
    if args.foreign:
        foreign.read_document(args.foreign)  # its errors come before torch is imported
    command_line = wizard.read_settings(args.set)
    interactive = not args.yes and sys.stdin is not None and sys.stdin.isatty()
    if not interactive and not args.yes:
        raise SettingError(
            "standard input is not a terminal, so no question can be asked. "
            "Pass --yes to take the defaults, --dry-run with it to see them, and --set KEY=VALUE to change them"
        )
    try:
        with ended_by_signals():  # prompts restore the terminal
            wizard.configure(args, command_line, interactive)
    except (KeyboardInterrupt, EOFError):
        print("\nNothing was written.")
        return 130
    return 0

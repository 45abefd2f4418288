"""Look at this machine, ask what is open, and write easymp.toml: at most six questions, each with a default.

An existing file is edited: what changes is shown, and the file before is kept beside it. Nothing is written before the last question.

examples:
  easymp config                                  ask
  easymp config --yes                            take the defaults
  easymp config --dry-run                        write nothing
  easymp config --yes --set processes=2 --set mixed_precision=bf16
  easymp config --file runs/cluster.toml         another file
  easymp config --from ds_config.json            with what a file of DeepSpeed or Accelerate says

Exit codes: 0 written, or as it was to be; 1 an error; 2 wrong usage, or questions and no terminal; 130 left.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from ..errors import SettingError
from . import wizard
from .terminal import BOLD, DIM, GREEN, RED, paint, plain, table, wrap

COLOURS = {"+": GREEN, "-": RED, "#": DIM}  # by a line's first character: of a difference, of a file


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="take the defaults")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="answer ahead, or any other setting"
    )
    parser.add_argument("--dry-run", action="store_true", help="show it, and write nothing")
    parser.add_argument(
        "--from", dest="foreign", metavar="FILE", help="take over a configuration of Accelerate or DeepSpeed"
    )
    parser.add_argument("--measure", action="store_true", help="time the precisions first, ten seconds long")
    parser.add_argument(
        "--file", metavar="PATH", help="to write (default: what EASYMP_CONFIG names, or easymp.toml here)"
    )
    parser.add_argument(
        "--all", action="store_true", help="ask all questions, also those that change nothing here"
    )


def run(args: argparse.Namespace) -> int:
    if args.foreign:
        wizard.read_document(args.foreign)  # what cannot be read is said at once, before torch is imported
    try:
        ahead = wizard.read_ahead(args.set)
    except SettingError as error:
        print(f"easymp config: {error}", file=sys.stderr)
        return 2
    before = signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # as Ctrl-C: the terminal is put right on the way out
    try:
        wish = wizard.Wish(args.file, ahead, args.foreign, args.yes, args.dry_run, args.all, args.measure)
        wizard.configure(
            Terminal(), wizard.look(), wish, answered=sys.stdin is not None and sys.stdin.isatty()
        )
    except wizard.QuitError:
        print("Nothing was written.")
        return 130
    except KeyboardInterrupt:  # between two questions
        print()
        return 130
    except wizard.UnansweredError as error:
        print("easymp config: standard input is no terminal, so nobody can be asked.", file=sys.stderr)
        print("Pass --yes to take what follows, and --set for what is to be otherwise:", file=sys.stderr)
        print(table([[f"  --set {row[0]}", *row[1:]] for row in error.rows], fold=True), file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


class Terminal:
    """A `Screen` on standard input and output."""

    def __init__(self) -> None:
        try:
            import readline  # noqa: F401  # input() edits lines with it; not every Python has it
        except ImportError:
            pass

    def say(self, text: str = "", strong: bool = False, indent: int = 0) -> None:
        space = " " * indent
        print(
            "\n".join(
                paint(line, BOLD) if strong else line
                for line in wrap(space + plain(text), space).splitlines()
            )
        )

    def rows(self, rows: Sequence[Sequence[str]]) -> None:
        print(table(rows, fold=True))

    def text(self, text: str) -> None:
        for line in text.splitlines():
            colour, words = COLOURS.get(line[:1]), plain(line.expandtabs())
            print(paint(words, colour) if colour else words)

    def ask(self, prompt: str) -> str:
        try:
            return input(prompt)
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}"  # no answer to any question
        except (EOFError, KeyboardInterrupt) as end:
            print()
            raise wizard.QuitError from end

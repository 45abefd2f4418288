"""A hook of MkDocs that makes docs/reference/cli.md from the parsers of the command line."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from easymp.cli import COMMANDS, parser_of

HEAD = """\
# Command line

This page lists every command of `easymp` with its options. `easymp COMMAND --help` prints the same in a terminal; both
come from the same parsers.

Exit codes of every command: 0 it held or is done; 1 a verdict against the run, script or file, such as a script that
fails or a damaged checkpoint; 2 wrong usage, or no verdict; 130 interrupted. `launch` passes on the script's own.

| command | what it does |
|---|---|"""
WIDTH = 80  # of usage lines


def on_files(files: Any, config: Any) -> None:
    """Add the page to the files of the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "reference/cli.md", content=page()))


def page() -> str:
    """The page, as Markdown."""
    rows = [f"| [`easymp {name}`](#easymp-{name}) | {words} |" for name, words in COMMANDS.items()]
    parts = [part for name in COMMANDS for part in _command(parser_of(name), 2)]
    return "\n".join([HEAD, *rows, "", *parts])


def _command(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    yield f"{'#' * level} {parser.prog}\n"
    yield from _description(parser.description or "")
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=WIDTH)
    usage = parser.format_usage().replace("usage: ", " " * len("usage: "))  # above its other lines
    yield f"```text\n{textwrap.dedent(usage)}```\n"
    inner: list[argparse.ArgumentParser] = []
    rows = []
    for action in parser._actions:  # argparse has no public list of a parser's arguments
        if isinstance(action, argparse._SubParsersAction):
            inner += action.choices.values()
        elif not isinstance(action, argparse._HelpAction):
            words = parser._get_formatter()._expand_help(action) if action.help else ""
            rows.append(f"| {_names(action)} | {words.replace('|', chr(92) + '|')} |")
    if rows:
        yield "\n".join(["| argument | meaning |", "|---|---|", *rows, ""])
    for sub in inner:
        yield from _command(sub, level + 1)


def _names(action: argparse.Action) -> str:
    value = ""
    if action.nargs != 0:
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
        value = str(action.metavar or choices)
    return ", ".join(f"`{f'{name} {value}'.strip()}`" for name in action.option_strings or [""])


def _description(text: str) -> Iterator[str]:
    """Paragraphs, and indented lines as blocks."""
    for indented, group in groupby(text.strip().splitlines(), lambda line: line[:2] == "  " if line else None):
        lines = textwrap.dedent("\n".join(group))
        if indented is not None:
            yield f"```text\n{lines}\n```\n" if indented else f"{lines[0].upper()}{lines[1:]}\n"

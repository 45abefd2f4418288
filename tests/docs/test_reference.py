"""docs/reference: every public name has its place, and the page of the command line follows the parsers."""

from __future__ import annotations

import argparse
import re
import runpy
from collections.abc import Iterator

import easymp
from easymp.cli import COMMANDS, parser_of

from ..examples.run import ROOT

PAGES = sorted(ROOT.glob("docs/reference/api/*.md"))
LISTED = [name for page in PAGES for name in re.findall(r"^::: easymp\.([\w.]+)$", page.read_text(), re.MULTILINE)]


def test_every_public_name_is_on_one_page() -> None:
    expected = {*easymp.__all__} - {"__version__", "memory"}
    assert {name for name in LISTED if "." not in name} == expected
    assert sorted(set(LISTED)) == sorted(LISTED)
    assert "memory.estimate" in LISTED


def test_every_method_of_the_accelerator_is_on_its_page() -> None:
    public = {name for name in dir(easymp.Accelerator) if not name.startswith("_")}
    assert {name.removeprefix("Accelerator.") for name in LISTED if name.startswith("Accelerator.")} == public


def parsers() -> Iterator[argparse.ArgumentParser]:
    for name in COMMANDS:
        parser = parser_of(name)
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from action.choices.values()


def test_the_page_of_the_command_line_has_every_flag() -> None:
    page = runpy.run_path(str(ROOT / "docs/reference/cli.py"))["page"]()
    sections = dict(re.findall(r"^##+ (.+)\n([^\0]*?)(?=^##|\Z)", page, re.MULTILINE))
    for parser in parsers():
        for action in parser._actions:
            for flag in set(action.option_strings) - {"-h", "--help"}:
                assert re.search(rf"\| .*`{flag}[ `]", sections[parser.prog]), (parser.prog, flag)

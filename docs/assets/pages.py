"""A hook of MkDocs for what Markdown and Material's template lack.

Words for the tests of a page are left out of code blocks, ``<!-- options: NAME -->`` becomes a table of a record's
fields, ``<!-- tree -->`` the list of easymp's files, cells of wide tables know their column for narrow screens,
and the search has a name for screen readers.
"""

from __future__ import annotations

import dataclasses
import re
import runpy
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import easymp

FENCE = re.compile(r"""(?m)^([ ]*`{3,}\w+.*?)[ ](?:needs="[^"]*"|exact)(?=[ ]|$)""")
TREE = Path(__file__).parents[1] / "contributing/tree.py"
OPTIONS = re.compile(r"<!-- options: (\w+) -->")
SEARCH = 'data-md-component="search" role="dialog"'
COLUMNS = 3  # of a table that is too wide for a telephone


def on_page_markdown(markdown: str, **rest: Any) -> str:
    markdown = OPTIONS.sub(lambda match: options_table(match[1]), FENCE.sub(r"\1", markdown))
    if "<!-- tree -->" in markdown:
        lines = "\n".join(runpy.run_path(str(TREE))["lines"]())
        markdown = markdown.replace("<!-- tree -->", f"```text\n{lines}\n```")
    return markdown


def options_table(name: str) -> str:
    """The fields that a record adds to its base, with default, choices and help; settings also with their variables."""
    kind = getattr(easymp, name)
    variable = "environment | " if kind is easymp.Settings else ""
    rows = [f"| field of `{name}` | {variable}default | |", f"|---|{'---|' * bool(variable)}---|---|"]
    for field in dataclasses.fields(kind):
        if field.name in kind.__annotations__ and field.metadata:
            made = field.default is dataclasses.MISSING
            default = f"{field.default_factory.__name__}()" if made else repr(field.default)
            environment = f"`EASYMP_{field.name.upper()}` | " if variable else ""
            choices = f": {', '.join(f'`{choice}`' for choice in field.metadata['choices'])}"
            help = field.metadata["help"] + choices * bool(variable and field.metadata["choices"])
            rows.append(f"| `{field.name}` | {environment}`{default}` | {help} |")
    return "\n".join(rows)


def on_page_content(html: str, **rest: Any) -> str:
    return re.sub(r"<table>.*?</table>", lambda table: _labelled(table[0]), html, flags=re.DOTALL)


def on_post_page(output: str, **rest: Any) -> str:
    return output.replace(SEARCH, f'{SEARCH} aria-label="Search"')


def on_post_template(output_content: str, **rest: Any) -> str:
    return on_post_page(output_content)


def _labelled(table: str) -> str:
    heads = [re.sub(r"<.*?>", "", head) for head in re.findall(r"<th\b[^>]*>(.*?)</th>", table)]
    if len(heads) < COLUMNS:
        return table
    columns: Iterator[str] = cycle(heads)
    cells = re.sub(r"<td(?=[ >])", lambda cell: f'<td data-column="{next(columns)}"', table)
    return cells.replace("<table>", '<table data-wide="">', 1)

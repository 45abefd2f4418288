"""The fenced blocks of a page, and a session that runs them.

Python blocks share one namespace, in the place of ``__main__``. The first block that fails ends the session.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import re
import subprocess
import sys
import textwrap
import types
from dataclasses import asdict, dataclass, field
from pathlib import Path

FENCE = re.compile(r"^(?P<before>[ >]*(?:[-*+] +|\d+\. +)?)(?P<ticks>`{3,}|~{3,}) *(?P<info>[^`\n]*)$")
OPTION = re.compile(r"""([A-Za-z][\w-]*)(?:=(["'])(.*?)\2)?""")


@dataclass
class Block:
    """A fenced block.

    Its language, the options of its info string (a bare word has the value True), the line it begins in.
    """

    page: str
    line: int
    language: str
    code: str
    options: dict[str, str | bool] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return str(self.options.get("title", ""))

    @property
    def needs(self) -> str:
        return str(self.options.get("needs", ""))

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str, text: str) -> list[Block]:
    """The blocks of a page, also those within tabs, lists, quotes and admonitions."""
    found: list[Block] = []
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if not (opening := FENCE.match(line)):
            continue
        code = []
        for _, inner in lines:
            closing = FENCE.match(inner)
            if closing and not closing["info"] and closing["ticks"].startswith(opening["ticks"]):
                break
            code.append(re.sub("^[ >]*> ?", "", inner) if ">" in opening["before"] else inner)
        else:
            raise ValueError(f"{page}:{number}: the block does not end")
        language, _, rest = opening["info"].strip().partition(" ")
        options = {name: value if quote else True for name, quote, value in OPTION.findall(rest)}
        text = textwrap.dedent("\n".join(code) + "\n").lstrip("\n")
        found.append(Block(page, number, language, text, options))
    return found


class Session:
    """Runs blocks in the working directory."""

    def __init__(self) -> None:
        self._main = types.ModuleType("__main__")
        self._lines: list[str] = []

    def run(self, block: Block) -> str:
        """What the block prints."""
        if block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.code)
            return ""
        return self._python(block) if block.language == "python" else self._bash(block)

    def _python(self, block: Block) -> str:
        # Tracebacks and inspect.getsource read the blocks so far as one file with the page's line numbers.
        self._lines += [""] * (block.line - len(self._lines)) + block.code.splitlines()
        text = "\n".join(self._lines) + "\n"
        linecache.cache[block.page] = (len(text), None, text.splitlines(keepends=True), block.page)
        sys.modules["__main__"] = self._main
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * block.line + block.code, block.page, "exec"), self._main.__dict__)
        return printed.getvalue()

    def _bash(self, block: Block) -> str:
        words = ["bash", "-e", "-o", "pipefail", "-c", block.code]
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(words, stdin=subprocess.DEVNULL, text=True, **both)
        if done.returncode:
            sys.exit(f"{block}: exit code {done.returncode}\n{block.code}\n{done.stdout}")
        return done.stdout


def run_page(file: Path) -> None:
    """Run the blocks of `file` in the working directory, and write there what each prints."""
    sys.path[0] = sys.argv[0] = ""
    session = Session()
    printed = [session.run(Block(**options)) for options in json.loads(file.read_text())]
    file.write_text(json.dumps(printed))


def dump(listed: list[Block]) -> str:
    return json.dumps([asdict(block) for block in listed])


if __name__ == "__main__":
    run_page(Path(sys.argv[1]))

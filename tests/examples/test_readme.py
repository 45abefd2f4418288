"""The README and the guides: their Python runs, their links lead somewhere, and their tables name what exists."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from easymp import resolve
from easymp.cli import COMMANDS
from easymp.registry import PRECISIONS, STRATEGIES
from easymp.settings import NAMES, resolve_launching

from ..conftest import Ranks
from .run import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))}


def blocks(language: str, text: str = TEXT) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def execute(code: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    return printed.getvalue()


@pytest.mark.parametrize("processes", [1, 2])
def test_its_python_runs(ranks: Ranks, processes: int) -> None:
    code = "\n".join(blocks("python"))
    printed = ranks(execute, code, processes=processes, env={"EASYMP_PROBE": "0"})[0]
    (count, error), *_ = re.findall(r"^(\d+) samples, mean squared error ([0-9.]+)", printed, re.MULTILINE)
    assert int(count) == 1000
    assert float(error) < 4  # 8 before training


def test_the_memory_guide_prints_its_table(ranks: Ranks) -> None:
    text = PAGES[ROOT / "docs/guides/memory.md"]
    (code,), (table,) = blocks("python", text), blocks("text", text)
    assert table in ranks(execute, code, processes=1)[0]


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_has_its_row(name: str) -> None:
    text = PAGES[ROOT / "docs/guides/configuration.md"]
    default = NAMES[name].default
    words = "–" if default is None else f"`{str(default).lower()}`"
    assert f"| `{name}` | `EASYMP_{name.upper()}` | {words} | {NAMES[name].metadata['help']}" in text
    row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
    listed = {*STRATEGIES, *PRECISIONS}  # the guide names some of these
    assert all(f"`{choice}`" in row for choice in NAMES[name].metadata["choices"] if choice not in listed)


def test_each_easymp_toml_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in [block for text in PAGES.values() for block in blocks("toml", text)]:
        (tmp_path / "easymp.toml").write_text(block)
        resolve()
        resolve_launching()


def test_links_lead_to_files() -> None:
    links = [
        (path, link)
        for path, text in PAGES.items()
        for link in re.findall(r"\]\(([^)#]+)\)", text)
        if "://" not in link
    ]
    assert [link for path, link in links if not (path.parent / link).exists()] == []


def test_every_command_strategy_and_precision_is_named() -> None:
    assert [name for name in COMMANDS if f"`easymp {name}`" not in TEXT] == []
    guides = {
        "strategies": STRATEGIES,
        "precision": PRECISIONS,
    }
    for guide, names in guides.items():
        text = PAGES[ROOT / f"docs/guides/{guide}.md"]
        assert [name for name in names if f"`{name}`" not in text] == []

"""The README: its Python runs, and its tables name what there is."""

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


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


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
    (table,) = (block for block in blocks("text") if block.startswith("strategy "))
    assert table in printed


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_has_its_row(name: str) -> None:
    default = NAMES[name].default
    words = "–" if default is None else f"`{str(default).lower()}`"
    assert f"| `{name}` | `EASYMP_{name.upper()}` | {words} | {NAMES[name].metadata['help']}" in TEXT
    row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{name}` |"))
    listed = {*STRATEGIES, *PRECISIONS}  # README names some of these
    assert all(f"`{choice}`" in row for choice in NAMES[name].metadata["choices"] if choice not in listed)


def test_its_easymp_toml_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks("toml"):
        (tmp_path / "easymp.toml").write_text(block)
        resolve()
        resolve_launching()
    assert len(blocks("toml")) > 1


def test_every_folder_is_on_the_map() -> None:
    folders = {f"easymp/{path.parent.name}/" for path in ROOT.glob("easymp/*/__init__.py")}
    assert sorted(folder for folder in folders if f"| `{folder}` |" not in TEXT) == []


def test_every_command_is_named() -> None:
    assert [name for name in COMMANDS if f"easymp {name}" not in TEXT] == []

"""docs/migrating/*.md: they name what exists. tests/docs/test_pages.py runs their programs."""

from __future__ import annotations

import inspect
import re

import pytest

import easymp
import easymp.compat
from easymp import Accelerator

from .run import ROOT

GUIDES = sorted(ROOT.glob("docs/migrating/*.md"))
MODULES = ("logging", "toml")  # easymp.logging, easymp.toml
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_what_it_names_is_there(guide):
    text = guide.read_text(encoding="utf-8")
    assert [part for part in ("## Names", "## What differs", "## What is refused") if part not in text] == []
    assert [name for name in re.findall(r"\bacc\.(\w+)", text) if not hasattr(Accelerator, name)] == []
    takes = inspect.signature(Accelerator).parameters
    assert [name for name in re.findall(r"\bAccelerator\((\w+)=", text) if name not in takes] == []
    named = re.findall(r"\beasymp\.(\w+)", text)
    assert [name for name in named if not hasattr(easymp, name) and name not in MODULES] == []


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_the_readme_has_its_import_line(guide):
    text = guide.read_text(encoding="utf-8")
    assert f"docs/migrating/{guide.name})" in README or f"migrating/{guide.stem}/)" in README
    changed = re.findall(r"^-(.*import.*)\n\+(.*)$", text, re.MULTILINE)
    assert not changed or any(f"| `{old}` | `{new}` |" in README for old, new in changed)

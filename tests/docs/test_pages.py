"""README.md and the pages of docs/: their blocks run in order, links lead somewhere, tables name what exists.

A page gets an empty folder. Its ``python`` blocks share one interpreter, its ``bash`` blocks run by ``bash -e``; a
block with a title is written to the file of that name, for the blocks after it. ``needs="sbatch"`` names a command or a
module without which a block is not run; ``needs="network"`` is not run at all, nor ``needs="checkout"``, which is for
this repository's own folder. A ``text`` block shows output; with the word ``exact`` the block before it prints these
lines.
"""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest

from easymp import resolve
from easymp.cli import COMMANDS
from easymp.registry import PRECISIONS, STRATEGIES
from easymp.settings import NAMES, resolve_launching

from ..cluster import missing, running
from ..examples.run import ROOT, environment
from . import blocks as runner
from .blocks import Block, blocks

TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
}
BLOCKS = {page: blocks(page, text) for page, text in TEXTS.items()}
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
CLI = ROOT / "docs/reference/cli.md"  # made by the build
LANGUAGES = {"python", "bash", "text", "toml", "yaml", "json", "diff"}
OPTIONS = {"title", "needs", "exact", "hl_lines", "linenums"}
SLURM = {"sbatch", "srun"}


def can_run(block: Block) -> bool:
    for name in block.needs.split():
        if name in ("network", "checkout"):
            return False
        if name in SLURM:
            if missing():
                return False
        elif not shutil.which(name) and importlib.util.find_spec(name) is None:
            return False
        elif name == "kubectl":  # a client without a cluster can do nothing
            return subprocess.run([name, "version"], capture_output=True, timeout=30).returncode == 0
    return True


def runs(block: Block) -> bool:
    """Is executed, or written for one that is."""
    return block.language in ("python", "bash") or bool(block.title)


def page_of(page: str) -> object:
    fast = page == "README.md" or page.startswith("docs/start/")
    return pytest.param(page, id=page, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize("page", [page_of(page) for page in TEXTS if any(map(runs, BLOCKS[page]))])
@pytest.mark.usefixtures("warm")
def test_its_blocks_run(page: str, tmp_path: Path) -> None:
    wanted = [block for block in BLOCKS[page] if runs(block) and can_run(block)]
    needs = {name for block in BLOCKS[page] if not can_run(block) for name in block.needs.split()}
    missing_packages = needs - {"network", "checkout"}
    if missing_packages and all(block.title for block in wanted):
        pytest.skip(f"optional packages are not installed: {', '.join(sorted(missing_packages))}")
    file, folder = tmp_path / "blocks.json", tmp_path / "folder"
    file.write_text(runner.dump(wanted))
    folder.mkdir()
    variables = environment()
    with running() if any(SLURM & set(block.needs.split()) for block in wanted) else nullcontext() as cluster:
        if cluster:
            variables["SLURM_CONF"] = cluster.variables["SLURM_CONF"]
        command = [sys.executable, "-m", "tests.docs.blocks", str(file)]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    printed = {str(block): text for block, text in zip(wanted, json.loads(file.read_text()))}
    for before, shown in pairwise(BLOCKS[page]):
        if "exact" in shown.options and str(before) in printed:
            assert shown.code in printed[str(before)], str(shown)


@pytest.mark.parametrize("page", TEXTS)
def test_its_blocks_are_of_languages_that_are_checked(page: str) -> None:
    listed = BLOCKS[page]
    assert [str(block) for block in listed if block.language not in LANGUAGES] == []
    assert [str(block) for block in listed if not block.options.keys() <= OPTIONS] == []
    for number, block in enumerate(listed):
        if block.language == "python" and block.title:
            compile(block.code, str(block), "exec")
            later = " ".join(b.code for b in listed[number + 1 :] if b.language in ("python", "bash"))
            assert Path(block.title).stem in later, f"{block}: no later block uses {block.title}"
    shown = [b for a, b in pairwise(listed) if "exact" in b.options and a.language not in ("python", "bash")]
    assert [str(block) for block in shown] == []


@pytest.mark.parametrize("page", TEXTS)
def test_each_toml_yaml_and_json_is_valid(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of TOML without a title is an easymp.toml."""
    monkeypatch.chdir(tmp_path)
    for block in BLOCKS[page]:
        if block.language == "toml":
            tomllib.loads(block.code)
            if block.title in ("", "easymp.toml"):
                (tmp_path / "easymp.toml").write_text(block.code)
                resolve()
                resolve_launching()
        elif block.language == "yaml":
            yaml = pytest.importorskip("yaml")
            assert all(isinstance(part, (dict, list)) for part in yaml.safe_load_all(block.code)), str(block)
        elif block.language == "json":
            json.loads(block.code)


def leads_to_a_file(page: str, link: str) -> bool:
    """README.md is shown outside of the repository, so its links are absolute.

    Those to other sites are not looked at.
    """
    code = URLS["Source"].replace("github.com", "raw.githubusercontent.com") + "/main/"
    here = {URLS["Documentation"]: ROOT / "docs", code: ROOT}
    here |= {f"{URLS['Source']}/{kind}/main/": ROOT for kind in ("blob", "tree")}
    place = (ROOT / page).parent / link
    for address, folder in here.items():
        if link.startswith(address):
            place = folder / link.removeprefix(address).strip("/")
            break
    else:
        if "://" in link:
            return True
    pages = (place.resolve(), place.with_suffix(".md"), place / "index.md")
    return CLI in pages or any(file.exists() for file in pages)


def test_links_lead_to_files() -> None:
    links = [(page, link) for page, text in TEXTS.items() for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)]
    assert len(links) > 100
    assert [link for link in links if not leads_to_a_file(*link)] == []
    assert not leads_to_a_file("README.md", URLS["Documentation"] + "nowhere/")
    assert not leads_to_a_file("docs/index.md", "nowhere.md")


def test_programs_and_commands_of_the_checkout_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for block in [b for page in BLOCKS.values() for b in page if "checkout" in b.needs.split()]:
        targets = re.findall(r"^make ([\w-]+)", block.code, re.MULTILINE)
        assert [name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []
        files = re.findall(r"\b(?:examples|benchmarks)/[\w./-]+\.py", block.code)
        assert [name for name in files if not (ROOT / name).exists()] == []


def test_tables_of_options_come_from_their_records() -> None:
    made = runpy.run_path(str(ROOT / "docs/assets/pages.py"))["options_table"]
    named = {name for text in TEXTS.values() for name in re.findall(r"<!-- options: (\w+) -->", text)}
    records = {kind.Options.__name__ for kind in STRATEGIES.values()} - {"ZeRO1Options"}  # in the text of its page
    assert named == records | {"Settings"}
    table = made("Settings")
    for name, field in NAMES.items():
        assert f"| `{name}` | `EASYMP_{name.upper()}` | `{field.default!r}` | {field.metadata['help']}" in table
        assert all(f"`{choice}`" in table for choice in field.metadata["choices"])


def test_every_command_strategy_and_precision_is_named() -> None:
    assert [name for name in COMMANDS if f"`easymp {name}`" not in TEXTS["README.md"]] == []
    for guide, names in {"strategies": STRATEGIES, "precision": PRECISIONS}.items():
        text = "".join(text for page, text in TEXTS.items() if page.startswith(f"docs/guides/{guide}"))
        assert [name for name in names if f"`{name}`" not in text] == []

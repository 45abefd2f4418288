"""What CI installs and runs, and a release publishes, agree with pyproject.toml, constraints.txt and the Makefile."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, GROUPS = PYPROJECT["project"], PYPROJECT["dependency-groups"]
EXTRAS = PROJECT["optional-dependencies"]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in ROOT.glob(".github/workflows/*.yml")}


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def commands(name: str) -> str:
    return "\n".join(s.get("run", "") for job in WORKFLOWS[name]["jobs"].values() for s in job["steps"])


def requirements(listed: list[Any]) -> Iterator[Requirement]:
    """What a list asks for, groups and easymp's extras in it resolved."""
    for entry in listed:
        if isinstance(entry, dict):
            yield from requirements(GROUPS[entry["include-group"]])
        elif (asked := Requirement(entry)).name == "easymp":
            for extra in asked.extras:
                yield from requirements(EXTRAS[extra])
        else:
            yield asked


@pytest.mark.parametrize("listed", ["dependencies", "cuda13", "test", "pages", "docs", "dist"])
def test_the_lock_has_what_pyproject_asks_for(listed: str) -> None:
    """`make lock` renews it."""
    locked = pins("requirements/ci.txt") | pins("constraints.txt")
    for asked in requirements({"dependencies": PROJECT["dependencies"], **EXTRAS, **GROUPS}[listed]):
        if asked.name != "nvidia-cuda-nvrtc":  # each torch for CUDA pins one of its own
            assert asked.specifier.contains(locked[canonicalize_name(asked.name)]), str(asked)


def test_extras_are_for_users_and_the_install_page_names_them() -> None:
    page = (ROOT / "docs/start/install.md").read_text()
    assert EXTRAS.keys() & GROUPS.keys() == set()
    assert [extra for extra in EXTRAS if f"`{extra}`" not in page] == []


def test_ci_runs_the_two_commands_on_every_python_and_the_pinned_torch() -> None:
    assert "make test" in commands("ci")
    assert ".ci/run" in commands("ci")
    matrix = WORKFLOWS["ci"]["jobs"]["test"]["strategy"]["matrix"]
    named = {c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", c)}
    assert set(matrix["python"]) == named
    assert {"2.8.0", pins("constraints.txt")["torch"]} <= set(matrix["torch"])


def test_jobs_end_and_have_no_more_rights_than_they_say() -> None:
    for name, workflow in WORKFLOWS.items():
        assert workflow["permissions"] in ({}, {"contents": "read"}), name
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"]
            used: list[dict[str, Any]] = [step for step in job["steps"] if "uses" in step]
            assert all(re.search(r"@(v\d+|release/v\d+|[0-9a-f]{40})$", step["uses"]) for step in used)


def test_a_release_is_built_attested_and_published_without_a_password() -> None:
    jobs = WORKFLOWS["release"]["jobs"]
    assert "make dist sbom" in commands("release")
    assert jobs["build"]["permissions"]["attestations"] == "write"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()

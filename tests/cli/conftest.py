"""An empty folder, no setting of the caller's shell, and `easymp config` on machines of a table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import easymp
import easymp.hardware
from easymp.base import env
from easymp.cli import main, plot

from ..checkpoint.samples import root as root
from ..checkpoint.samples import samples as samples
from ..hardware.machines import MACHINES


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: empty, and without settings in the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    for name in (*env.names(env.PREFIX), *env.names("SLURM_")):
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def on_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a machine of the table this one."""
    assert easymp.detect  # its lazy import must not keep the patch
    return lambda name: monkeypatch.setattr(easymp.hardware, "detect", lambda *args, **keywords: MACHINES[name])


@pytest.fixture
def config(folder, monkeypatch, capsys, on_machine):
    """Runs ``easymp config`` with arguments on a machine; returns its output with the errors."""

    def run(machine: str, *arguments: str, code: int = 0) -> str:
        on_machine(machine)
        assert main(["config", *arguments]) == code
        return "".join(capsys.readouterr())

    return run


@pytest.fixture
def talk(config: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs ``easymp config`` in a terminal, where each answer is typed with Enter, and Enter for other questions.

    An answer to a list is text by which it is filtered. Where the keys end, Ctrl-C leaves.
    """
    pytest.importorskip("prompt_toolkit", reason="an optional package is not installed: questionary")
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    def run(machine: str, *answers: str, arguments: str = "", last_key: str = "", code: int = 0) -> str:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
        keys = "".join(f"{answer}\r" for answer in answers) + (last_key or "\r" * 9 + "\x03")
        with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
            pipe.send_text(keys)
            return config(machine, *arguments.split(), code=code)

    return run


@pytest.fixture(scope="session")
def fonts() -> None:
    """matplotlib leaves font files open, which no single test is to blame for."""
    for form in ("svg", "png"):
        plot.draw([plot.Panel("x", [plot.Line(0, [(0, 0)], True)], "x", "y")], ["x"], form)

"""An empty working directory for each test, and no setting of the caller's shell."""

from pathlib import Path

import pytest

from easymp.base import env


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (*env.names(env.PREFIX), *env.names("SLURM_")):
        monkeypatch.delenv(name)
    return tmp_path

"""The one door to the environment."""

from __future__ import annotations

import pytest

from easymp import SettingError
from easymp.base import env


def test_flag(monkeypatch):
    assert env.flag("EASYMP_X", True) is True
    for text, value in {"1": True, "Yes": True, "on": True, "0": False, "FALSE": False, "": False}.items():
        monkeypatch.setenv("EASYMP_X", text)
        assert env.flag("EASYMP_X", not value) is value
    monkeypatch.setenv("EASYMP_X", "maybe")
    with pytest.raises(SettingError, match="EASYMP_X='maybe' in the environment is neither yes nor no"):
        env.flag("EASYMP_X", True)


def test_integer(monkeypatch):
    assert env.integer("EASYMP_X") is None
    assert env.integer("EASYMP_X", 3) == 3
    monkeypatch.setenv("EASYMP_X", "")
    assert env.integer("EASYMP_X", 3) == 3
    monkeypatch.setenv("EASYMP_X", "-4")
    assert env.integer("EASYMP_X", 3) == -4
    monkeypatch.setenv("EASYMP_X", "4.5")
    with pytest.raises(SettingError, match=r"EASYMP_X='4\.5' in the environment is not a whole number"):
        env.integer("EASYMP_X")


def test_override_puts_back_what_was_there_and_what_was_not(monkeypatch):
    monkeypatch.setenv("EASYMP_A", "old")
    try:
        with env.override(EASYMP_A=None, EASYMP_B="new"):
            assert (env.read("EASYMP_A"), env.read("EASYMP_B")) == (None, "new")
            raise KeyError
    except KeyError:
        pass
    assert (env.read("EASYMP_A"), env.read("EASYMP_B", "default")) == ("old", "default")

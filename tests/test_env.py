"""The one door to the environment."""

from __future__ import annotations

from easymp.base import env


def test_override_puts_back_what_was_there_and_what_was_not(monkeypatch):
    monkeypatch.setenv("EASYMP_A", "old")
    try:
        with env.override(EASYMP_A=None, EASYMP_B="new"):
            assert (env.read("EASYMP_A"), env.read("EASYMP_B")) == (None, "new")
            raise KeyError
    except KeyError:
        pass
    assert (env.read("EASYMP_A"), env.read("EASYMP_B", "default")) == ("old", "default")

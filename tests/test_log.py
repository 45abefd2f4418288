"""Messages once, not once a rank."""

from __future__ import annotations

import io
import logging

import pytest

from easymp import get_logger, tqdm


@pytest.fixture
def said(caplog):
    """What was logged, as text."""
    caplog.set_level(logging.DEBUG)
    return lambda: [record.getMessage() for record in caplog.records]


def test_only_the_main_process_speaks(said, monkeypatch):
    logger = get_logger("easymp.tests")
    logger.warning("alone")
    monkeypatch.setenv("RANK", "1")
    logger.warning("not heard")
    logger.warning("heard from %s", "all", main_process_only=False)
    logger.warning("named", main_process_only=False, rank=True)
    monkeypatch.setenv("RANK", "0")
    logger.warning("first", rank=True)
    assert said() == ["alone", "heard from all", "[rank 1] named", "[rank 0] first"]


def test_level_by_argument_and_environment(monkeypatch):
    try:
        assert get_logger("easymp.tests.a", "debug").logger.level == logging.DEBUG
        assert get_logger("easymp.tests.a", 30).logger.level == logging.WARNING
        monkeypatch.setenv("EASYMP_LOG_LEVEL", "info")
        assert get_logger("easymp.tests.b").logger.level == logging.INFO
    finally:
        for name in ("a", "b"):
            logging.getLogger(f"easymp.tests.{name}").setLevel(logging.NOTSET)


def test_the_line_of_the_caller_is_reported(caplog):
    get_logger("easymp.tests").warning("here")
    assert caplog.records[0].filename == "test_log.py"


def test_progress_bar_on_the_first_process_of_a_node(monkeypatch):
    assert list(tqdm(range(3), file=io.StringIO())) == [0, 1, 2]
    assert not tqdm(range(3), file=io.StringIO()).disable
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert tqdm(range(3), file=io.StringIO()).disable
    assert not tqdm(range(3), file=io.StringIO(), main_process_only=False).disable
    assert tqdm(range(3), main_process_only=False, disable=True).disable

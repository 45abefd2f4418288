"""Messages once, not once a rank."""

from __future__ import annotations

import io
import logging
import re

from easymp import get_logger, tqdm


def test_only_the_main_process_speaks(caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    logger = get_logger("easymp.tests")
    logger.warning("alone")
    monkeypatch.setenv("RANK", "1")
    logger.warning("not heard")
    logger.warning("heard from %s", "all", main_process_only=False)
    logger.warning("named", main_process_only=False, rank=True)
    monkeypatch.setenv("RANK", "0")
    logger.warning("first", rank=True)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["alone", "heard from all", "[rank 1] named", "[rank 0] first"]
    assert {record.filename for record in caplog.records} == {"test_log.py"}  # the line of the caller


def test_level_by_argument_and_environment(monkeypatch):
    try:
        assert get_logger("easymp.tests.a", "debug").logger.level == logging.DEBUG
        assert get_logger("easymp.tests.a", 30).logger.level == logging.WARNING
        monkeypatch.setenv("EASYMP_LOG_LEVEL", "info")
        assert get_logger("easymp.tests.b").logger.level == logging.INFO
    finally:
        for name in ("a", "b"):
            logging.getLogger(f"easymp.tests.{name}").setLevel(logging.NOTSET)


def test_progress_bar_on_the_first_process_of_a_node(monkeypatch):
    bar = tqdm(range(3), file=io.StringIO())
    assert not bar.disable and list(bar) == [0, 1, 2]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert tqdm(range(3), file=io.StringIO()).disable
    assert not tqdm(range(3), file=io.StringIO(), main_process_only=False).disable
    assert tqdm(range(3), main_process_only=False, disable=True).disable


def test_a_bar_in_a_file_is_one_line():
    output = io.StringIO()
    bar = tqdm(range(3), file=output, mininterval=0)
    for i in bar:
        bar.set_postfix(loss=i)
    assert re.fullmatch(r"\r100%\|.*\| 3/3 \[.*, loss=2\]\n", output.getvalue())

"""The file of JSON lines: valid JSON whatever is logged, whole lines whatever the disk does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from easymp.errors import SettingError
from easymp.trackers.jsonl import JsonLines
from easymp.trackers.rows import Row

CONFIG = {"lr": 0.1, "easymp": {}}


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_numbers_that_json_has_not_are_words_that_are_numbers(tmp_path: Path) -> None:
    tracker = JsonLines(tmp_path, {})
    tracker.start("log", {**CONFIG, "limit": math.inf}, None)
    tracker.write(
        [
            Row(
                1,
                5.0,
                {"a": math.nan, "b": math.inf, "c": -math.inf, "d": "ü\u2028\n", "e": 10**30, "f": True},
            )
        ]
    )
    tracker.finish()
    (line,) = (tmp_path / "log.jsonl").read_text().split("\n")[:-1]
    row = strict(line)
    assert [row[name] for name in "abc"] == ["NaN", "Infinity", "-Infinity"]
    assert [float(row[name]) for name in "bc"] == [math.inf, -math.inf] and math.isnan(float(row["a"]))
    assert (row["_step"], row["_time"], row["d"], row["e"], row["f"]) == (1, 5.0, "ü\u2028\n", 10**30, True)
    assert strict((tmp_path / "log.json").read_text())["starts"][0]["config"]["limit"] == "Infinity"


class FullDisk:
    """A file whose next write stops halfway."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, 20

    def write(self, text: Any) -> int:
        if self._left <= 0:
            raise OSError("No space left on device")
        self._left -= 20
        return self._file.write(text[:20])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_line_that_could_not_be_written_leaves_none_behind(tmp_path: Path) -> None:
    tracker = JsonLines(tmp_path, {})
    tracker.start("log", CONFIG, None)
    tracker.write([Row(1, 5.0, {"a": 1})])
    whole = tracker._file
    tracker._file = FullDisk(whole)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        tracker.write([Row(2, 5.0, {"a": 2}), Row(3, 5.0, {"a": 3})])
    tracker._file = whole
    tracker.write([Row(4, 5.0, {"a": 4})])
    tracker.finish()
    assert [strict(line)["_step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [1, 4]


def test_a_file_that_is_shorter_than_at_the_checkpoint_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = JsonLines(tmp_path, {})
    tracker.start("log", CONFIG, None)
    tracker.write([Row(1, 5.0, {"a": 1})])
    position = tracker.position()
    tracker.finish()
    tracker.start("log", CONFIG, {**position, "bytes": position["bytes"] + 9})
    tracker.write([Row(2, 5.0, {"a": 2})])
    tracker.finish()
    assert [strict(line)["_step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [1, 2]
    assert "rows are missing" in caplog.text


def test_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="it takes no options"):
        JsonLines(tmp_path, {"flush": 1})

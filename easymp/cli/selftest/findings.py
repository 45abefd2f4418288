"""What each rank finds out, kept line by line, so that a rank that dies has said what it was at."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ...errors import WorldError

PLAN = "plan.txt"  # as rank 0 explains it


class LeftOut(Exception):
    """There is nothing to check here; the message says why."""


class Wrong(Exception):
    """The answer is not the one that is known; the message holds both."""


@dataclass(frozen=True)
class Finding:
    """One check on one rank.

    Attributes:
        outcome: "begun", and later "good", "bad" or "left out".
        words: figures of a good one, the reason of the others.
        seconds: it took; the clock's time where it began.
        second_hand: it failed because another rank did.
    """

    check: str
    outcome: str
    words: str = ""
    seconds: float = 0.0
    second_hand: bool = False


class Diary:
    """One rank's findings, in a file of its own."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank-{rank}.jsonl"

    def note(self, finding: Finding) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(finding)) + "\n")

    @contextmanager
    def page(self, check: str) -> Iterator[list[str]]:
        """Inside, `check` runs; the words that are appended to what is yielded are its figures. Errors end here."""
        begin, words = time.perf_counter(), list[str]()
        self.note(Finding(check, "begun", seconds=time.time()))
        outcome, second_hand = "good", False
        try:
            yield words
        except LeftOut as why:
            outcome, words = "left out", [str(why)]
        except Wrong as why:
            outcome, words = "bad", [str(why)]
        except Exception as error:  # whatever it is, it is what this machine does
            outcome, words = "bad", [f"{type(error).__name__}: {error}"]
            second_hand = isinstance(error, WorldError)
        self.note(Finding(check, outcome, "; ".join(words), time.perf_counter() - begin, second_hand))


def read(folder: Path, ranks: int) -> dict[int, list[Finding]]:
    """All findings by rank, in order; a rank that wrote nothing has none."""
    found: dict[int, list[Finding]] = {}
    for rank in range(ranks):
        path = folder / f"rank-{rank}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found[rank] = [Finding(**json.loads(line)) for line in lines]
    return found

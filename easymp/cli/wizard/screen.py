"""What the wizard needs of whoever it talks to: a terminal, or a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class QuitError(Exception):
    """Somebody has had enough; nothing is written."""


class Screen(Protocol):
    """Plain text, line after line; nothing that was said is changed later."""

    def say(self, text: str = "", strong: bool = False, indent: int = 0) -> None:
        """A sentence, broken into lines that fit, each after `indent` spaces."""
        ...

    def rows(self, rows: Sequence[Sequence[str]]) -> None:
        """Columns under one another, the last broken into lines."""
        ...

    def text(self, text: str) -> None:
        """Lines as they are: a file, or the difference of two."""
        ...

    def ask(self, prompt: str) -> str:
        """A line that somebody types. Raises QuitError where there will be none."""
        ...


def sentence(text: str) -> str:
    """`text` with a full stop, where it has none."""
    return text if text.endswith((".", "?", "!")) else f"{text}."

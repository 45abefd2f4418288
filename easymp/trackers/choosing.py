"""What `log_with` says: names of trackers, or trackers of the script's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from ..errors import SettingError, nearest
from . import TRACKERS

NONE = "none"


def words_of(log_with: Any) -> tuple[str | None, dict[str, Any]]:
    """`log_with` as the setting's words, and the script's own trackers among it by name."""
    if log_with is None:
        return None, {}
    own: dict[str, Any] = {}
    words: list[str] = []
    for item in log_with if isinstance(log_with, Sequence) and not isinstance(log_with, str) else [log_with]:
        if isinstance(item, Enum) and isinstance(item.value, str):
            words.append(item.value)
        elif isinstance(item, str):
            words.append(item)
        else:
            raise SettingError(f"log_with={item!r} is no tracker")
    return ",".join(words) or NONE, own


def choose(words: str, where: str, own: Mapping[str, Any]) -> list[str]:
    """The names in `words`, each once, in order.

    Args:
        where: who said so, for the message.
    """
    names = [word.strip().lower() for word in words.split(",") if word.strip()]
    if names == [NONE]:
        return []
    known = [*TRACKERS, *own]
    for name in names:
        if name not in known:
            raise SettingError(
                f"log_with={words!r} ({where}): {name!r} is no tracker{nearest(name, known)}. Known: {', '.join(known)}"
            )
    return list(dict.fromkeys(names))

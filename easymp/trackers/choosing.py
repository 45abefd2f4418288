"""What `log_with` says: names of trackers, or trackers of the script's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from enum import Enum
from typing import Any

from ..errors import SettingError, nearest
from . import PACKAGES, TRACKERS
from .own import check_own

ALL, NONE = "all", "none"


def words_of(log_with: Any) -> tuple[str | None, dict[str, Any]]:
    """`log_with` as the setting's words, and the script's own trackers among it by name.

    Raises:
        SettingError: something is no tracker.
    """
    own: dict[str, Any] = {}
    words: list[str] = []
    for item in (
        log_with if isinstance(log_with, (list, tuple, set)) else [] if log_with is None else [log_with]
    ):
        word = item.value if isinstance(item, Enum) else item
        if not isinstance(word, str):
            word = check_own(item)
            if word.lower() in own:
                raise SettingError(f"log_with has two trackers called {word!r}: give each a name of its own")
            own[word.lower()] = item
        words.append(word)
    return (None if log_with is None else ",".join(words) or NONE), own


def choose(words: str, where: str, own: Mapping[str, Any]) -> list[str]:
    """The names in `words`, each once, in order.

    Args:
        where: who said so, for the message.
        own: the script's trackers, by names in small letters.

    Raises:
        SettingError: an unknown name, or a package is not here.
    """
    names: list[str] = []
    for name in (word.strip().lower() for word in words.split(",") if word.strip()):
        names += [n for n in TRACKERS if _lacks(n) is None] if name == ALL else [name] if name != NONE else []
    known = [*TRACKERS, *own, ALL, NONE]
    said = where if where.startswith("log_with=") else f"log_with={words!r} ({where})"
    for name in names:
        if name in own:
            continue
        if name not in TRACKERS:
            raise SettingError(
                f"{said}: {name!r} is no tracker{nearest(name, known) or '.'} Known: {', '.join(known)}; or pass an "
                "object of your own with name, start(run, config), log(values, step) and finish()"
            )
        if (package := _lacks(name)) is not None:
            raise SettingError(
                f"{said}: {name} needs the package {package}, which is not installed: pip install 'easymp[{name}]'"
            )
    return list(dict.fromkeys(names))


def _lacks(name: str) -> str | None:
    """The package that a tracker needs, where it is not here."""
    package = PACKAGES.get(name)
    if package is None:
        return None
    try:
        found = importlib.util.find_spec(package)
    except ValueError:  # what a test or a tool has put in its place
        return None
    # A folder of that name (wandb makes one in the working directory) passes for a package without a file.
    return package if found is None or found.origin is None else None

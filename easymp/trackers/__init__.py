"""Trackers of logged values: a file of JSON lines, TensorBoard, Weights & Biases, MLflow, the console, or the script's own.

Adding a tracker: a module here with a class of `start(run, config, position)`, `write(rows)`, `position()` and `finish()`,
a line in `TRACKERS`, and an extra for the package that it needs. Modules are imported when a run logs to them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, NamedTuple

from ..base.lazy import at_first_use, imported
from ..errors import SettingError, nearest


class Entry(NamedTuple):
    """The class of a tracker, in the module of its name.

    Attributes:
        package: that it needs.
        takes_options: whether its `log` does.
        watches: it is made as ``Kind(run, prepared)``, looks at each update, and shows rows instead of keeping them.
    """

    kind: str
    package: str | None = None
    takes_options: bool = False
    watches: bool = False


TRACKERS = {
    "jsonl": Entry("JsonLines"),
    "tensorboard": Entry("TensorBoard", "tensorboard", takes_options=True),
    "wandb": Entry("WandB", "wandb", takes_options=True),
    "mlflow": Entry("MLflow", "mlflow"),
    "console": Entry("Console", "tqdm", watches=True),
}
ALL, NONE = "all", "none"
# The words that `log_with` takes, for type checkers; tests/typing compares them with the table.
TrackerName = Literal["jsonl", "tensorboard", "wandb", "mlflow", "console", "all", "none"]
__all__, __getattr__, __dir__ = at_first_use(
    __name__,
    globals(),
    {"logbook": ("GeneralTracker", "on_main_process")},
    {"logbook": ("Logbook",), "recorder": ("Recorder",)},
)
__all__ += ["TRACKERS"]  # the list that __dir__ gives


def words_of(log_with: Any) -> tuple[str | None, dict[str, Any]]:
    """Split `log_with` into the setting's text and the script's own trackers by lower-case name."""
    if log_with is None:
        return None, {}
    own: dict[str, Any] = {}
    words: list[str] = []
    for item in log_with if isinstance(log_with, (list, tuple, set)) else [log_with]:
        word = item.value if isinstance(item, Enum) else item
        if not isinstance(word, str):
            word = imported(".logbook", __name__).check_own(item)
            if word.lower() in own:
                raise SettingError(f"log_with has two trackers called {word!r}: give each its own name")
            own[word.lower()] = item
        words.append(word)
    return ",".join(words) or NONE, own


def choose(words: str, where: str, own: Mapping[str, Any]) -> list[str]:
    """The names in `words`, each once, in order; `where` is the source of the setting, for messages."""
    names: list[str] = []
    for name in (word.strip().lower() for word in words.split(",") if word.strip()):
        if name == ALL:
            names += [k for k, entry in TRACKERS.items() if not entry.watches and _missing(k) is None]
        elif name != NONE:
            names.append(name)
    said = where if where.startswith("log_with=") else f"log_with={words!r} ({where})"
    for name in names:
        if name not in own and name not in TRACKERS:
            known = [*TRACKERS, *own, ALL, NONE]
            raise SettingError(
                f"{said}: {name!r} is not a tracker{nearest(name, known) or '.'} Known: {', '.join(known)}; or pass "
                "an object with name, start(run, config), log(values, step) and finish()"
            )
        if name not in own and (package := _missing(name)) is not None:
            raise SettingError(
                f"{said}: {name} needs the package {package}, which is not installed: pip install 'easymp[{name}]'"
            )
    return list(dict.fromkeys(names))


def _missing(name: str) -> str | None:
    """The package that the tracker needs, if it is not installed."""
    package = TRACKERS[name].package
    if package is None:
        return None
    try:
        found = importlib.util.find_spec(package)
    except ValueError:  # a module without a spec, put there by a test or a tool
        return None
    # A plain folder of that name (wandb makes one in the working directory) has no origin and is not a package.
    return package if found is None or found.origin is None else None

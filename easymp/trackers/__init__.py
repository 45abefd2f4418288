"""Trackers of logged values: JSON lines, TensorBoard, Weights & Biases, MLflow, the console, or the script's own.

Adding a tracker: a class in `writers` with `start(run, config, position)`, `write(rows)`, `position()` and `finish()`,
a line in `TRACKERS` and its name in `TrackerName`, and an extra for the package that it needs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, NamedTuple

from ..base.lazy import at_first_use, imported
from ..errors import SettingError, nearest


class Entry(NamedTuple):
    """A tracker.

    Attributes:
        kind: its class in `writers`; "" for a part of `registry.PARTS`, which shows rows instead of keeping them.
        package: the package that it needs.
        takes_options: whether `log_kwargs` may have further arguments for it.
    """

    kind: str
    package: str | None = None
    takes_options: bool = False


TRACKERS = {
    "jsonl": Entry("JsonLines"),
    "tensorboard": Entry("TensorBoard", "tensorboard", takes_options=True),
    "wandb": Entry("WandB", "wandb", takes_options=True),
    "mlflow": Entry("MLflow", "mlflow"),
    "console": Entry("", "tqdm"),
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
    script_trackers: dict[str, Any] = {}
    names: list[str] = []
    for item in log_with if isinstance(log_with, (list, tuple, set)) else [log_with]:
        name = item.value if isinstance(item, Enum) else item
        if not isinstance(name, str):
            name = imported(".logbook", __name__).check_own(item)
            if name.lower() in script_trackers:
                raise SettingError(f"log_with has two trackers called {name!r}: give each its own name")
            script_trackers[name.lower()] = item
        names.append(name)
    return ",".join(names) or NONE, script_trackers


def choose(setting: str, source: str, script_trackers: Mapping[str, Any]) -> list[str]:
    """The names in a setting, each once, in order; `source` is where it was set, for messages."""
    names: list[str] = []
    for name in (name.strip().lower() for name in setting.split(",") if name.strip()):
        if name == ALL:
            names += [key for key, entry in TRACKERS.items() if entry.kind and _missing_package(key) is None]
        elif name != NONE:
            names.append(name)
    subject = source if source.startswith("log_with=") else f"log_with={setting!r} ({source})"
    for name in names:
        if name in script_trackers:
            continue
        if name not in TRACKERS:
            names = [*TRACKERS, *script_trackers, ALL, NONE]
            raise SettingError(
                f"{subject}: {name!r} is not a tracker{nearest(name, names) or '.'} Known: {', '.join(names)}; or pass "
                "an object with name, start(run, config), log(values, step) and finish()"
            )
        if (package := _missing_package(name)) is not None:
            remedy = f"pip install 'easymp[{name}]'"
            raise SettingError(f"{subject}: {name} needs the package {package}, which is not installed: {remedy}")
    return list(dict.fromkeys(names))


def _missing_package(name: str) -> str | None:
    """The package that the tracker needs, if it is not installed."""
    package = TRACKERS[name].package
    if package is None:
        return None
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module without a spec, put there by a test or a tool
        return None
    # A plain folder of that name (wandb makes one in the working directory) has no origin and is not a package.
    return package if spec is None or spec.origin is None else None

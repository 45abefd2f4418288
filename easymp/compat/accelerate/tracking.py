"""``accelerate.tracking``: trackers of the script by their classes. Those of easymp are named in `log_with`."""

from __future__ import annotations

import warnings
from typing import Any

from ...errors import SettingError
from ...options import LoggerType
from ...trackers import choose, own
from .plugins import INSTEAD, layer

LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {}  # those that the script registered


class GeneralTracker(own.GeneralTracker):
    """Base class of a script's trackers; see `easymp.GeneralTracker`.

    Raises:
        NotImplementedError: the class lacks `name`, `requires_logging_directory` or `tracker`.
    """

    def __init__(self, _blank: bool = False) -> None:
        kinds = [
            kind for kind in type(self).__mro__ if kind not in (GeneralTracker, own.GeneralTracker, object)
        ]
        there = {name for kind in kinds for name in vars(kind)} | vars(self).keys()
        lacks = [name for name in ("name", "requires_logging_directory", "tracker") if name not in there]
        if lacks and not _blank:
            raise NotImplementedError(
                f"{type(self).__name__} has no {' and no '.join(lacks)}: define it in the class"
            )


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let `log_with` name a class of trackers, which is made as ``tracker_class(project_name, **options)``.

    A class with ``requires_logging_directory = True`` gets the folder as its second argument.

    Raises:
        SettingError: it is not a GeneralTracker, or has no name or no `requires_logging_directory` of its own.
    """
    kinds = tracker_class.__mro__ if isinstance(tracker_class, type) else ()
    said = [kind for kind in kinds if "requires_logging_directory" in vars(kind)]
    if own.GeneralTracker not in kinds or not tracker_class.name or said[0] is own.GeneralTracker:
        raise SettingError(
            f"{tracker_class!r} cannot be registered: derive it from GeneralTracker, and set name and requires_logging_directory in it"
        )
    if tracker_class.name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(f"the tracker {tracker_class.name!r} is registered anew", stacklevel=2)
    LOGGER_TYPE_TO_CLASS[tracker_class.name] = tracker_class


def made_by_name(word: Any, run: Any, folder: Any) -> Any:
    """`word`, or where a class is registered under it, one that `log_with` takes; `run` and `folder` are asked when it is made."""
    kind = LOGGER_TYPE_TO_CLASS.get(str(word)) if isinstance(word, str) else None
    if kind is None:
        return word
    if kind.requires_logging_directory and folder is None:
        raise SettingError(
            f"log_with={word!r}: this tracker needs a folder: pass project_dir, or a logging_dir"
        )

    def made(self: Any, **options: Any) -> None:
        kind.__init__(self, run(), *([folder] if kind.requires_logging_directory else []), **options)  # type: ignore[misc]

    return type(kind.__name__, (kind,), {"__init__": made, "__module__": kind.__module__})


def get_available_trackers() -> list[LoggerType]:
    """The trackers whose packages are installed."""
    return [LoggerType(word) for word in choose("all", "log_with='all'", {})]


NAMES = {
    "GeneralTracker": GeneralTracker,
    "LOGGER_TYPE_TO_CLASS": LOGGER_TYPE_TO_CLASS,
    "get_available_trackers": get_available_trackers,
    "on_main_process": own.on_main_process,
    "register_tracker_class": register_tracker_class,
}
on_main_process = own.on_main_process
__all__ = sorted(NAMES)
__getattr__ = layer.absent("accelerate.tracking", INSTEAD, lambda: __all__)

"""A logger that speaks on rank 0, and a progress bar on the first process of each node."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import sys
from collections.abc import Iterable, MutableMapping
from functools import cache
from typing import Any

from .base import env
from .base.ranks import LAUNCHERS
from .errors import redact

__all__ = ["get_logger"]


RANKS = [launcher.rank for launcher in LAUNCHERS]
LOCAL_RANKS = [launcher.local_rank for launcher in LAUNCHERS if launcher.local_rank]


def is_main() -> bool:
    """Whether this process is rank 0 (or the only one), by the launch variables: true before any group exists."""
    return _number(*RANKS) == 0


def _number(*names: str) -> int:
    """The first of the variables that is set."""
    return next((number for name in names if (number := env.integer(name)) is not None), 0)


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that speaks on rank 0 only, unless told otherwise with ``main_process_only=False``.

    ``rank=True`` puts the rank in front of the message. Secrets of URLs are masked.
    """

    def log(  # type: ignore[override]  # main_process_only is easymp's own keyword
        self, level: int, msg: object, *args: Any, main_process_only: bool = True, **kwargs: Any
    ) -> None:
        if main_process_only and not is_main():
            return
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        masked = [redact(arg) if isinstance(arg, str) else arg for arg in args]
        # A template has no secret, and may look like one.
        text = redact(msg) if isinstance(msg, str) and not args else msg
        super().log(level, text, *masked, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        if kwargs.pop("rank", False):
            msg = f"[rank {_number(*RANKS)}] {msg}"
        return msg, kwargs


def get_logger(name: str, log_level: str | int | None = None) -> RankLogger:
    """Make a logger that logs on rank 0 only.

    Args:
        name: as in `logging.getLogger`.
        log_level: ``"INFO"``, 20 and so on. None takes EASYMP_LOG_LEVEL, or leaves the level unchanged.

    Returns:
        A logger whose calls take two more keywords: ``main_process_only=False`` logs on every rank, ``rank=True``
        prefixes the rank.

    Example:
        >>> logger = get_logger("train", log_level="INFO")
        >>> logger.info("rank 0 says so", rank=True)
    """
    logger = logging.getLogger(name)
    level = log_level if log_level is not None else env.read("EASYMP_LOG_LEVEL")
    if level:
        logger.setLevel(level.upper() if isinstance(level, str) else level)
    return RankLogger(logger, {})


def tqdm(iterable: Iterable[Any] | None = None, *args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Show tqdm's progress bar on the first process of each node; in a file or pipe, its last state as one line.

    Args:
        iterable: as in tqdm.
        args: more arguments of tqdm.
        main_process_only: False shows a bar on every process.
        kwargs: more arguments of tqdm.

    Returns:
        tqdm's bar.

    Example:
        >>> [number for number in tqdm(range(3), leave=False)]
        [0, 1, 2]
    """
    if main_process_only:
        kwargs["disable"] = kwargs.get("disable", False) or _number(*LOCAL_RANKS, *RANKS) != 0
    file = kwargs.get("file") or sys.stderr
    is_drawn = file.isatty() or (file is sys.stderr and "ipykernel" in sys.modules)
    return (tqdm_class() if is_drawn else _last_line_class())(iterable, *args, **kwargs)


def tqdm_class() -> Any:
    """tqdm's class: a widget in a notebook, and text in processes forked from it, which cannot show widgets."""
    forked = multiprocessing.parent_process() is not None
    return importlib.import_module("tqdm.std" if forked else "tqdm.auto").tqdm


@cache
def _last_line_class() -> Any:
    """A bar that is written once, when it is closed: tqdm writes each state behind a carriage return."""

    class LastLine(importlib.import_module("tqdm.std").tqdm):  # type: ignore[misc]
        def display(self, *args: Any, **kwargs: Any) -> Any:
            return super().display(*args, **kwargs) if self.disable else None  # close() disables before it displays

    return LastLine

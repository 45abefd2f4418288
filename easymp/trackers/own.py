"""The script's own trackers: objects or classes that follow `easymp.protocols.Tracker` or Accelerate's GeneralTracker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ..errors import SettingError
from ..logging import is_main
from .rows import FACTS, Row, concise

F = TypeVar("F", bound=Callable[..., Any])


class Own:
    """Drives a tracker of the script, or one of its class, made with `options`; one with `resume` continues (see `ResumableTracker`)."""

    def __init__(self, name: str, given: Any, options: Mapping[str, Any]) -> None:
        if isinstance(given, type):
            given = given(**options)
        elif options:
            raise SettingError(
                f"init_kwargs={{{name!r}: ...}}: this tracker exists already. Leave the options out, or pass its class in log_with"
            )
        self.name, self.given = name, given
        self._running = False
        self._accelerates = _is_accelerates(given)
        self._as_given = getattr(
            given, "as_given", False
        )  # Accelerator.log calls it, with what the script passed

    def start(self, run: str, config: Mapping[str, Any], position: Mapping[str, Any] | None) -> None:
        if position is not None:
            self.given.resume(position)
        if self._running:
            return
        if not self._accelerates:
            self.given.start(run, config)
        else:
            if hasattr(self.given, "start"):
                self.given.start()
            if not self._as_given:
                self.given.store_init_configuration(concise(config))
            elif asked := {name: value for name, value in config.items() if name != FACTS}:
                self.given.store_init_configuration(asked)
        self._running = True

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows if not self._as_given else ():
            options = row.options.get(self.name, {})
            if self._accelerates:
                self.given.log(row.values, step=row.step, **options)
            else:
                self.given.log(row.values, row.step, **options)

    def __getattr__(self, name: str) -> Any:
        """`log_images` and `log_table`, if the tracker has them."""
        if name in ("log_images", "log_table"):
            return getattr(self.given, name)
        raise AttributeError(name)

    def position(self) -> dict[str, Any] | None:
        return dict(self.given.position()) if callable(getattr(self.given, "resume", None)) else None

    def finish(self) -> None:
        if self._running:
            self._running = False
            self.given.finish()


def _is_accelerates(given: Any) -> bool:
    return callable(getattr(given, "store_init_configuration", None))


def check_own(given: Any) -> str:
    """The name of a tracker of the script; SettingError if it lacks a name or a method."""
    name = getattr(given, "name", None)
    methods = ("log", "finish") if _is_accelerates(given) else ("start", "log", "finish")
    lacks = [method for method in methods if not callable(getattr(given, method, None))]
    if not isinstance(name, str) or not name.strip() or "," in name:
        lacks.insert(0, "name")
    if lacks:
        raise SettingError(
            f"log_with={given!r} is not a tracker: it has no {' and no '.join(lacks)}. Pass a name such as 'jsonl', or an object with "
            "name, start(run, config), log(values, step) and finish()"
        )
    return str(name)


class GeneralTracker:
    """Base class for trackers written for Accelerate. Subclasses set `name` and define the methods that they need.

    Args:
        _blank: ignored, as in Accelerate.

    Example:
        >>> class Printer(GeneralTracker):
        ...     name = "printer"
        ...     def log(self, values, step=None, **options):
        ...         print(step, values)
        >>> acc = Accelerator(cpu=True, log_with=Printer())
        >>> acc.log({"loss": 0.5}, step=1)
        >>> acc.end_training()  # calls .start(), .store_init_configuration(...), .log(...) and .finish()
        1 {'loss': 0.5}
    """

    name = ""
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, _blank: bool = False) -> None:
        """Do nothing."""

    def start(self) -> None:
        """Begin the run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the hyperparameters.

        Args:
            values: numbers, words and None by name.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """Keep one row.

        Args:
            values: numbers and words by name.
            step: the script's, or the number of optimizer updates.
            options: this tracker's part of ``Accelerator.log(log_kwargs=...)``.
        """

    def finish(self) -> None:
        """End the run."""


def on_main_process(function: F) -> F:
    """Make a method do nothing and return None except on process 0, where trackers in `log_with` are called in any case."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if is_main() else None

    return run  # type: ignore[return-value]


class Silent:
    """Stands for a tracker on other ranks than the main one: every attribute, item and call returns this object again."""

    def __getattr__(self, name: str) -> Silent:
        if name.startswith("__"):  # copy and pickle look for their hooks
            raise AttributeError(name)
        return self

    def _itself(self, *_: Any, **__: Any) -> Silent:
        return self

    def _ignore(self, *_: Any) -> None:
        """Do nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False

    __call__ = __getitem__ = __enter__ = _itself
    __exit__ = __setitem__ = __setattr__ = _ignore


SILENT = Silent()

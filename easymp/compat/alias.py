"""easymp under the name ``accelerate``, for scripts and libraries that import that package. Nothing here imports torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any

NAME, VERSION = "accelerate", "1.15.0"  # the interface that this layer follows
OWN = f"{__package__}."


class Alias(ModuleType):
    """A module of this layer under its name in Accelerate."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        vars(self)["_own"] = importlib.import_module(OWN + name)

    def __getattr__(self, name: str) -> Any:
        """A name of this layer; one that it says a replacement for can be imported here, and refuses to be called."""
        own = vars(self)["_own"]
        try:
            return getattr(own, name)
        except ImportError as error:
            instead = getattr(own.__getattr__, "instead", {})
            if name not in instead:
                raise AttributeError(str(error)) from None
            stand_in = importlib.import_module(f"{OWN}{NAME}.plugins").stand_in
            vars(self)[name] = stand_in(f"{self.__name__}.{name}", instead[name])
            return vars(self)[name]


class Package(Distribution):
    """The metadata that libraries look up: name and version."""

    def read_text(self, filename: str) -> str | None:
        text = f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n"
        return text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return path


class Finder(DistributionFinder):
    """Finds ``accelerate`` and the modules below it here."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != NAME:
            return None
        try:
            importlib.import_module(OWN + fullname)
        except ModuleNotFoundError:
            return None
        return ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Alias(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: the module is imported."""

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        if context is None or context.name in (None, NAME):
            yield Package()


def install() -> None:
    """Give this process easymp under the name ``accelerate``: call it before the first import of a library that uses Accelerate.

    Raises:
        RuntimeError: Accelerate itself is imported already.

    Example:
        >>> from easymp.compat import install
        >>> install()
        >>> import accelerate
        >>> accelerate.Accelerator.__module__
        'easymp.compat.accelerate.accelerator'
    """
    there = sys.modules.get(NAME)
    if isinstance(there, Alias):
        return
    if there is not None:
        raise RuntimeError(
            "call install() before the import of accelerate, or `easymp launch --as accelerate`"
        )
    sys.meta_path.insert(0, Finder())

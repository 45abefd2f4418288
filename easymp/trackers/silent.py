"""What other ranks than the main one get for a tracker: it takes every call and does nothing, so that scripts need not ask who they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Silent:
    """Every attribute and item is itself, and so is what any call returns."""

    def __getattr__(self, name: str) -> Silent:
        if name.startswith("__"):  # what copy, pickling and the like look for is not there
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Silent:
        return self

    def __getitem__(self, key: Any) -> Silent:
        return self

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __setitem__(self, key: Any, value: Any) -> None:
        """Nothing."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Nothing."""

    def __bool__(self) -> bool:
        return False


SILENT = Silent()

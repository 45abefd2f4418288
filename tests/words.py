"""Accelerators from words of which some are arguments and some settings."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any

from easymp import Accelerator, Settings

SETTINGS_ONLY = {f.name for f in fields(Settings)} - set(inspect.signature(Accelerator).parameters)


def make_accelerator(settings: Settings | None = None, kind: type[Accelerator] = Accelerator, **words: Any) -> Any:
    """An Accelerator with these words; those that are no arguments of its go into its Settings."""
    rare = {name: words.pop(name) for name in words.keys() & SETTINGS_ONLY}
    rare = {name: value for name, value in rare.items() if value is not None}
    if settings is not None or rare:
        words["settings"] = replace(settings or Settings(), **rare)
    return kind(**words)

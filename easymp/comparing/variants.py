"""What is compared: settings that win over the script's own, with a name as short as it can be."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import SettingError
from ..settings import NAMES, checked


@dataclass(frozen=True)
class Variant:
    """One plan to run the script under.

    Attributes:
        name: by what it differs from the others.
        settings: by setting's name, as text; they win over the script's own.
        processes: None: one an accelerator, or one without any.
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    processes: int | None = None

    def override(self, **more: str) -> str:
        """The settings, and `more`, as EASYMP_OVERRIDE takes them."""
        return " ".join(f"{name}={shlex.quote(value)}" for name, value in {**self.settings, **more}.items())


def variants(
    precisions: Sequence[str] = (), strategies: Sequence[str] = (), processes: Sequence[int] = ()
) -> list[Variant]:
    """Every combination, in order. What is not given is left to the script.

    Raises:
        SettingError: a wrong name or number, or one given twice.
    """
    for word, given in (("mixed_precision", precisions), ("strategy", strategies), ("processes", processes)):
        for value in given:
            if word in NAMES:
                checked(NAMES[word], value, f"{word}=")
            elif not isinstance(value, int) or value < 1:
                raise SettingError(f"{value!r} is no number of processes: use whole numbers of at least 1")
        if len(set(given)) < len(given):
            raise SettingError(
                f"{', '.join(map(str, given))}: one of them is there twice; use --repeats to run each several times"
            )
    found = []
    for precision, strategy, count in itertools.product(
        precisions or [""], strategies or [""], processes or [0]
    ):
        parts = [
            precision if len(precisions) > 1 or not (strategies[1:] or processes[1:]) else "",
            strategy if len(strategies) > 1 else "",
            f"{count} process{'es' * (count > 1)}" if len(processes) > 1 else "",
        ]
        settings = {
            name: value for name, value in (("mixed_precision", precision), ("strategy", strategy)) if value
        }
        found.append(
            Variant(" ".join(filter(None, parts)) or strategy or "as it is", settings, count or None)
        )
    return found

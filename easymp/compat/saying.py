"""What a layer says of itself: one warning of what it ignores, the native lines for what was used, and where absent names are found.

A script that is moved in should run, and not drown its user in advice: so all of it is kept here, and printed when asked for.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import EasympWarning, nearest
from ..logging import get_logger

logger = get_logger(__name__)


class Layer:
    """The voice of one layer.

    Args:
        name: of what it stands for, as users call it: ``"Apex"``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.ignored: dict[str, str] = {}  # what → why it makes no difference, or what to do instead
        self.native: dict[str, str] = {}  # what was used → lines of easymp that do the same
        self._warned = False
        LAYERS.append(self)

    def ignore(self, words: Mapping[str, str]) -> None:
        """These options, by name, are known and have no effect, for the reasons given. The first are a warning, later ones are logged."""
        new = {what: why for what, why in words.items() if what not in self.ignored}
        if not new:
            return
        self.ignored.update(new)
        said = "; ".join(f"{what} ({why})" for what, why in new.items())
        if self._warned:
            logger.info("%s: without effect: %s", self.name, said)
            return
        self._warned = True
        warnings.warn(
            f"{self.name}: without effect here: {said}. easymp.compat.explain() says more",
            EasympWarning,
            stacklevel=3,
        )

    def use(self, what: str, lines: str) -> None:
        """`what` was used, and `lines` are how a script for easymp itself does it."""
        self.native[what] = lines

    def absent(
        self, module: str, instead: Mapping[str, str], known: Callable[[], list[str]]
    ) -> Callable[[str], Any]:
        """A module's ``__getattr__``: names of the original that are not here fail with their replacement.

        With an ImportError, also where they are attributes: Python replaces the words of an AttributeError in ``from … import``.

        Args:
            module: the original's name, such as ``"apex.amp"``.
            instead: replacements by name.
            known: names that are here.
        """

        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            way = (
                f": {instead[name]}"
                if name in instead
                else nearest(name, known()) or f". Here are {', '.join(known())}"
            )
            raise ImportError(f"{module}.{name} is not part of easymp.compat{way}")

        return missing


LAYERS: list[Layer] = []


def explain() -> str:
    """What the layers in use ignored, and the native lines that would do the same; printed, and returned."""
    parts = []
    for layer in LAYERS:
        if not (layer.native or layer.ignored):
            continue
        lines = [f"# {layer.name} → easymp", "from easymp import Accelerator"]
        for what, code in layer.native.items():
            lines += ["", f"# {what}", code.strip()]
        lines += [""] * bool(layer.ignored) + [
            f"# without effect: {what} ({why})" for what, why in layer.ignored.items()
        ]
        parts.append("\n".join(lines))
    text = "\n\n".join(parts) or "no layer of easymp.compat is in use"
    print(text)  # noqa: T201 (what the function is for)
    return text

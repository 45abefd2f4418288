"""Messages and module addresses that the layers share.

A layer warns once about options without effect, records the native lines for the features that a script uses, and says what replaces
absent names. `explain` prints the records on request, so that a migrated script runs without a flood of advice.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any, ClassVar

import torch

from ..distributed import Ranks
from ..errors import EasympWarning, nearest
from ..logging import get_logger
from ..protocols import Source
from ..settings import Settings

logger = get_logger(__name__)


class Layer:
    """Messages of the layer that stands for the library `name`, such as ``"Apex"``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ignored: dict[str, str] = {}  # option → why it has no effect, or what to do instead
        self.native: dict[str, str] = {}  # feature in use → lines of easymp that do the same
        self.refused: dict[str, str] = {}  # module of the original → what to use instead
        LAYERS.append(self)

    def ignore(self, words: Mapping[str, str]) -> None:
        """Note known options without effect, with the reasons. The first call warns, later ones log."""
        new = {what: why for what, why in words.items() if what not in self.ignored}
        said = "; ".join(f"{what} ({why})" for what, why in new.items())
        text = f"{self.name}: without effect here: {said}. easymp.compat.explain() says more"
        if self.ignored and new:
            logger.info("%s", text)
        elif new:
            warnings.warn(text, EasympWarning, stacklevel=3)
        self.ignored.update(new)

    def use(self, what: str, lines: str) -> None:
        """Record that `what` was used, and the `lines` that do the same in a script for easymp itself."""
        self.native[what] = lines

    def absent(
        self, module: str, instead: Mapping[str, str], known: Callable[[], list[str]]
    ) -> Callable[[str], Any]:
        """A module's ``__getattr__``: absent names of the original `module` fail with their replacement, from `instead`.

        The error is an ImportError, also for attributes: Python replaces the words of an AttributeError in ``from … import``.
        """

        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            way = nearest(name, known()) or f". Here are {', '.join(known())}"
            if found := instead.get(name) or self.refused.get(f"{module}.{name}"):
                way = f": {found}"
            raise ImportError(f"{module}.{name} is not part of easymp.compat{way}")

        vars(missing)["instead"] = instead
        return missing


LAYERS: list[Layer] = []


def unless_set(asked: Settings, name: str, given: Any, default: str) -> Any:
    """The value of an argument: `default` where neither the script nor the environment nor a file says another."""
    return default if given is None and asked.source(name)[0] is Source.DEFAULT else given


def explain() -> str:
    """Show what the layers ignored, and the lines of easymp that replace them. It is printed and returned.

    Returns:
        The text.

    Example:
        >>> from easymp.compat import explain
        >>> from easymp.compat.torch_cuda.amp import autocast
        >>> text = explain()
        no layer of easymp.compat is in use
    """
    parts = []
    for layer in LAYERS:
        if not (layer.native or layer.ignored):
            continue
        lines = [f"# {layer.name} → easymp", "from easymp import Accelerator"]
        for what, code in layer.native.items():
            lines += ["", f"# {what}", code.strip()]
        lines += [""] * bool(layer.ignored)
        lines += [f"# without effect: {what} ({why})" for what, why in layer.ignored.items()]
        parts.append("\n".join(lines))
    text = "\n\n".join(parts) or "no layer of easymp.compat is in use"
    print(text)  # noqa: T201
    return text


class _Refused(MetaPathFinder):
    """Fails imports of the modules that a layer refuses, with their replacement."""

    words: ClassVar[dict[str, str]] = {}  # the module's full name → the error's words

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname in self.words:
            raise ModuleNotFoundError(self.words[fullname], name=fullname)


sys.meta_path.append(_Refused())


def named(*things: Any, **others: Any) -> dict[str, Any]:
    """Functions and classes by their names, and `others`."""
    return {thing.__name__: thing for thing in things} | others


def submodules(
    package: str, table: Mapping[str, Mapping[str, Any] | ModuleType | str], layer: Layer, original: str
) -> None:
    """Register modules that hold names of `package`, which is `original` in messages, at the addresses by which scripts import them.

    `table` has the module's names, or a module of ours that gives its ``__all__``, by the address below `package`. The key ``"absent"`` has
    replacements by name, or is the module's ``__getattr__``. A string refuses the module, and all below it.
    """
    for address, names in table.items():
        parent, _, leaf = f"{package}.{address}".rpartition(".")
        vars(sys.modules[parent]).setdefault("__path__", [])  # a file may have modules below it, too
        if isinstance(names, str):
            layer.refused[f"{original}.{address}"] = names
            _Refused.words[f"{parent}.{leaf}"] = f"{original}.{address} is not part of easymp.compat: {names}"
            continue
        whole = isinstance(names, ModuleType)
        names = {name: getattr(names, name) for name in names.__all__} if whole else dict(names)  # type: ignore[union-attr, arg-type]
        module = ModuleType(f"{parent}.{leaf}", f"``{original}.{address}``.")
        instead = names.pop("absent", {})
        listed = sorted(names)
        vars(module).update(names, __all__=listed, __path__=[])
        absent = layer.absent(f"{original}.{address}", instead, partial(list, listed))
        vars(module)["__getattr__"] = instead if callable(instead) else absent
        sys.modules[module.__name__] = module
        # A function or class of the same name wins: accelerate.utils.tqdm, apex.parallel.LARC.
        vars(sys.modules[parent]).setdefault(leaf, module)


def device_of(ranks: Ranks) -> torch.device:
    """The GPU of this rank, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
    return torch.device("cpu")

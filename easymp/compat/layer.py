"""Messages and module addresses that the migration layers share.

A layer warns of options without effect. For an absent name its error names the replacement.
"""

from __future__ import annotations

import sys
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

from ..base.accumulation import UpdateWindow
from ..distributed import Ranks
from ..errors import EasympWarning, nearest
from ..protocols import Source
from ..settings import Settings, resolve


class Layer:
    """Stands for the library `name`, whose modules in messages begin with `original`; `folder` holds its layer."""

    def __init__(self, name: str, folder: str, original: str) -> None:
        self.name, self.package, self.original = name, f"{__package__}.{folder}", original
        table = REFUSED.get(folder, {})
        self.instead, self.members = by_word(table.get("names", {})), by_word(table.get("members", {}))
        for address, reason in by_word(table.get("modules", {})).items():
            sentence = f"{original}.{address} is not part of easymp.compat: {reason}"
            RefusedModules.sentences[f"{self.package}.{address}"] = sentence

    def ignore(self, reasons: Mapping[str, str]) -> None:
        """Warn of options without effect, with the reasons, in one warning."""
        if not reasons:
            return
        options = "; ".join(f"{option} ({reason})" for option, reason in reasons.items())
        warnings.warn(f"{self.name}: without effect here: {options}", EasympWarning, stacklevel=3)

    def absent(self, module: str) -> AbsentNames:
        """A ``__getattr__`` for `module`: explains names of the original module that are not in its ``__all__``."""
        return AbsentNames(self, module)

    def submodules(self, package: str, table: Mapping[str, Mapping[str, Any]]) -> None:
        """Register modules below `package` where scripts import them: by address their names, or a ``__getattr__``."""
        for address, names in table.items():
            name = f"{package}.{address}"
            parent, _, leaf = name.rpartition(".")
            vars(sys.modules[parent]).setdefault("__path__", [])  # a file may have modules below it, too
            module = ModuleType(name, f"``{self.address(name)}``.")
            vars(module).update({"__path__": [], "__getattr__": self.absent(name), **names})
            vars(module)["__all__"] = sorted(n for n in names if n != "__getattr__")
            sys.modules[name] = module
            # A function or class of the same name wins: accelerate.utils.tqdm, apex.parallel.LARC.
            vars(sys.modules[parent]).setdefault(leaf, module)

    def address(self, name: str) -> str:
        """The original's name of something in this layer."""
        return self.original + name.removeprefix(self.package)


@dataclass(frozen=True)
class AbsentNames:
    """A module's ``__getattr__``: absent names fail with what to use instead.

    The error is an ImportError, also for attributes: Python replaces the text of an AttributeError in ``from …
    import``.
    """

    layer: Layer
    module: str

    def __call__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full_name, instead = f"{self.module}.{name}", self.layer.instead.get(name)
        names = list(sys.modules[self.module].__all__)
        hint = f": {instead}" if instead else nearest(name, names) or f". Here are {', '.join(names)}"
        absent = f"{self.layer.address(full_name)} is not part of easymp.compat{hint}"
        raise ImportError(RefusedModules.sentences.get(full_name, absent))


class RefusedModules(MetaPathFinder):
    """Import hook: importing a module that a layer refuses fails with a sentence that names the replacement."""

    sentences: ClassVar[dict[str, str]] = {}  # by the module's full name

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname in self.sentences:
            raise ModuleNotFoundError(self.sentences[fullname], name=fullname)


sys.meta_path.append(RefusedModules())
REFUSED: dict[str, Any] = tomllib.loads(Path(__file__).with_name("refused.toml").read_text(encoding="utf-8"))


def by_word(table: Mapping[str, str]) -> dict[str, str]:
    """The words in the values of a table of refused.toml, each with its key, which says what to write instead."""
    return {word: reason for reason, words in table.items() for word in words.split()}


def by_name(*functions: Any, **aliases: Any) -> dict[str, Any]:
    """Functions and classes by their names, and `aliases`."""
    return {function.__name__: function for function in functions} | aliases


@contextmanager
def saving_between_micro_batches(window: UpdateWindow) -> Iterator[None]:
    """A context that allows saves inside an accumulation window. The window's gradients are not saved."""
    sync, window.sync = window.sync, True
    try:
        yield
    finally:
        window.sync = sync


def unless_set(settings: Settings, name: str, argument: Any, default: str) -> Any:
    """The value of an argument: `default` where neither the script nor the environment nor a file names one."""
    return default if argument is None and settings.source(name)[0] is Source.DEFAULT else argument


def plain_steps_on_cpu(settings: Settings, cpu: bool) -> Settings:
    """Switch fused steps off on CPUs, as the peers do: they round otherwise. Settings that say `fused` stay."""
    on_cpu = cpu or torch.accelerator.current_accelerator(check_available=True) is None
    return resolve(settings, fused=False) if on_cpu and settings.source("fused")[0] is Source.DEFAULT else settings


def device_of(ranks: Ranks) -> torch.device:
    """The GPU of this rank, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
    return torch.device("cpu")

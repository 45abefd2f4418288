"""Messages and module addresses that the layers share.

A layer warns of options without effect, and says what replaces absent names.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any, ClassVar

import torch

from ..base.accumulation import UpdateWindow
from ..distributed import Ranks
from ..errors import EasympWarning, nearest
from ..protocols import Source
from ..settings import Settings, resolve


class Layer:
    """Messages of the layer that stands for the library `name`, such as ``"Apex"``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.refused_modules: dict[str, str] = {}  # module of the original → what to use instead

    def ignore(self, reasons: Mapping[str, str]) -> None:
        """Warn of options without effect, with the reasons, in one warning."""
        if not reasons:
            return
        options = "; ".join(f"{option} ({reason})" for option, reason in reasons.items())
        warnings.warn(f"{self.name}: without effect here: {options}", EasympWarning, stacklevel=3)

    def absent(self, module: str, instead: Mapping[str, str], public: Callable[[], Sequence[str]]) -> AbsentNames:
        """A ``__getattr__`` for `module`: explains names of the original module that are not among `public`."""
        return AbsentNames(self, module, instead, public)


@dataclass(frozen=True)
class AbsentNames:
    """A module's ``__getattr__``: absent names fail with what to use instead.

    The error is an ImportError, also for attributes: Python replaces the text of an AttributeError in ``from …
    import``.
    """

    layer: Layer
    module: str
    instead: Mapping[str, str]  # name → its replacement
    public: Callable[[], Sequence[str]]

    def __call__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        address, names = f"{self.module}.{name}", list(self.public())
        replacement = self.instead.get(name) or self.layer.refused_modules.get(address)
        hint = f": {replacement}" if replacement else nearest(name, names) or f". Here are {', '.join(names)}"
        raise ImportError(f"{address} is not part of easymp.compat{hint}")


class RefusedModules(MetaPathFinder):
    """Import hook: importing a module that a layer refuses fails with a message that names the replacement."""

    messages: ClassVar[dict[str, str]] = {}  # by the module's full name

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname in self.messages:
            raise ModuleNotFoundError(self.messages[fullname], name=fullname)


sys.meta_path.append(RefusedModules())


def by_name(*functions: Any, **aliases: Any) -> dict[str, Any]:
    """Functions and classes by their names, and `aliases`."""
    return {function.__name__: function for function in functions} | aliases


def submodules(
    package: str, table: Mapping[str, Mapping[str, Any] | ModuleType | str], layer: Layer, original: str
) -> None:
    """Register modules that hold names of `package`, which is `original` in messages, where scripts import them.

    `table` has, by address, the module's names, a module of ours, or a string, which refuses it and all below it. The
    key ``"absent"`` among the names has replacements by name, or is the module's ``__getattr__``.
    """
    for address, entry in table.items():
        parent, _, leaf = f"{package}.{address}".rpartition(".")
        vars(sys.modules[parent]).setdefault("__path__", [])  # a file may have modules below it, too
        if isinstance(entry, str):
            layer.refused_modules[f"{original}.{address}"] = entry
            RefusedModules.messages[f"{parent}.{leaf}"] = f"{original}.{address} is not part of easymp.compat: {entry}"
            continue
        names: dict[str, Any] = (
            dict(entry) if isinstance(entry, Mapping) else {n: vars(entry)[n] for n in entry.__all__}
        )
        instead = names.pop("absent", {})
        public = sorted(names)
        if not callable(instead):
            instead = layer.absent(f"{original}.{address}", instead, public.copy)
        module = ModuleType(f"{parent}.{leaf}", f"``{original}.{address}``.")
        vars(module).update(names, __all__=public, __path__=[], __getattr__=instead)
        sys.modules[module.__name__] = module
        # A function or class of the same name wins: accelerate.utils.tqdm, apex.parallel.LARC.
        vars(sys.modules[parent]).setdefault(leaf, module)


@contextmanager
def saving_between_micro_batches(window: UpdateWindow) -> Iterator[None]:
    """Inside, checkpoints are saved in an unfinished window, too, without its gradients, as the peers do."""
    sync, window.sync = window.sync, True
    try:
        yield
    finally:
        window.sync = sync


def unless_set(settings: Settings, name: str, argument: Any, default: str) -> Any:
    """The value of an argument: `default` where neither the script nor the environment nor a file names one."""
    return default if argument is None and settings.source(name)[0] is Source.DEFAULT else argument


def plain_steps_on_cpu(settings: Settings, cpu: bool) -> Settings:
    """Settings under which optimizers step on CPUs as the peers leave them: torch's fused steps round otherwise."""
    on_cpu = cpu or torch.accelerator.current_accelerator(check_available=True) is None
    return resolve(settings, fused=False) if on_cpu and settings.source("fused")[0] is Source.DEFAULT else settings


def device_of(ranks: Ranks) -> torch.device:
    """The GPU of this rank, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
    return torch.device("cpu")

"""easymp under the name of another package, for scripts and libraries that import that package.

Nothing here imports torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import SettingError

# Package → the version whose interface the layer follows, and the home page.
PACKAGES = {
    "accelerate": ("1.15.0", "https://github.com/huggingface/accelerate"),
    "deepspeed": ("0.19.8", "https://github.com/deepspeedai/DeepSpeed"),
    "lightning": ("2.6.6", "https://github.com/Lightning-AI/pytorch-lightning"),  # its part ``lightning.fabric``
    "lightning_fabric": ("2.6.6", "https://github.com/Lightning-AI/pytorch-lightning"),
}
VERSION = PACKAGES["accelerate"][0]


def import_layer(name: str) -> ModuleType:
    """The module of this package that stands for a module of another."""
    package, _, module = name.replace("lightning.fabric", "lightning_fabric").partition(".")
    layer = "lightning_fabric" if package == "lightning" else package
    return importlib.import_module(".".join(filter(None, (__package__, layer, module))))


class Alias(ModuleType):
    """A module of a layer under its name in the original."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._target = import_layer(name)

    def __getattr__(self, name: str) -> Any:
        """A name of this layer; a refused one can be imported here, and a call of it is the error."""
        try:
            return getattr(self._target, name)
        except ImportError as error:
            instead = getattr(getattr(self._target.__getattr__, "layer", None), "instead", {})
            if name not in instead:
                raise AttributeError(str(error)) from None
            stand_in = importlib.import_module(f"{__package__}.accelerate.plugins").stand_in
            vars(self)[name] = stand_in(f"{self.__name__}.{name}", instead[name])
            return vars(self)[name]


class Package(Distribution):
    """The metadata that libraries look up: name, version and home page."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        version, home_page = PACKAGES[self._name]
        text = f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {version}\nHome-page: {home_page}\n"
        return text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Path:
        return Path(path)


class Finder(DistributionFinder, Loader):
    """Import hook: the package `name` and its submodules become aliases of those in this package."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self._name:
            return None
        try:
            import_layer(fullname)
        except ModuleNotFoundError:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Alias(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: the module is imported."""

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        if context is None or context.name in (None, self._name):
            yield Package(self._name)


def install(name: str = "accelerate") -> None:
    """Give this process easymp under the name of another package, before the first import of a library that uses it.

    Args:
        name: "accelerate", "deepspeed", "lightning" (for ``lightning.fabric``) or "lightning_fabric".

    Raises:
        SettingError: another name.
        RuntimeError: the package itself is imported already.

    Example:
        >>> from easymp.compat import install
        >>> install()
        >>> import accelerate
        >>> accelerate.Accelerator.__module__
        'easymp.compat.accelerate.accelerator'
    """
    if name not in PACKAGES:
        raise SettingError(f"install({name!r}): pass one of {', '.join(PACKAGES)}")
    imported = sys.modules.get(name)
    if isinstance(imported, Alias):
        return
    if imported is not None:
        raise RuntimeError(f"call install({name!r}) before the import of {name}, or `easymp launch --as {name}`")
    sys.meta_path.insert(0, Finder(name))

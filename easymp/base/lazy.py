"""Lazy imports: names and modules that are loaded at first use, so that ``easymp --help`` does not wait for torch."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

Homes = Mapping[str, Sequence[str]]  # file below the package → the names that it has


def at_first_use(
    package: str,
    namespace: dict[str, Any],
    public: Homes,
    inner: Homes | None = None,
    elsewhere: Mapping[str, str] | None = None,
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__all__``, ``__getattr__`` and ``__dir__``. Its `namespace` keeps the loaded values.

    ``__all__`` has the `public` names, and not the `inner` ones for easymp's other packages. A name that ends its
    module's path is the module itself. `elsewhere` has names that users may expect here → the text of the ImportError.
    """
    home = {name: file for homes in (public, inner or {}) for file, names in homes.items() for name in names}
    listed = sorted(name for names in public.values() for name in names)

    def load(name: str) -> Any:
        if elsewhere and name in elsewhere:
            raise ImportError(f"{package} has no {name!r}: {elsewhere[name]}")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = imported(f".{home[name]}", package)
        value = namespace[name] = module if f".{home[name]}".endswith(f".{name}") else getattr(module, name)
        return value

    return listed, load, lambda: listed


def modules_at_first_use(namespace: dict[str, Any], *files: str, **renamed: str) -> None:
    """Define lazy modules in the caller's ``globals()``. The first access to an attribute of one loads all of them.

    `files` have their own names, and `renamed` ones another: ``planning="plan"``. The caller imports the same modules
    under TYPE_CHECKING, for type checkers and for the check of the layers.
    """
    home = dict(zip(files, files)) | renamed

    def load(name: str) -> Any:
        modules = _import_modules([f".{file}" for file in home.values()], namespace["__package__"])
        namespace.update(zip(home, modules))
        return namespace[name]

    namespace.update({name: _LazyModule(name, load) for name in home})


class _LazyModule(ModuleType):
    """Stands for a module until an attribute of it is asked for."""

    def __init__(self, name: str, load: Callable[[str], Any]) -> None:
        super().__init__(name)
        self._load = load

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._load(self.__name__), attribute)


def imported(file: str, package: str) -> Any:
    """A module of ours."""
    return _import_modules([file], package)[0]


def _import_modules(files: Sequence[str], package: str) -> list[Any]:
    """Import modules with the garbage collector off, since a collection would traverse all of torch's objects."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return [importlib.import_module(file, package) for file in files]
    finally:
        if collects:
            gc.enable()

"""The public names of a package ``accelerate``, with their signatures: of Accelerate itself, or of what stands under its name.

``python -m tests.compat.accelerate_names`` prints the names of the Accelerate that is installed, in the form of `accelerate_names.toml`: a
section for each module and class, and in it name → signature.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import types
from pathlib import Path
from typing import Any

import torch

MODULES = (
    "accelerate accelerate.utils accelerate.state accelerate.data_loader accelerate.optimizer accelerate.scheduler accelerate.tracking "
    "accelerate.logging accelerate.local_sgd accelerate.launchers accelerate.big_modeling accelerate.hooks"
).split()
CLASSES = """accelerate.Accelerator accelerate.PartialState accelerate.state.AcceleratorState accelerate.state.GradientState
    accelerate.AutocastKwargs accelerate.DataLoaderConfiguration accelerate.DistributedDataParallelKwargs
    accelerate.FullyShardedDataParallelPlugin accelerate.GradScalerKwargs accelerate.InitProcessGroupKwargs accelerate.ProfileKwargs
    accelerate.DDPCommunicationHookType accelerate.DistributedType accelerate.utils.GradientAccumulationPlugin
    accelerate.utils.ProjectConfiguration accelerate.utils.TorchDynamoPlugin accelerate.utils.KwargsHandler accelerate.utils.LoggerType
    accelerate.utils.PrecisionType accelerate.utils.RNGType accelerate.utils.DynamoBackend accelerate.data_loader.DataLoaderShard
    accelerate.data_loader.DataLoaderDispatcher accelerate.optimizer.AcceleratedOptimizer accelerate.scheduler.AcceleratedScheduler
    accelerate.tracking.GeneralTracker accelerate.logging.MultiProcessAdapter accelerate.local_sgd.LocalSGD""".split()
TORCHS = {*dir(torch.optim.Optimizer), *dir(torch.utils.data.DataLoader)}


def signature(value: Any) -> str:
    """In words that are the same in every process; ``"property"`` and ``"value"`` for what has none."""
    if isinstance(value, property):
        return "property"
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return "value"
    words, keywords = [], False
    for parameter in found.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            words.append("*")
        keywords |= mark == "*" or parameter.kind is parameter.KEYWORD_ONLY
        default = "" if parameter.default is parameter.empty else f"={shown(parameter.default)}"
        words.append(f"{mark}{parameter.name}{default}")
    return f"({', '.join(words)})"


def shown(value: Any) -> str:
    plain = value.value if isinstance(value, enum.Enum) else value
    return (
        "…"
        if callable(plain) or type(plain) is object
        else re.sub(r" at 0x\w+", "", repr(plain)).replace(str(Path.home()), "~")
    )


def find(address: str) -> Any:
    """The module or class at an address."""
    try:
        return importlib.import_module(address)
    except ModuleNotFoundError:
        module, _, name = address.rpartition(".")
        return getattr(importlib.import_module(module), name)


def parts(words: str) -> list[str]:
    """The parameters in a signature."""
    found, depth = [""], 0
    for letter in words[1:-1]:
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [part.strip() for part in found if part.strip()]


def difference(ours: str, theirs: str) -> str:
    """What of a call written for `theirs` means another thing to `ours`, or does not fit; "" where nothing does."""
    if ours == theirs or not (ours.startswith("(") and theirs.startswith("(")):
        return ""
    here, there = parts(ours), parts(theirs)
    rest = any(part.startswith("**") for part in here)
    if rest and here[0].startswith("*") and here[0] != "*":
        return ""  # it takes anything
    named = {part.partition("=")[0]: part for part in here}
    found = []
    for i, part in enumerate(there):
        name = part.partition("=")[0]
        fits = part in here and (
            here[i : i + 1] == [part] or i >= len(here) or here.index(part) > i or "*" in there
        )
        if not fits and not name.startswith("**") and not (name not in named and rest):
            found.append(
                f"{part} is {named[name]}"
                if name in named and named[name] != part
                else f"{part} has another place"
                if name in named
                else f"no {part}"
            )
    return "; ".join(found)


def of_module(address: str) -> dict[str, str]:
    module, found = find(address), {}
    for name in dir(module):
        value = getattr(module, name)
        own = str(getattr(value, "__module__", ""))
        if (
            name.startswith("_")
            or isinstance(value, types.ModuleType)
            or not (callable(value) or name.isupper())
        ):
            continue
        wide = address in ("accelerate", "accelerate.utils")
        if (callable(value) or not wide) and not (own.startswith("accelerate") if wide else own == address):
            continue
        found[name] = signature(value)
    return found


def of_class(address: str) -> dict[str, str]:
    kind, found = find(address), {}
    if issubclass(kind, enum.Enum):
        return {member.name: repr(member.value) for member in kind}
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "accelerate":
            for name, value in vars(base).items():
                if not name.startswith("_") and name not in TORCHS:
                    found.setdefault(name, signature(value))
    return found


def table() -> dict[str, dict[str, str]]:
    """All of it, from the package ``accelerate`` of this process."""
    return {
        **{address: of_module(address) for address in MODULES},
        **{address: of_class(address) for address in CLASSES},
    }


if __name__ == "__main__":
    for section, names in table().items():
        print(f'["{section}"]')
        for name, words in sorted(names.items()):
            print(f"{name} = '''{words}'''")

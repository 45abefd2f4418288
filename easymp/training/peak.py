"""The largest tensors of a moment: where they were made, and the word that would remove each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as modules

from ..protocols import Strategy
from ..strategies.blocks import find_repeated

ROWS = 10
LOSSES = ("log_softmax", "nll_loss", "cross_entropy")  # in names of operations whose tensors have a column a class


@dataclass(slots=True)
class Storage:
    """The storage of a tensor, and where it was made.

    Attributes:
        size: bytes.
        kind: "activations", or as it was named later: "weights", "gradients", "states" …
        shape, dtype: of the tensor that had it first.
        operation: torch's name of what made it.
        name: the module that made it, or the parameter that it is of.
        line: of the script, as ``train.py:12``.
        forward: whether it was made in a forward.
    """

    size: int
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    operation: str = ""
    name: str = ""
    line: str = ""
    forward: bool = True


class Places:
    """Names the module and the line that run; in backward, those of the forward's operation, by autograd's numbers.

    Args:
        script: the path of the script, of which lines are told.
    """

    def __init__(self, script: str = "") -> None:
        self._script = script
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._blocks: set[str] = set()
        self._running: list[nn.Module] = []
        self._by_number: dict[int, tuple[str, str]] = {}
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        self._undo = [
            modules.register_module_forward_pre_hook(self._begin).remove,
            modules.register_module_forward_hook(self._end, always_call=True).remove,
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for remove in self._undo:
            remove()

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._running.append(module)

    def _end(self, *_: Any) -> None:
        self._running.pop()

    def name_modules(self, models: Iterable[nn.Module]) -> None:
        """Take the names of the modules in `models`."""
        for model in models:
            self._names.update({module: name or type(model).__name__ for name, module in model.named_modules()})
            self._blocks |= {self._names[block] for block in find_repeated(model) if block in self._names}

    def line(self) -> str:
        """The line of the script that runs; "" outside of it."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self._script:
            frame = frame.f_back
        return f"{Path(self._script).name}:{frame.f_lineno}" if frame is not None else ""

    def here(self) -> tuple[str, str, bool]:
        """The module and the line, and whether a forward runs. Called for each operation of a forward."""
        node = torch._C._current_autograd_node()
        if node is not None and not self._running:
            return (*self._by_number.get(node._sequence_nr(), ("", "")), False)
        name = next((self._names[m] for m in reversed(self._running) if m in self._names), "")
        origin = name, self.line()
        if node is None:  # else a block is computed again
            # The node of this operation has been made already. Later operations without a node have the same number.
            self._by_number.setdefault(torch.autograd._get_sequence_nr() - 1, origin)
        return (*origin, node is None)

    def in_block(self, name: str) -> bool:
        """Whether a module lies in one of the repeated blocks."""
        return any(name == block or name.startswith(f"{block}.") for block in self._blocks)

    def clear(self) -> None:
        """Forget the operations of an update."""
        self._by_number.clear()


def remedy(
    storage: Storage, in_block: bool, in_force: Collection[str], world: int, strategy: type[Strategy]
) -> tuple[str, int]:
    """The word that removes a tensor from the peak, and the bytes that it saves; ("", 0) where there is none.

    Args:
        in_force: names of options that are in force.
        world: ranks that could share it.
        strategy: by which they train.
    """
    spread = 0 if strategy.sharded else storage.size - storage.size // world
    if storage.kind == "weights" and spread:
        return "strategy='fsdp'", spread
    if storage.kind == "states" and spread and not strategy.spreads_states:
        return "strategy='zero1'", spread
    if storage.kind == "gradients" and "optimizer_in_backward" not in in_force:
        return ("strategy='fsdp'", spread) if spread else ("optimizer_in_backward=True", storage.size)
    is_copy = storage.operation.startswith("_to_copy")  # autocast's, of a weight
    if storage.kind != "activations" or is_copy or "activation_offload" in in_force:
        return "", 0
    if any(name in storage.operation for name in LOSSES):
        return "easymp.nn.linear_cross_entropy", storage.size
    if in_block and storage.forward and "activation_checkpointing" not in in_force:
        return "activation_checkpointing='blocks'", storage.size
    return ("activation_offload=True", storage.size) if storage.forward else ("", 0)


def largest(
    storages: Iterable[Storage],
    places: Places,
    in_force: Collection[str] = (),
    world: int = 1,
    strategy: type[Strategy] = Strategy,
) -> list[dict[str, Any]]:
    """The ten largest storages, each with its `remedy`, in JSON's types."""
    rows = []
    for storage in sorted(storages, key=lambda storage: -storage.size)[:ROWS]:
        word, saved = remedy(storage, places.in_block(storage.name), in_force, world, strategy)
        facts = {"bytes": storage.size, "kind": storage.kind, "shape": list(storage.shape), "dtype": storage.dtype}
        rows.append({**facts, "of": storage.name, "line": storage.line, "remedy": word, "saves": saved})
    return rows


def cells(rows: Iterable[dict[str, Any]], size: Callable[[int], str]) -> list[list[str]]:
    """The rows of a table for `largest`."""
    table = [["bytes", "kind", "shape", "of", "line", "without it"]]
    for row in rows:
        shape = f"{row['dtype']}[{', '.join(map(str, row['shape']))}]" if row["dtype"] else ""
        saves = f"{row['remedy']} saves {size(row['saves'])}" if row["remedy"] else ""
        table.append([size(row["bytes"]), row["kind"], shape, row["of"], row["line"], saves])
    return table

"""What becomes of activations between forward and backward: recomputed as memory needs it, or kept on the host."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..base.parts import Part
from ..base.units import size
from ..errors import BatchError
from ..logging import get_logger
from ..protocols import Conflict
from ..settings import read_record
from ..strategies.transforms import Offload, Recompute, find_recomputed, read_which, recompute
from ..training.activations import count_activations

if TYPE_CHECKING:
    from ..settings import Settings
    from ..training.wrapper import Route

logger = get_logger(__name__)
OFFLOAD, BY_SIZE = "activation_offload", "activation_checkpointing by size"
ATTENTION, BLOCKS = "activation_checkpointing=attention", "Use activation_checkpointing='blocks'"


class Recomputation(Part):
    """Recomputes modules in backward: all that were asked for, or as many blocks as a rank needs to stay below a size.

    Their number is decided in a model's first training forward.
    """

    name = "activation_checkpointing"
    conflicts = (
        *(
            Conflict(BY_SIZE, strategy, "the activations of a rank are not those of the whole model", BLOCKS)
            for strategy in ("pipeline", "data_parallel on several devices")
        ),
        Conflict(
            ATTENTION, "create_graph=True", "torch's selective recomputation has no gradient of a gradient", BLOCKS
        ),
    )

    def __init__(self, recomputed: Recompute) -> None:
        self._recomputed = recomputed
        self._used = 0  # bytes of models that are prepared, and of their activations as far as these are known
        # By id of a model whose first forward has not come: the model on the meta device, as it was before it was
        # wrapped, and its parts that may be recomputed.
        self._uncounted: dict[int, tuple[nn.Module, Sequence[nn.Module]]] = {}
        self._removals: list[Callable[[], object]] = []

    @classmethod
    def wanted(cls, settings: Settings) -> Recomputation | None:
        recomputed = read_record(settings, "activation_checkpointing", read_which)
        return None if recomputed is None else cls(recomputed)

    def preparing(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if self._recomputed.below is None:
            self._recompute(find_recomputed(models, self._recomputed))
            return
        for model in models:
            parts = find_recomputed([model], self._recomputed)
            tensors = [*model.parameters(), *model.buffers()]
            self._uncounted[id(model)] = copy.deepcopy(model, {id(t): on_meta(t) for t in tensors}), parts
            self._used += self.run.prepared.memory_need([model], optimizers).total

    def _recompute(self, parts: Sequence[nn.Module]) -> None:
        selective = self._recomputed.selective
        self._removals.append(recompute(parts, selective))
        kept = "inputs, matrix products and attention" if selective else "inputs only"
        self.run.refine("activations", f"{len(parts)} parts keep their {kept} (`easymp estimate --input` counts bytes)")

    def forward(self, model: Route, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        uncounted = self._uncounted.pop(id(model.original), None)
        if uncounted is None:
            return
        shapes, parts = uncounted
        limit = self._recomputed.below or 0
        try:
            precision = self.run.precision
            count = count_activations(shapes, precision, (args, kwargs), self._recomputed, limit - self._used)
        except BatchError as error:
            cause = str(error).split(": check the sample")[0]
            raise BatchError(
                f"{cause}, so activation_checkpointing cannot count blocks for {size(limit)}: use "
                "activation_checkpointing='blocks'"
            ) from error
        self._used += count.bytes
        self._removals.append(recompute(parts[: count.blocks]))
        reason = f"{count}, {size(self._used)} a rank of {size(limit)}"
        if self._used > limit:
            reason += ": too much, so use a smaller batch, or a strategy that shards the model"
        (logger.warning if self._used > limit else logger.info)("activations: %s", reason)
        self.run.refine("activations", reason)

    def released(self) -> None:
        self._used = 0
        self._uncounted.clear()
        while self._removals:
            self._removals.pop()()


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor of the same form without memory."""
    shape = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(shape, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shape


class ActivationOffload(Part):
    """Keeps what forward saves for backward in pinned host memory. CUDA only."""

    name = OFFLOAD
    conflicts = tuple(
        Conflict(OFFLOAD, other, reason, remedy)
        for other, reason, remedy in (
            ("pipeline", "it runs forward and backward of its micro-batches in one call", "Use strategy='fsdp'"),
            (
                "tensor_parallel",
                "it keeps activations as DTensors, which hooks of autograd do not copy",
                "Use strategy='fsdp'",
            ),
            (
                "data_parallel on several devices",
                "it runs copies of the model in threads, whose activations its hooks do not see",
                "Use strategy='ddp'",
            ),
            (ATTENTION, "torch keeps the products of selective checkpointing where no hook copies them", BLOCKS),
            (BY_SIZE, "a size counts activations on the device", BLOCKS),
            (
                "compile with CUDA graphs",
                "CUDA graphs keep activations in memory of their own",
                "Use another mode of torch.compile, or leave activation_offload out",
            ),
        )
    )

    def begin(self) -> None:
        self._offload = Offload(self.run.world.device)

    def prepared(self, objects: Sequence[Any]) -> None:
        if self.run.prepared.routes_of(objects):
            recomputed = self.run.plan.settings.activation_checkpointing not in (None, "no")
            reason = f"{self.run.plan.activations.reason}; " if recomputed else ""
            self.run.refine("activations", f"{reason}what forward keeps is in pinned host memory until backward")

    def forward(self, model: Route, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Offload:
        return self._offload

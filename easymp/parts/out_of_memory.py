"""What fills a CUDA device that runs out of memory: the ten largest tensors, in the log, before torch's error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..base.dtensor import local
from ..base.parts import Part
from ..base.units import columns, size
from ..conflicts import words_of
from ..distributed.mailbox import is_script
from ..logging import get_logger
from ..training.peak import Places, Storage, cells, largest
from ..training.state import accelerators

logger = get_logger(__name__)
HISTORY = "torch.cuda.memory._record_memory_history() at the start of the script adds the lines that made them"


class OutOfMemory(Part):
    """Logs the largest tensors of a CUDA device that runs out of memory."""

    name = "out_of_memory"
    is_attached: ClassVar[bool] = False  # torch takes an observer for good

    def begin(self) -> None:
        if self.run.world.device.type == "cuda" and not OutOfMemory.is_attached:
            OutOfMemory.is_attached = True
            torch._C._cuda_attach_out_of_memory_observer(observe)  # type: ignore[attr-defined]  # torch's stub lacks it
        self.run.parts.remove(self)


def observe(device: int, *sizes: int) -> None:
    """Log the largest tensors on a device; torch calls it with the sizes of the request and of the device."""
    for run in (accelerator._run for accelerator in accelerators()):
        if run.world.device.index == device:
            blocks = blocks_of(torch.cuda.memory._snapshot(), device, named_tensors(run.prepared))
            places = Places()
            places.name_modules(model.original for model in run.prepared.models)
            in_force, strategy = words_of(run.plan.settings), type(run.prepared.strategy)
            table = "\n".join(columns(cells(largest(blocks, places, in_force, run.world.size, strategy), size), 6))
            logger.error("cuda:%d is out of memory. Its largest tensors:\n%s\n%s", device, table, HISTORY)


def named_tensors(prepared: Any) -> Iterator[tuple[str, str, Tensor]]:
    """Kind and name of each tensor that stays from step to step."""
    names: dict[int, str] = {}
    for model in prepared.models:
        for name, parameter in model.original.named_parameters():
            names[id(parameter)] = name
            yield "weights", name, parameter
            if parameter.grad is not None:
                yield "gradients", name, parameter.grad
        yield from (("buffers", name, buffer) for name, buffer in model.original.named_buffers())
    for optimizer in prepared.optimizers:
        for parameter, state in optimizer.state.items():
            name = names.get(id(parameter), "a parameter")
            yield from (("states", f"{key} of {name}", t) for key, t in state.items() if isinstance(t, Tensor))


def blocks_of(
    snapshot: Mapping[str, Any], device: int, tensors: Iterable[tuple[str, str, Tensor]]
) -> Iterator[Storage]:
    """The blocks in use of a snapshot by `torch.cuda.memory._snapshot`: tensors by their addresses, and activations."""
    by_address = {
        local(tensor).untyped_storage().data_ptr(): (kind, name, tensor)
        for kind, name, tensor in tensors
        if tensor.layout == torch.strided
    }
    for segment in snapshot["segments"]:
        for block in segment["blocks"] if segment["device"] == device else ():
            if block["state"] == "active_allocated":
                kind, name, tensor = by_address.get(block["address"], ("activations", "", None))
                frames = (f"{f['filename']}:{f['line']}" for f in block.get("frames", ()) if is_script(f["filename"]))
                storage = Storage(block["size"], kind, name=name, line=next(frames, ""))
                if tensor is not None:
                    storage.shape, storage.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
                yield storage

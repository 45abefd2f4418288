"""The part of a tensor that lies on this rank."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import PrepareError, StepError
from .pytree import send_to_device


def local(tensor: Tensor) -> Tensor:
    """The shard of a DTensor, sharing its memory; any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)  # importing DTensor, to ask for the class, is slow
    if to_local is None:
        return tensor
    shard: Tensor = to_local()
    # An AsyncCollectiveTensor has no memory until it is waited for.
    return shard.trigger_wait() if hasattr(shard, "trigger_wait") else shard


def parts(tensors: list[Tensor]) -> list[Tensor]:
    """`local` of each tensor, faster, for lists that are read at each step."""
    return tensors if _PLAIN.issuperset(map(type, tensors)) else [_part(tensor) for tensor in tensors]


_PLAIN = {Tensor, torch.nn.Parameter}


def _part(tensor: Tensor) -> Tensor:
    # The result of `to_local` without autograd's view: a private attribute, which takes 10 ns and not microseconds.
    shard = getattr(tensor, "_local_tensor", None)
    return shard if type(shard) is Tensor else local(tensor)


def settle(parameter: Any) -> None:
    """Give a parameter's gradient the parameter's layout, where it has another (partial sums, whole). A collective."""
    grad = parameter.grad
    if hasattr(grad, "to_local") and grad.placements != getattr(parameter, "placements", grad.placements):
        parameter.grad = grad.redistribute(placements=parameter.placements)


def add_up(tensors: Sequence[Tensor], totals: Tensor) -> None:
    """Add up `totals` over the ranks, in place: row i holds sums over this rank's part of ``tensors[i]``.

    Sharded DTensors take one collective for each mesh dimension, for all rows at once; other tensors take none.
    """
    rows_by_mesh_dim: dict[tuple[Any, int], list[int]] = {}
    for row, tensor in enumerate(tensors):
        for dim, placement in enumerate(getattr(tensor, "placements", ())):
            if not placement.is_replicate():  # torch's _StridedShard is none of its Shards in all versions
                rows_by_mesh_dim.setdefault((tensor.device_mesh, dim), []).append(row)  # type: ignore[attr-defined]
    for (mesh, dim), rows in rows_by_mesh_dim.items():
        if len(rows) == len(totals):
            torch.distributed.all_reduce(totals, group=mesh.get_group(dim))
            continue
        parts_of_sums = [totals[row] for row in rows]  # a list as an index would be copied to the device, which waits
        sums = torch.stack(parts_of_sums)
        torch.distributed.all_reduce(sums, group=mesh.get_group(dim))
        torch._foreach_copy_(parts_of_sums, list(sums.unbind()))


def meshes(tensors: Iterable[Tensor]) -> list[Any]:
    """The device meshes of the DTensors among `tensors`."""
    return list(dict.fromkeys(t.device_mesh for t in tensors if hasattr(t, "to_local")))  # type: ignore[attr-defined]


def dense(tensor: Tensor) -> bool:
    """Whether `tensor` fills one block of memory without gaps or repeats, with its dimensions in any order."""
    if tensor.is_contiguous() or not tensor.numel():
        return True
    end = 1
    for stride, count in sorted((s, c) for s, c in zip(tensor.stride(), tensor.shape) if c > 1):
        if stride != end:
            return False
        end *= count
    return True


def lacks_operation(error: RuntimeError) -> bool:
    """Whether torch says by `error` that DTensors do not have an operation, or not with these arguments."""
    phrases = ("dtensor", "sharding strategy", "sharding propagation", "placement changes", "sharded dimension")
    return not isinstance(error, StepError) and any(phrase in str(error).lower() for phrase in phrases)


class ShardRecord(NamedTuple):
    """A DTensor, with the identity of its memory and of its shard when they were last compared."""

    name: str
    parameter: Any
    storage: int
    shard: weakref.ref[Tensor]


class ShardMemory:
    """Notices that ``p.data = value`` gave a DTensor of `model` other memory, which its shard does not share."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.note()

    def note(self) -> None:
        """Take the parameters as they are."""
        self._records = [
            ShardRecord(name, parameter, parameter.untyped_storage()._cdata, weakref.ref(parameter._local_tensor))
            for name, parameter in self._model.named_parameters()
            if hasattr(parameter, "_local_tensor")
        ]

    def check(self) -> None:
        """StepError where the values were given since."""
        moved = False
        for name, parameter, storage, shard in self._records:
            if parameter.untyped_storage()._cdata == storage:
                continue
            if parameter._local_tensor is shard():
                raise StepError(
                    f"parameter {name!r} was given values by p.data = ..., as torch.nn.utils.vector_to_parameters "
                    "does, and they do not reach its shard: write into it under torch.no_grad(), by p.copy_(value) of "
                    "another shard, or p.copy_(torch.distributed.tensor.distribute_tensor(value, p.device_mesh, "
                    "p.placements)) of a whole value"
                )
            moved = True  # by model.to(), which exchanges the shard, too
        if moved:
            self.note()


# -- Optimizers after their parameters were replaced, or moved to another device.


def names_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, str]:
    """Map ids of `model`'s parameters to names, before parameters are replaced. A tied parameter has its first name."""
    names = {id(p): name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if state and id(parameter) in names:
                raise PrepareError(
                    f"{type(optimizer).__name__} has state for parameter {names[id(parameter)]!r}, which is about to "
                    "be replaced by its shard: prepare the optimizer before its first step; one that makes state as "
                    "it is built, such as Adagrad, is built from the prepared model's parameters: "
                    "model = acc.prepare(model) first"
                )
    return names


def rebind(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]) -> None:
    """Replace the parameters of `names` in `optimizers` by `model`'s new ones; in place, as LBFGS keeps its list."""
    parameters = dict(model.named_parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for i, parameter in enumerate(group["params"]):
                if id(parameter) in names:
                    new = parameters[names[id(parameter)]]
                    if parameter in optimizer.state:  # an empty entry, that looking it up has made
                        optimizer.state[new] = optimizer.state.pop(parameter)
                    group["params"][i] = new


def follow(optimizer: torch.optim.Optimizer, raised: Mapping[int, torch.dtype]) -> None:
    """Move the state of `optimizer` to the devices of its parameters, which may have moved since a step or a load.

    As in torch's `load_state_dict`, step counters stay on the CPU unless the optimizer is fused or capturable. `raised`
    maps ids of parameters that have become fp32 to their dtypes before: states of that dtype become fp32, too.
    """
    for group in optimizer.param_groups:
        on_device = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            if parameter not in optimizer.state:
                continue
            state = optimizer.state[parameter]
            before = raised.get(id(parameter))
            for key, value in state.items():
                if before is not None and isinstance(value, Tensor) and value.dtype == before and value.ndim:
                    state[key] = value = value.float()
                if key != "step" or on_device:
                    state[key] = send_to_device(value, parameter.device)

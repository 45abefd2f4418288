"""`Fabric.save` and `load`: one file of torch.save or safetensors with whole states, also where weights are shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ...accelerator import Accelerator
from ...base.pytree import map_leaves
from ...checkpoint.export import get_state_dict, read_object, write_object
from ...checkpoint.ranks import run_on_rank_0
from ...checkpoint.weights import in_memory, load_source, open_source
from ...errors import SettingError
from ...optim.torch_step import parameters_of

StrPath = str | os.PathLike[str]
Filter = Mapping[str, Callable[[str, Any], bool]]


class Checkpoints:
    """`save`, `load` and `load_raw` of a Fabric."""

    @property
    def easymp(self) -> Accelerator:
        raise NotImplementedError

    def save(self, path: StrPath, state: Mapping[str, Any], filter: Filter | None = None) -> None:
        """Save models, optimizers, other objects with a state_dict, and values by name; all ranks call it."""
        _check_state(state)
        filter = {} if filter is None else filter
        if not isinstance(filter, Mapping):
            raise TypeError(f"Filter should be a dictionary, given {filter!r}")
        if unknown := set(filter) - set(state):
            raise ValueError(f"The filter keys {sorted(unknown)} are not present in the state keys {sorted(state)}")
        for key, predicate in filter.items():
            if not callable(predicate):
                raise TypeError(f"Expected `filter` of save for key {key!r} to be a callable, given {predicate!r}")
        contents = {key: self._whole_state(item) for key, item in state.items()}
        for key, predicate in filter.items():
            contents[key] = {name: value for name, value in contents[key].items() if predicate(name, value)}
        run_on_rank_0(self.easymp._world, lambda: write_object(contents, Path(path)))

    def load(
        self, path: StrPath, state: dict[str, Any] | None = None, strict: bool = True, *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Load what `save` wrote into `state`; returns the values that it does not name. All ranks call it."""
        state = {} if state is None else state
        _check_state(state)
        contents = _read(path)
        for key, item in state.items():
            if key not in contents and strict:
                raise KeyError(f"{os.fspath(path)} has no {key!r}: it has {', '.join(contents)}")
            if key not in contents:
                continue
            value = contents.pop(key)
            if isinstance(item, nn.Module) and self._is_sharded(item):
                load_source(item, in_memory("this checkpoint", value), strict=strict, dtype="live")
            elif isinstance(item, nn.Module):
                item.load_state_dict(value, strict=strict)
            elif _is_stateful(item):
                item.load_state_dict(_as_shards(value, item) if isinstance(item, Optimizer) else value)
            else:
                state[key] = value
        return contents

    def load_raw(
        self, path: StrPath, obj: nn.Module | Optimizer, strict: bool = True, *, weights_only: bool | None = None
    ) -> None:
        """Load weights of safetensors, a checkpoint, or a plain state dict of torch.save into a model."""
        if isinstance(obj, nn.Module):
            load_source(obj, open_source(path, trust=True), strict=strict, dtype="live")
        else:
            obj.load_state_dict(_as_shards(_read(path), obj))

    def _is_sharded(self, item: Any) -> bool:
        return isinstance(item, nn.Module) and self.easymp._sharded and hasattr(type(item), "_easymp_route")

    def _whole_state(self, item: Any) -> Any:
        """The state dict of an object that has one, with whole tensors, else the object."""
        if not _is_stateful(item):
            return item
        if self._is_sharded(item):
            return get_state_dict(self.easymp._world, item)

        def whole(leaf: Any) -> Any:
            full_tensor = getattr(leaf, "full_tensor", None)
            if full_tensor is None:
                return leaf
            tensor = full_tensor()  # a collective
            return tensor.cpu() if self.easymp.is_main_process else None

        return map_leaves(whole, item.state_dict()) if isinstance(item, Optimizer) else item.state_dict()


def _check_state(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise SettingError(f"state is a {type(state).__name__}: pass a dict, as in {{'model': model}}")


def _is_stateful(item: Any) -> bool:
    """Whether `save` keeps an object by its state dict: a scheduler, a metric, a model."""
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))


def _as_shards(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's `state` with tensors that are sharded as its parameters are."""
    indices = [index for group in state["param_groups"] for index in group["params"]]
    by_index = dict(state["state"])
    for index, parameter in zip(indices, parameters_of(optimizer)):
        if index in by_index and isinstance(parameter, DTensor):
            by_index[index] = {
                name: distribute_tensor(value, parameter.device_mesh, parameter.placements)
                if isinstance(value, Tensor) and value.shape == parameter.shape
                else value
                for name, value in by_index[index].items()
            }
    return {**state, "state": by_index}


def _read(path: StrPath) -> dict[str, Any]:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no file {os.fspath(path)}")
    return dict(read_object(Path(path)))

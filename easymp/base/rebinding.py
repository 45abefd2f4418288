"""Point optimizers at parameters that took others' places, by name; and let what they remember follow parameters to another device.

Names are taken before anything is replaced (`names_of`), since wrapping may add prefixes, and ids of what is gone mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PrepareError


def names_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, str]:
    """id of each parameter of `model` → its name, to be taken before parameters are replaced; a tied one has its first name.

    Raises:
        PrepareError: an optimizer has stepped already on one of them: what it remembers would belong to nothing.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if state and id(parameter) in names:
                raise PrepareError(
                    f"{type(optimizer).__name__} has state for parameter {names[id(parameter)]!r}, which is about to be replaced by its "
                    "shard: prepare the optimizer before its first step, or build a new one"
                )
    return names


def rebind(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]) -> None:
    """Put `model`'s parameters of now where `optimizers` hold those of `names`. Others' parameters stay.

    Lists of parameters are changed in place, for some optimizers (LBFGS) keep a second reference to them.
    """
    now = dict(model.named_parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            held: list[Tensor] = group["params"]
            for i, parameter in enumerate(held):
                if id(parameter) in names:
                    new = now[names[id(parameter)]]
                    if parameter in optimizer.state:  # an empty entry, that looking it up has made
                        optimizer.state[new] = optimizer.state.pop(parameter)
                    held[i] = new


def follow(optimizer: torch.optim.Optimizer, raised: Mapping[int, torch.dtype]) -> None:
    """Put what `optimizer` remembers of each parameter where that one is now: it may have stepped, or loaded a state, before it moved.

    Counters stay on the CPU where torch's plain step wants them: as in torch's own `load_state_dict`, unless it is fused or capturable.

    Args:
        raised: id of a parameter that has become fp32 → what it was. States of that dtype become fp32, too.
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
                    state[key] = _at(value, parameter.device)


def _at(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)  # itself, where it is there
    if type(value) in (list, tuple):
        return type(value)(_at(item, device) for item in value)
    return {key: _at(item, device) for key, item in value.items()} if type(value) is dict else value

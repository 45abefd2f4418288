"""``deepspeed.zero``: where scripts build and look at sharded models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...errors import RefusedError
from .layer import layer

__all__ = ["GatheredParameters", "Init"]
__getattr__ = layer.absent(
    "deepspeed.zero",
    {
        "register_external_parameter": "leave it out: FSDP gathers the parameters of whole modules",
        "TiledLinear": "use torch.nn.Linear",
    },
    lambda: __all__,
)


@contextmanager
def Init(*args: Any, **kwargs: Any) -> Iterator[None]:
    """The model is built whole, as without it; `initialize` shards it. (To build on the meta device, use torch.device("meta") and
    Accelerator(initialize=…).)"""
    layer.ignore({"zero.Init": "the model is built whole, and sharded by initialize"})
    yield


@contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Inside, parameters are whole: where they are, as before `initialize` and up to stage 1.

    Raises:
        RefusedError: a parameter is a shard; read it by ``parameter.full_tensor()``, or all by ``engine.accelerator.get_state_dict``.
    """
    chosen = [params] if isinstance(params, torch.Tensor) else list(params)
    if enabled and any(hasattr(p, "full_tensor") for p in chosen):
        raise RefusedError(
            "zero.GatheredParameters of sharded parameters: read them by parameter.full_tensor() on all ranks, and change them before "
            "initialize()"
        )
    yield

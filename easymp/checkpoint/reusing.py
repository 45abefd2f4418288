"""Which tensors of an optimizer a load reads into, rather than put new ones in their place: the state then lies in memory once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..base.dtensor import local
from .boxes import Box
from .fitting import once
from .places import place_of

Parts = list[tuple[Box, Tensor]]


class Reused:
    """The tensors that were chosen; none is chosen twice, nor one that lies where a tensor of `others` does."""

    def __init__(self, others: Iterable[Tensor]) -> None:
        self._taken = {local(t).data_ptr() for t in others}

    def parts(self, live: Any, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Parts | None:
        """Those of `live`, if it is what a new state of this shape and dtype would be, for a parameter that lies as `like` does."""
        if not isinstance(live, Tensor) or (tuple(live.shape), live.dtype, live.device) != (
            shape,
            dtype,
            like.device,
        ):
            return None
        spread = [(getattr(t, "device_mesh", None), getattr(t, "placements", None)) for t in (live, like)]
        if spread[0] != (spread[1] if shape == tuple(like.shape) else (None, None)):
            return None
        memory = local(live)
        if (
            type(memory) is not Tensor
            or memory.requires_grad
            or memory.layout is not torch.strided
            or memory.is_inference()
        ):
            return None
        place = place_of(live)
        if (
            place is None
            or memory.data_ptr() in self._taken
            or any(once(box, part)[0] != box for box, part in place.parts)
        ):
            return None
        if memory.numel():
            self._taken.add(memory.data_ptr())
        return list(place.parts)

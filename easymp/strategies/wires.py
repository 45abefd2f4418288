"""What travels between neighbouring pipeline stages: tensors, gradients the other way, and now and then a word about their form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import World


class Form:
    """Shape and dtype of a tensor that travels, and whether a gradient comes back for it. No dataclass: in a nested batch it is a leaf."""

    __slots__ = ("dtype", "grad", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, grad: bool) -> None:
        self.shape, self.dtype, self.grad = shape, dtype, grad

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and repr(self) == repr(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)}{' with gradient' if self.grad else ''}"


class Wires:
    """Sends to the next stage and receives from the one before, or the other way round for gradients.

    Tensors travel as bytes, for not every backend knows every dtype.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._up: Any = None  # on devices, gradients have connections of their own: what waits for one does not stop the other
        self._going: list[tuple[Any, Tensor]] = []  # kept until it is gone

    def connect(self) -> None:
        """A collective, before anything is sent."""
        if self._world.device.type != "cpu":
            self._up = self._world.group(range(self._world.size))

    def send(self, tensors: Sequence[Tensor], step: int) -> None:
        """To the stage `step` (1 or -1) from here, without waiting."""
        self._going = [(work, data) for work, data in self._going if not work.is_completed()]
        with self._world.explained(f"sending to rank {self._world.rank + step}"):
            for tensor in tensors:
                if tensor.numel():
                    data = _bytes(tensor.detach().contiguous())
                    work = dist.isend(data, self._world.rank + step, group=self._up if step < 0 else None)
                    self._going.append((work, data))

    def receive(self, forms: Sequence[Form], step: int) -> list[Tensor]:
        """From the stage `step` (1 or -1) from here."""
        tensors = [form.empty(self._world.device) for form in forms]
        group = self._up if step > 0 else None
        with self._world.explained(f"receiving from rank {self._world.rank + step}"):
            works = [
                dist.irecv(_bytes(t), self._world.rank + step, group=group) for t in tensors if t.numel()
            ]
            for work in works:
                if work is not None:
                    work.wait()
        return tensors

    def flush(self) -> None:
        """Wait until all is sent."""
        going, self._going = self._going, []
        with self._world.explained("sending to another stage"):
            for work, _ in going:
                work.wait()

    def tell(self, item: Any, step: int) -> None:
        with self._world.explained(f"sending to rank {self._world.rank + step}"):
            dist.send_object_list([item], self._world.rank + step)

    def hear(self, step: int) -> Any:
        items: list[Any] = [None]
        with self._world.explained(f"receiving from rank {self._world.rank + step}"):
            dist.recv_object_list(items, self._world.rank + step)
        return items[0]

    def share(self, tensor: Tensor, source: int) -> None:
        """Fill `tensor` on every rank with that of rank `source`."""
        if tensor.numel():
            with self._world.explained("the outputs of the last stage"):
                dist.broadcast(_bytes(tensor), source)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)

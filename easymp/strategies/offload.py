"""Activation offload: what autograd saves on a CUDA device is kept in pinned host memory from forward to backward.

A side stream copies while the compute stream computes. In forward a saved tensor stays on the device until its copy has left, at
most `AHEAD` of them at a time: then the compute stream waits for the oldest. In backward a tensor that is asked for brings the
`AHEAD` that were saved before it, which autograd mostly asks for next. Memory on the device belongs to the compute stream.

Left on the device: parameters, views of them and autocast's copies, which stay anyway; tensors below `LEAST` bytes; and what is not a plain
dense tensor. Parts that are recomputed save their inputs only, and what they save again in backward is not offloaded.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

AHEAD = 2  # copies under way in each direction
LEAST = 1 << 16  # bytes


class Saved:
    """A tensor in host memory, and its copies under way.

    Attributes:
        host: the copy.
        leaving: the tensor on the device, while its copy is under way; None afterwards.
        before: the one that was saved before it.
    """

    def __init__(self, tensor: Tensor, before: Saved | None) -> None:
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
        self.leaving: Tensor | None = tensor
        self.left: Any = None  # event: the copy to the host is done
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.before = weakref.ref(before) if before is not None else lambda: None
        self.coming: tuple[Tensor, Any] | None = None  # back on the device, and the event that it has arrived
        self.given: Any = lambda: None  # weak reference to what was handed out last


class Offload(saved_tensors_hooks):
    """Inside, tensors that autograd saves on `device` go to the host's memory; backward may run outside.

    Args:
        device: of the model.
        least: bytes from which a tensor goes.
    """

    def __init__(self, device: torch.device, least: int = LEAST) -> None:
        super().__init__(self._pack, self._unpack)
        self._device, self._least = device, least
        self._streams = torch.get_device_module(device)
        self._side: Any = None  # made in the first forward
        self._leaving: deque[weakref.ref[Saved]] = deque()
        self._last: Any = lambda: None  # weak reference to what was saved last
        self._known: weakref.WeakValueDictionary[Any, Saved] = weakref.WeakValueDictionary()

    def _pack(self, tensor: Tensor) -> Any:
        if not self._goes(tensor):
            return tensor
        place = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
        key = (*place, tensor.dtype, tensor._version)
        known = self._known.get(key)
        if known is not None and not known.storage.expired():
            return known  # saved before, by another operator
        if self._side is None:
            self._side = self._streams.Stream(self._device)
        saved = self._known[key] = Saved(tensor.detach(), self._last())
        self._last = weakref.ref(saved)
        self._side.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._side):
            saved.host.copy_(tensor.detach(), non_blocking=True)
            saved.left = self._side.record_event()
        if tensor.is_cuda:
            tensor.record_stream(self._side)  # the graph may be dropped meanwhile
        self._leaving.append(weakref.ref(saved))
        while len(self._leaving) > AHEAD:
            oldest = self._leaving.popleft()()
            if oldest is not None and oldest.leaving is not None:
                # The compute stream uses its memory again only after it was copied.
                self._streams.current_stream(self._device).wait_event(oldest.left)
                oldest.leaving = None
        return saved

    def _goes(self, tensor: Tensor) -> bool:
        plain = type(tensor) is Tensor and tensor.device == self._device and tensor.layout is torch.strided
        if not plain or tensor.nbytes < self._least or any(s == 0 for s in tensor.stride()):
            return False
        base = tensor if tensor._base is None else tensor._base
        node: Any = base.grad_fn
        if isinstance(base, nn.Parameter):
            return False
        # Autocast's copy of a parameter, which stays for the rest of forward.
        cast = node is not None and node.name() == "ToCopyBackward0"
        return not (cast and isinstance(getattr(node.next_functions[0][0], "variable", None), nn.Parameter))

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, Saved):
            return packed
        there: Tensor | None = packed.given()
        if there is not None:
            return there
        if packed.leaving is not None:  # of the end of forward: it is still there
            tensor, packed.leaving = packed.leaving, None
        else:
            self._bring(packed)
            assert packed.coming is not None
            (tensor, arrived), packed.coming = packed.coming, None
            self._streams.current_stream(self._device).wait_event(arrived)
        packed.given = weakref.ref(tensor)
        before = packed.before()
        for _ in range(AHEAD):
            if before is None:
                break
            self._bring(before)
            before = before.before()
        return tensor

    def _bring(self, saved: Saved) -> None:
        if saved.coming is not None or saved.leaving is not None or saved.given() is not None:
            return
        tensor = torch.empty_like(saved.host, device=self._device)
        self._side.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._side):
            tensor.copy_(saved.host, non_blocking=True)
            saved.coming = tensor, self._side.record_event()
        if tensor.is_cuda:
            tensor.record_stream(self._side)  # it may be dropped without having been asked for

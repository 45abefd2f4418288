"""What runs an optimizer's step, and the norm of its gradients before it.

Clipping and the loss scale are one factor on all gradients: (1 / scale) × min(1, max_norm / (norm + 1e-6)). An engine measures it in
one reading of the gradients, without a wait for the device, and multiplies by it where the step reads them anyway, so that
gradients are neither divided nor clipped in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from ..precision.scaler import step_told, takes_found_inf
from ..shards import local
from .sharded import refuse_alone

DTYPES = (torch.float32, torch.bfloat16)  # of gradients for which the factor is exact enough, in float32
DEVICES = ("cpu", "cuda")  # where torch's fused steps are known to read `grad_scale`

OverRanks = Callable[[Tensor], None]


class Engine(Protocol):
    """Steps one optimizer.

    Attributes:
        name: "CuPy", "torch fused" or "torch".
        reason: why it is this one, in words.
    """

    name: str
    reason: str

    def takes_factor(self) -> bool:
        """Whether `step` multiplies by the factor as it reads, for the gradients that there are now; the same on all ranks."""
        ...

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters, each with its gradient, of those that a step would move now."""
        ...

    def measure(self, max_norm: float = float("inf"), scale: Tensor | None = None, over_ranks: OverRanks | None = None) -> Tensor:
        """float32 [4] on the device: norm of the gradients divided by `scale`, factor, found_inf (0 or 1), 1 / scale.

        Args:
            scale: float32, 0-dim: the loss scale.
            over_ranks: adds up a float64 tensor [2], in place: Σ (g / scale)² and what is not finite. May be a collective.
        """
        ...

    def step(self, factor: Tensor | None = None, found_inf: Tensor | None = None) -> Any:
        """Move the parameters; returns what the optimizer's own step does.

        Args:
            factor: float32, 0-dim: what gradients are multiplied by.
            found_inf: float32, 0-dim: above 0, nothing changes.
        """
        ...


class TorchEngine:
    """torch's own step. Where it is a fused one, it reads the factor as its protocol for loss scales has it (``grad_scale``).

    Args:
        copies: of a parameter, on how many ranks each element of its gradient lies, of those that `over_ranks` adds up; 0: it is
            counted elsewhere.
        free: False leaves gradients to be changed in memory, always.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        copies: Callable[[Tensor], int] = lambda parameter: 1,
        free: bool = True,
        reason: str = "",
    ) -> None:
        self.optimizer = optimizer
        self.reason = reason
        self._copies, self._free = copies, free

    @property
    def name(self) -> str:
        return "torch fused" if takes_found_inf(self.optimizer) else "torch"

    def takes_factor(self) -> bool:
        if not self._free or not takes_found_inf(self.optimizer) or watched(self.optimizer):
            return False
        return all(
            g.dtype in DTYPES and p.dtype == g.dtype and g.layout == torch.strided and g.device.type in DEVICES
            for p, g in self._pairs()
        )

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None:
                    yield parameter, gradient

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        return list(self._pairs())

    @torch.no_grad()
    def measure(self, max_norm: float = float("inf"), scale: Tensor | None = None, over_ranks: OverRanks | None = None) -> Tensor:
        pairs = self.gradients()
        parts = [(local(gradient), self._copies(parameter)) for parameter, gradient in pairs]
        parts = [(part, copies) for part, copies in parts if copies and part.numel()]
        norms = wide_norms([part for part, _ in parts])
        each = torch.stack([n.to(norms[0].device) for n in norms]) if norms else torch.zeros(1, device=self._device())
        if over_ranks is None:
            norm = torch.linalg.vector_norm(each)
            if scale is not None:
                norm = norm * inverse_of(scale.to(each.device))
            bad = (~norm.isfinite()).float()
        else:
            wide = each.dtype if each.device.type == "mps" else torch.float64
            squares = each.to(wide).square()
            if any(copies != 1 for _, copies in parts):
                squares = squares / torch.tensor([copies for _, copies in parts], dtype=wide).to(each.device, non_blocking=True)
            if scale is not None:
                squares = squares * inverse_of(scale.to(each.device)).to(wide).square()
            totals = torch.stack([squares.sum(), (~each.isfinite()).sum().to(wide)])
            over_ranks(totals)
            norm, bad = totals[0].sqrt().float(), (totals[1] > 0).float()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        inverse = torch.ones_like(norm) if scale is None else inverse_of(scale.to(each.device))
        return torch.stack([norm, factor * inverse, bad, inverse])

    def _device(self) -> torch.device:
        return next((p.device for group in self.optimizer.param_groups for p in group["params"]), torch.device("cpu"))

    def step(self, factor: Tensor | None = None, found_inf: Tensor | None = None) -> Any:
        if factor is None and found_inf is None:
            return self.optimizer.step()
        if takes_found_inf(self.optimizer):
            return step_told(self.optimizer, found_inf, None if factor is None else factor.reciprocal())
        if found_inf is not None and found_inf.item():
            return None
        if factor is not None:
            multiply([gradient for _, gradient in self._pairs()], factor)
        return self.optimizer.step()


def engine_for(
    optimizer: torch.optim.Optimizer, copies: Callable[[Tensor], int] = lambda parameter: 1, free: bool = True
) -> Engine:
    """What steps `optimizer` here: see `TorchEngine` for the arguments."""
    return TorchEngine(optimizer, copies, free)


def watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody looks in just before a step, and may look at gradients: a hook."""
    hooks: dict[int, Any] = optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]
    return any(hook is not refuse_alone for hook in hooks.values())


def inverse_of(scale: Tensor) -> Tensor:
    """1 / scale, rounded once."""
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()  # no float64 on mps


def wide_norms(tensors: list[Tensor]) -> list[Tensor]:
    """The 2-norm of each, in float32."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(i)
    if len(by_kind) == 1 and tensors[0].dtype == torch.float32:
        return list(torch._foreach_norm(tensors))
    norms: list[Any] = [None] * len(tensors)
    for places in by_kind.values():
        for i, norm in zip(places, torch._foreach_norm([tensors[i] for i in places], 2, dtype=torch.float32)):
            norms[i] = norm
    return norms


@torch.no_grad()
def multiply(gradients: list[Tensor], factor: Tensor) -> None:
    """In memory, in place."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        part = local(gradient._values() if gradient.is_sparse else gradient)
        if part.numel():
            by_device.setdefault(part.device, []).append(part)
    for device, parts in by_device.items():
        torch._foreach_mul_(parts, factor.to(device))

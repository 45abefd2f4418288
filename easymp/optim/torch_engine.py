"""torch's own step, and gradients measured by torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..precision.scaler import step_told, takes_found_inf
from ..protocols import Counting
from ..shards import local
from .averages import Averages
from .hooks import watched
from .norms import multiply, wide_norms

DTYPES = (torch.float32, torch.bfloat16)  # of gradients for which the factor is exact enough, in float32
DEVICES = ("cpu", "cuda")  # where torch's fused steps are known to read `grad_scale`

OverRanks = Callable[[Tensor], None]


class TorchEngine:
    """torch's own step. Where it is a fused one, it reads the factor as its protocol for loss scales has it (``grad_scale``).

    Args:
        counting: how norms of gradients come about on the ranks.
        free: False leaves gradients to be changed in memory, always.
        ema_decay: keep averages of the weights: see `averages`.
        reason: why torch steps, if that needs one.
    """

    reads_low = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        counting: Counting | None = None,
        free: bool = True,
        ema_decay: float | None = None,
        reason: str = "",
    ) -> None:
        self.optimizer, self.counting, self.reason = optimizer, counting or Counting(), reason
        self.averages = Averages(optimizer, ema_decay)
        self._free = free

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
        parts = [(local(gradient), self.counting.copies(parameter)) for parameter, gradient in pairs]
        parts = [(part, copies) for part, copies in parts if copies and part.numel()]
        norms = wide_norms([part for part, _ in parts])
        each = (
            torch.stack([n.to(norms[0].device, torch.float32) for n in norms]) if norms else torch.zeros(1, device=self._device())
        )
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
        if found_inf is not None and not takes_found_inf(self.optimizer):
            if found_inf.item():
                return None
            found_inf = None
        moving = [parameter for parameter, _ in self._pairs()] if self.averages.decay is not None else ()
        return self.averages.around(moving, lambda: self._step(factor, found_inf), found_inf)

    def _step(self, factor: Tensor | None, found_inf: Tensor | None) -> Any:
        if factor is None and found_inf is None:
            return self.optimizer.step()
        if takes_found_inf(self.optimizer):
            return step_told(self.optimizer, found_inf, None if factor is None else factor.reciprocal())
        assert factor is not None
        multiply([gradient for _, gradient in self._pairs()], factor)
        return self.optimizer.step()


def inverse_of(scale: Tensor) -> Tensor:
    """1 / scale, rounded once."""
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()  # no float64 on mps

"""torch's own step, and gradients measured by torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..base.dtensor import local
from ..precision.scaler import step_told, takes_found_inf
from ..protocols import Counting
from .averages import Averages
from .fusing import FusedOptimizer
from .sharded import ShardedOptimizer, holder_of
from .torch_step import multiply, watched, wide_norms

if TYPE_CHECKING:
    from ..cuda.rule import Scale

DTYPES = (torch.float32, torch.bfloat16)  # of gradients for which the factor is exact enough, in float32

# Elements from which, on a CPU, a pass over the gradients takes longer than what a factor costs the fused step, which writes them, too.
WORTH = 2**21
SCALED = 32  # under a loss scale there is a pass more to save, from so many times fewer; benchmarks/fused_step.py shows both

OverRanks = Callable[[Tensor], None]


class Measured(NamedTuple):
    """What is known of all gradients, 0-dim, float32, on their device.

    Attributes:
        norm: of the gradients divided by the loss scale.
        factor: what the step is to multiply them by: (1 / scale) × min(1, max_norm / (norm + 1e-6)).
        found_inf: above 0 where one is not finite; None where nobody asked: without a scale.
    """

    norm: Tensor
    factor: Tensor
    found_inf: Tensor | None


class TorchEngine:
    """torch's own step. Where it is a fused one, it reads the factor as its protocol for loss scales has it (``grad_scale``).

    Args:
        counting: how norms of gradients come about on the ranks.
        free: False leaves gradients to be changed in memory, always.
        ema_decay: keep averages of the weights: see `averages`.
        reason: why torch steps, if that needs one.
        scaled: whether there is a loss scale.
    """

    reads_low = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        counting: Counting | None = None,
        free: bool = True,
        ema_decay: float | None = None,
        reason: str = "",
        scaled: bool = False,
    ) -> None:
        self.optimizer, self.counting, self.reason = optimizer, counting or Counting(), reason
        self.averages = Averages(lambda parameter: holder_of(optimizer, parameter), ema_decay)
        self._free, self._scaled = free, scaled
        inner = optimizer.twin if isinstance(optimizer, ShardedOptimizer) else optimizer
        self._own = inner if isinstance(inner, FusedOptimizer) else None
        self._groups, self._enough = -1, False

    @property
    def name(self) -> str:
        return "torch fused" if takes_found_inf(self.optimizer) else "torch"

    def takes_factor(self) -> bool:
        if (
            not self._free
            or not self.worth()
            or not takes_found_inf(self.optimizer)
            or watched(self.optimizer)
        ):
            return False
        return all(
            g.dtype in DTYPES and p.dtype == g.dtype and g.layout is torch.strided and (g.is_cpu or g.is_cuda)
            for p, g in self._pairs()  # on these devices, torch's fused steps are known to read `grad_scale`
        )

    def worth(self) -> bool:
        """See `Engine`. Of all parameters, those of other stages too: the same on all ranks."""
        groups = self.optimizer.param_groups
        if len(groups) != self._groups:
            held = [p for group in groups for p in group["params"]]
            self._groups = len(groups)
            least = WORTH / SCALED if self._scaled else WORTH
            self._enough = any(p.is_cuda for p in held) or sum(p.numel() for p in held) >= least
        return self._enough

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None:
                    yield parameter, gradient

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        return list(self._pairs())

    def measure(
        self, max_norm: float = float("inf"), scale: Tensor | None = None, over_ranks: OverRanks | None = None
    ) -> Measured:
        pairs = [(parameter, local(gradient)) for parameter, gradient in self._pairs()]
        inverse = None if scale is None else inverse_of(scale)
        if over_ranks is None:
            norms = wide_norms([gradient for _, gradient in pairs])
            norm = (
                torch.linalg.vector_norm(together(norms)) if norms else torch.zeros((), device=self._device())
            )
            bad = None
            if inverse is not None:
                inverse = inverse.to(norm.device, non_blocking=True)
                bad = (norm - norm != 0).float()  # of infinity and of no number
                norm = norm * inverse
        else:
            totals = self._totals(pairs)
            if inverse is not None:
                inverse = inverse.to(totals.device, non_blocking=True)
                totals[0] *= inverse.to(totals.dtype).square()
            over_ranks(totals)
            norm, bad = totals[0].sqrt().float(), (totals[1] > 0).float()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return Measured(norm, factor if inverse is None else factor * inverse, bad)

    def _totals(self, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Σ g² and how many tensors have a number that is not finite, in float64 where the device has it."""
        counted = [(gradient, self.counting.copies(parameter)) for parameter, gradient in pairs]
        counted = [(gradient, copies) for gradient, copies in counted if copies and gradient.numel()]
        norms = wide_norms([gradient for gradient, _ in counted])
        each = together(norms) if norms else torch.zeros(1, device=self._device())
        squares = each.to(torch.float32 if each.device.type == "mps" else torch.float64).square()
        if any(copies != 1 for _, copies in counted):
            squares = squares / torch.tensor([c for _, c in counted], dtype=squares.dtype).to(
                each.device, non_blocking=True
            )
        return torch.stack([squares.sum(), (~each.isfinite()).sum().to(squares.dtype)])

    def _device(self) -> torch.device:
        # Not meta, as parameters of other stages: a collective does nothing there, and the other ranks wait for this one.
        held = (p.device for group in self.optimizer.param_groups for p in group["params"] if not p.is_meta)
        return next(held, torch.device("cpu"))

    def step(
        self, factor: Tensor | None = None, found_inf: Tensor | None = None, scale: Scale | None = None
    ) -> Any:
        if factor is None and found_inf is None and self.averages.decay is None:
            return self.optimizer.step()  # nothing to tell it, and nothing that follows it
        if self._own is None or scale is None:
            return self._step_told(factor, found_inf)
        with self._own.borrowing(scale):  # which may run our kernels by itself
            return self._step_told(factor, found_inf)

    def _step_told(self, factor: Tensor | None, found_inf: Tensor | None) -> Any:
        if found_inf is not None and not takes_found_inf(self.optimizer):
            if found_inf.item():
                return None
            found_inf = None
        if self.averages.decay is None:
            return self._step(factor, found_inf)
        moving = [parameter for parameter, _ in self._pairs()]
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
    return (
        scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()
    )  # no float64 on mps


def together(numbers: list[Tensor]) -> Tensor:
    """Of each tensor one, in float32, on the first one's device."""
    device = numbers[0].device
    same = all(n.device == device and n.dtype == torch.float32 for n in numbers)
    return torch.stack(numbers if same else [n.to(device, torch.float32) for n in numbers])

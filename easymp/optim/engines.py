"""What runs an optimizer's step, and the norm of its gradients before it.

Clipping and the loss scale are one factor on all gradients: (1 / scale) × min(1, max_norm / (norm + 1e-6)). An engine measures it in
one reading of the gradients, without a wait for the device, and multiplies by it where the step reads them anyway, so that
gradients are neither divided nor clipped in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from .. import cuda, optim
from ..protocols import Counting
from .averages import Averages
from .sharded import ShardedOptimizer
from .torch_engine import Measured, OverRanks, TorchEngine

if TYPE_CHECKING:
    from ..cuda.cupy_launcher import Unavailable
    from ..cuda.kernel import Launcher
    from ..cuda.rule import Scale
    from .masters import Masters


DEVICES = ("cuda",)  # types of those that our kernels run on


class Engine(Protocol):
    """Steps one optimizer.

    Attributes:
        name: "CuPy", "torch fused" or "torch".
        reason: why it is this one, in words.
        counting: how the norms that it measures come about on the ranks.
        reads_low: whether it reads gradients of low-precision parameters, and writes these, by itself; the masters need not.
        averages: of the weights, for steps that go past it.
    """

    name: str
    reason: str
    counting: Counting
    reads_low: bool
    averages: Averages

    def worth(self) -> bool:
        """Whether leaving a factor to the step can take less time than a pass over the gradients; quickly said."""
        ...

    def takes_factor(self) -> bool:
        """Whether `step` multiplies by the factor as it reads, for the gradients that there are now; the same on all ranks."""
        ...

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters, each with its gradient, of those that a step would move now."""
        ...

    def measure(
        self, max_norm: float = float("inf"), scale: Tensor | None = None, over_ranks: OverRanks | None = None
    ) -> Measured:
        """Norm and factor, of gradients that are only read; nothing waits for the device.

        Args:
            scale: float32, 0-dim: the loss scale.
            over_ranks: adds up a float64 tensor [2], in place: Σ (g / scale)² and what is not finite. May be a collective.
        """
        ...

    def step(
        self, factor: Tensor | None = None, found_inf: Tensor | None = None, scale: Scale | None = None
    ) -> Any:
        """Move the parameters; returns what the optimizer's own step does.

        Args:
            factor: float32, 0-dim: what gradients are multiplied by.
            found_inf: float32, 0-dim: above 0, nothing changes.
            scale: says when it is back whether a step by our kernels has moved it; torch's never does.
        """
        ...


def launcher_on(device: torch.device) -> Launcher | Unavailable:
    """What launches our kernels on `device`, which is of `DEVICES`. The one place that asks: a test puts another launcher here."""
    return cuda.launcher_for(device)


def engine_for(
    optimizer: torch.optim.Optimizer,
    counting: Counting | None = None,
    free: bool = True,
    ema_decay: float | None = None,
    masters: Masters | None = None,
    failed: Callable[[str], None] = lambda reason: None,
    scaled: bool = False,
) -> Engine:
    """What steps `optimizer` here: see `TorchEngine` and `CupyEngine` for the arguments."""
    inner = optimizer.twin if isinstance(optimizer, ShardedOptimizer) else optimizer
    reason, found = "", None
    if free:
        found = _launcher(inner)
        reason = found if isinstance(found, str) else ""
    other = TorchEngine(optimizer, counting, free, ema_decay, reason, scaled)
    if found is None or isinstance(found, str):
        return other
    return optim.CupyEngine(optimizer, cuda.RULES[type(inner)], found, other, masters, ema_decay, failed)


def _launcher(optimizer: torch.optim.Optimizer) -> Launcher | str:
    """What launches the steps of `optimizer`; or why torch steps, in words."""
    devices = {
        p.device for group in optimizer.param_groups for p in group["params"] if not p.is_meta
    }  # of other stages
    if len(devices) != 1:
        return "its parameters lie on several devices"
    device = devices.pop()
    if device.type not in DEVICES:
        return f"our kernels run on NVIDIA GPUs, not on {device.type}"
    rule = cuda.RULES.get(type(optimizer))
    if rule is None:
        return f"there is no kernel for {type(optimizer).__name__}"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "a differentiable step was asked for"
        if group.get("foreach") is not None or group.get("fused") is False:
            return "fused or foreach was chosen by the caller"
        refusal = rule.refuse(group)
        if refusal is not None:
            return refusal
    launcher = launcher_on(device)
    return launcher.reason if isinstance(launcher, cuda.Unavailable) else launcher

"""What runs an optimizer's step, and the norm of its gradients before it.

Clipping and the loss scale are one factor on all gradients: (1 / scale) × min(1, max_norm / (norm + 1e-6)). An engine measures it in
one reading of the gradients, without a wait for the device, and multiplies by it where the step reads them anyway, so that
gradients are neither divided nor clipped in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import cuda
from ..base.dtensor import local
from ..errors import KernelError, StepError
from ..precision import Scaler
from ..precision.scaler import NO_GRADIENTS, Phase, step_told, takes_found_inf
from ..protocols import Counting
from .fused import FusedOptimizer
from .masters import Averages, Masters
from .sharded import ShardedOptimizer, holder_of
from .torch_step import multiply, watched, wide_norms

if TYPE_CHECKING:
    from ..cuda.cupy_launcher import Unavailable
    from ..cuda.kernel import Launcher
    from ..cuda.rule import Rule, Scale
    from .optimizer import PreparedOptimizer

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
    return CupyEngine(optimizer, cuda.RULES[type(inner)], found, other, masters, ema_decay, failed)


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


# -- torch's own step, and gradients measured by torch.


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


# -- The step by our own kernels: norm, unscale, clip, update, average and low-precision copy in two readings of the gradients.


class CupyEngine:
    """Steps dense floats on one GPU by `FusedStep`, and what else there is by torch's step of the same class.

    Where there is neither a factor nor an overflow to look at, nor an average or a low-precision copy, torch's fused step moves
    no byte more, and runs. A kernel that fails gives way to torch for good, before anything has changed.

    Args:
        other: torch's engine of the same optimizer.
        masters: what the optimizer holds in place of low-precision parameters, whose gradients and values the kernels read and write.
        failed: hears why the kernels gave way.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: Rule,
        launcher: Launcher,
        other: TorchEngine,
        masters: Masters | None = None,
        ema_decay: float | None = None,
        failed: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.optimizer, self.counting = optimizer, other.counting
        self._launcher, self._rule, self._other, self._failed = launcher, rule, other, failed
        self._lost = ""
        self._times = 1  # ranks over which `counting` adds up parts of what torch would measure whole
        inner, gradient = optimizer, self._gradient
        if isinstance(optimizer, ShardedOptimizer):
            world, self._times = optimizer.world, optimizer.world.size
            inner, gradient, masters = optimizer.twin, optimizer.gradient, None
            self.counting = Counting(
                lambda p: 1 if p.ndim else world.size, lambda totals: totals.copy_(world.reduce(totals))
            )
        self._inner, self._masters = inner, masters
        self._low = {} if masters is None else masters.low
        self.averages = other.averages
        self._averages = Averages(
            lambda parameter: (parameter, inner.state), ema_decay
        )  # of what the kernels do not take
        self._step = cuda.FusedStep(
            inner,
            rule,
            launcher,
            gradient=gradient,
            copy=self._low,
            ema_decay=ema_decay,
            copies=self.counting.copies,
        )

    @property
    def name(self) -> str:
        return self._other.name if self._lost else "CuPy"

    @property
    def reason(self) -> str:
        return self._lost or f"norm, unscale, clip and {type(self._inner).__name__} in one pass"

    @property
    def reads_low(self) -> bool:
        return self._masters is not None and not self._lost

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        gradient = parameter.grad
        if gradient is None and id(parameter) in self._low:
            return self._low[id(parameter)].grad
        return gradient

    def worth(self) -> bool:
        return not self._lost or self._other.worth()

    def takes_factor(self) -> bool:
        if self._lost:
            return self._other.takes_factor()
        step = vars(self.optimizer).get("step")
        if watched(self.optimizer) or (step is not None and not hasattr(step, "_wrapped_by_lr_sched")):
            return False
        if any(self._rule.refuse(group) for group in self.optimizer.param_groups):
            return False
        low = self._low.values()
        fp16 = (
            {id(p) for p in low} if low else ()
        )  # gradients in fp16 without a master are refused under a loss scale
        device = self._launcher.device
        return all(
            g.layout is torch.strided
            and g.device == device
            and g.dtype in cuda.TYPES
            and (g.dtype != torch.float16 or id(p) in fp16)
            for p, g in self.gradients()
        )

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        self._settle()
        found = []
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                holder = parameter
                if holder.grad is None:
                    holder = self._low.get(id(parameter), parameter)
                if holder.grad is not None:
                    found.append((holder, holder.grad))
        return found

    def _settle(self) -> None:
        """No parameter has a gradient beside its master's."""
        if self.reads_low and any(master.grad is not None for _, master in self._masters.pairs()):  # type: ignore[union-attr]
            self._masters.gather()  # type: ignore[union-attr]

    def measure(
        self, max_norm: float = float("inf"), scale: Tensor | None = None, over_ranks: OverRanks | None = None
    ) -> Measured:
        if not self._lost:
            try:
                return Measured(*self._step.measure(max_norm, self._here(scale), over_ranks).unbind()[:3])
            except KernelError as error:
                add, times = over_ranks, self._times
                self.give_way(str(error))
                if add is not None and times > 1:  # it adds up parts, and torch measures whole gradients
                    return self._other.measure(max_norm, scale, lambda totals: add(totals.div_(times)))
        return self._other.measure(max_norm, scale, over_ranks)

    def step(
        self, factor: Tensor | None = None, found_inf: Tensor | None = None, scale: Scale | None = None
    ) -> Any:
        nothing = (
            factor is None and found_inf is None and self._averages.decay is None and self._masters is None
        )
        if not self._lost and not (nothing and takes_found_inf(self.optimizer)):
            self._settle()
            try:
                return self._hooked(lambda: self._move(self._here(factor), self._here(found_inf), scale))
            except KernelError as error:
                self.give_way(str(error))
        return self._other.step(factor, found_inf, scale)

    def give_way(self, reason: str) -> None:
        """torch steps from here on."""
        self._lost, self.counting = reason, self._other.counting
        if self._masters is not None:
            self._masters.gather()
        self._failed(reason)

    def _here(self, number: Tensor | None) -> Tensor | None:
        """On the kernels' device: a loss, and so its scale, may be elsewhere."""
        return None if number is None else number.to(self._launcher.device, non_blocking=True)

    def _hooked(self, step: Callable[[], None]) -> None:
        """`step` with all that torch does around an optimizer's own."""
        there: Any = self.optimizer
        if isinstance(there, ShardedOptimizer):
            torch.optim.Optimizer.profile_hook_step(lambda optimizer: optimizer.step_by(step))(there)
            return
        torch.optim.Optimizer.profile_hook_step(lambda optimizer: step())(there)
        if hasattr(vars(there).get("step"), "_wrapped_by_lr_sched"):
            there._opt_called = True  # torch's schedulers look there for the order of calls

    def _move(self, factor: Tensor | None, found_inf: Tensor | None, scale: Scale | None) -> None:
        self._step.step(factor, found_inf, scale=scale)
        if self._step.rest and (found_inf is None or not found_inf.item()):
            self._averages.around(self._step.rest, lambda: self._move_rest(factor))

    @torch.no_grad()
    def _move_rest(self, factor: Tensor | None) -> None:
        """torch's step on what the kernels do not take; it sees no other gradients."""
        rest = {id(p): p for p in self._step.rest}
        for key, parameter in rest.items():
            if parameter.grad is None and key in self._low:
                parameter.grad = self._low[key].grad.to(parameter.dtype)  # type: ignore[union-attr]
        hidden = [
            (p, p.grad) for group in self._inner.param_groups for p in group["params"] if id(p) not in rest
        ]
        for parameter, _ in hidden:
            parameter.grad = None
        try:
            if factor is not None:
                multiply([p.grad for p in rest.values() if p.grad is not None], factor)
            step: Any = type(self._inner).step
            getattr(step, "__wrapped__", step)(self._inner)  # its hooks have been called
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient
        for key, parameter in rest.items():
            if key in self._low:
                self._low[key].data.copy_(parameter)


# -- What a clip leaves to the step: a factor, and the gradients that it is for, which stay in memory as backward left them.


class Factor:
    """What an optimizer's gradients are to be multiplied by.

    Attributes:
        value: float32, 0-dim, on the device.
    """

    def __init__(self, value: Tensor, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.value = value
        parts = [local(gradient) for _, gradient in gradients]
        self._seen = [(p, gradient, part, part._version) for (p, gradient), part in zip(gradients, parts)]

    def check(self) -> None:
        """Before the step multiplies by it.

        Raises:
            StepError: gradients are not those that were measured.
        """
        self._unchanged()

    def apply(self) -> None:
        """Multiply in memory, as if there were no factor. Gradients that were cleared since stay cleared.

        Raises:
            StepError: gradients are not those that were measured.
        """
        multiply(self._unchanged(), self.value)

    def _unchanged(self) -> list[Tensor]:
        """The gradients that are still there."""
        there = []
        for parameter, gradient, part, version in self._seen:
            now = parameter.grad
            if now is gradient and part._version == version:
                there.append(gradient)
            elif now is not None and bool(local(now.detach()).any()):
                raise StepError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} was changed between clip_grad_norm_ and step(). There "
                    "it is neither clipped nor divided by the loss scale yet, for the step does both as it reads: change gradients "
                    "before you clip, or use Accelerator(fused=False)"
                )
        return there


@torch.no_grad()
def leave_to_step(optimizers: Sequence[PreparedOptimizer], max_norm: float, scaler: Scaler) -> Tensor:
    """Measure all gradients of `optimizers`, which take factors, and leave them the factor; returns the norm (0-dim, float32).

    Under a loss scale the norm is that of the gradients divided by it, and an overflow in any of them skips the steps of all.

    Raises:
        StepError: under a loss scale: there are no gradients on any rank.
    """
    counting = optimizers[0].engine.counting
    for optimizer in optimizers if counting.add is not None else ():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                counting.settle(parameter)
    found = [o.engine.gradients() for o in optimizers]
    here = any(found)
    scale = scaler.scale_of([o.optimizer for o in optimizers], here)
    others: list[Tensor] = []
    for optimizer in optimizers[:-1]:
        optimizer.engine.measure(max_norm, scale, others.append)

    anywhere: list[Tensor] = []  # how many ranks hold gradients

    def over_ranks(totals: Tensor) -> None:
        for other in others:
            totals += other.to(totals.device)
        if counting.add is not None:
            both = torch.cat([totals, totals.new_full((1,), float(here))])
            counting.add(both)
            totals.copy_(both[:2])
            anywhere.append(both[2])

    alone = not others and counting.add is None
    result = optimizers[-1].engine.measure(max_norm, scale, None if alone else over_ranks)
    bad = result.found_inf
    if scale is not None:
        assert bad is not None
        if counting.add is None:
            bad = scaler.agreed(bad, here)
        elif not here and not anywhere[0].item():
            raise StepError(NO_GRADIENTS)
    scaler.take([o.optimizer for o in optimizers], bad if scale is not None else None)
    for optimizer, gradients in zip(optimizers, found):
        optimizer.leave(Factor(result.factor, gradients))
    return result.norm


def may_leave(optimizers: Sequence[PreparedOptimizer], scaler: Scaler) -> bool:
    """Whether `leave_to_step` is for these now. The same on all ranks."""
    if not optimizers or any(o.factor is not None or not o.engine.takes_factor() for o in optimizers):
        return False
    if len({o.engine.counting.add is None for o in optimizers}) > 1:
        return False
    phases = {scaler.phase(o.optimizer) for o in optimizers}
    return len(phases) == 1 and Phase.STEPPED not in phases

"""fp32 tensors beside the parameters: masters of low-precision weights, sums of their gradients, and averages of all weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.dtensor import local
from ..cuda import EMA
from ..errors import StepError
from ..precision.policies import LOW
from ..precision.scaler import to_device


class Masters:
    """fp32 masters of one optimizer's low-precision parameters; its param groups hold them from here on, until `release`.

    An update is often smaller than the spacing of half-precision numbers around a weight: added there it would vanish ("Mixed Precision
    Training", Micikevicius et al., arXiv:1710.03740, section 3.1). Gradients move to the masters before they are unscaled, clipped or
    stepped on, and the parameters are the masters, rounded, after each step. A write to a parameter from outside
    (``model.load_state_dict``, a broadcast) changes its version, and its master takes the new values before the next step. A write through
    ``.data`` is not noticed.

    Args:
        optimizer: its groups' low-precision parameters are replaced, in place; their states move along, in fp32.
        of: id of a parameter → its master; filled here, shared by the optimizers of a run.
        frozen: parameters that are frozen now get masters, too.

    Attributes:
        low: id of a master → its parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, of: dict[int, Tensor], frozen: bool = True) -> None:
        self._optimizer, self._frozen, self._of = optimizer, frozen, of
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._versions: list[int] = []
        self.low: dict[int, Tensor] = {}
        self.take(optimizer.param_groups)

    def take(self, groups: Iterable[dict[str, Any]]) -> None:
        """Put masters into these groups of the optimizer, for parameters that have none yet."""
        state = self._optimizer.state
        for group in groups:
            held = group["params"]
            for i, parameter in enumerate(held):
                if parameter.dtype not in LOW or not (parameter.requires_grad or self._frozen):
                    continue
                master = parameter.detach().to(torch.float32).requires_grad_(parameter.requires_grad)
                self._pairs.append((parameter, master))
                self._versions.append(parameter._version)
                self._of[id(parameter)] = held[i] = master
                self.low[id(master)] = parameter
                if parameter in state:
                    state[master] = {
                        key: value.float() if isinstance(value, Tensor) and value.dtype in LOW else value
                        for key, value in state.pop(parameter).items()
                    }

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that have a master here."""
        return [parameter for parameter, _ in self._pairs]

    @torch.no_grad()
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters, each with its master, which has taken over new values of the parameter."""
        self._follow()
        return list(self._pairs)

    @torch.no_grad()
    def gather(self) -> None:
        """Move the parameters' gradients to their masters, where they add up; StepError for a sparse one."""
        self._follow()
        fresh = [(parameter, master) for parameter, master in self._pairs if parameter.grad is not None]
        totals = added([p.grad for p, _ in fresh], [m.grad for _, m in fresh]) if fresh else []
        for (parameter, master), total in zip(fresh, totals):
            master.grad, parameter.grad = total, None

    def _follow(self) -> None:
        changed = [i for i, (p, _) in enumerate(self._pairs) if p._version != self._versions[i]]
        if changed:
            _copy([self._pairs[i][1] for i in changed], [self._pairs[i][0] for i in changed])
            for i in changed:
                self._versions[i] = self._pairs[i][0]._version

    @torch.no_grad()
    def give_back(self) -> None:
        """After a step, a skipped one too: the parameters become their masters, rounded, and gradients are freed."""
        if self._pairs:
            _copy([parameter for parameter, _ in self._pairs], [master for _, master in self._pairs])
        for i, (parameter, master) in enumerate(self._pairs):
            master.grad = None
            self._versions[i] = parameter._version

    def clear(self) -> None:
        """Drop the gradients of parameters and masters."""
        for parameter, master in self._pairs:
            parameter.grad = master.grad = None

    def release(self) -> None:
        """Give the optimizer its parameters back, with the states of the masters."""
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            held = group["params"]
            for i, master in enumerate(held):
                parameter = self.low.get(id(master))
                if parameter is not None:
                    held[i] = parameter
                    if master in state:
                        state[parameter] = state.pop(master)
        for parameter, _ in self._pairs:
            self._of.pop(id(parameter), None)
        self._pairs.clear()
        self._versions.clear()
        self.low.clear()


def _copy(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    torch._foreach_copy_([local(t) for t in to], [local(v) for v in values])


def added(gradients: Sequence[Any], totals: Sequence[Tensor | None]) -> list[Tensor]:
    """fp32 `totals`, made where there is none, with low-precision `gradients` added to them; StepError for a sparse one."""
    if any(g.is_sparse for g in gradients):
        why = "a sparse gradient of a low-precision parameter cannot be summed in fp32"
        raise StepError(f"{why}: use Embedding(sparse=False), or keep the embedding's weights in fp32")
    more = [(t, g) for g, t in zip(gradients, totals) if t is not None]
    if more:
        torch._foreach_add_([local(t) for t, _ in more], [local(g) for _, g in more])
    return [g.to(torch.float32) if t is None else t for g, t in zip(gradients, totals)]


class Sums:
    """fp32 sums of low-precision gradients over an accumulation window.

    A bf16 number has 8 bits of mantissa: of a sum of a hundred micro-batches' gradients in bf16, the later ones are mostly lost. So
    under accumulation each micro-step's gradients leave `.grad` for an fp32 sum, which stays on this rank. At the end of the window the
    sums are averaged over the ranks, in fp32, once, and only then become `.grad` in the parameter's type, or the master's gradient.
    """

    def __init__(self, masters: Mapping[int, Tensor]) -> None:
        self.on = False  # whether a model needs them; until then no method need be called
        self._masters = masters  # id of a parameter → its master
        self._parameters: list[Tensor] = []  # all that may train, low-precision or not
        self._sums: dict[Tensor, Tensor] = {}
        self._handed = False

    def watch(self, parameters: list[Tensor]) -> None:
        """Sum the gradients of `parameters`: all that may train, low-precision or not."""
        self.on, self._parameters = True, parameters

    def begin(self) -> None:
        """Before a backward: take up sums again that an earlier one of this micro-step has handed over."""
        if not self._handed:
            return
        self._handed = False
        for parameter in list(self._sums):
            if self._holder(parameter).grad is None:
                del self._sums[parameter]  # cleared since
            else:
                parameter.grad = None

    @torch.no_grad()
    def add(self) -> None:
        """After a backward: move its gradients into the sums; StepError for a sparse one."""
        fresh = [p for p in self._parameters if p.grad is not None and p.dtype in LOW]
        totals = added([p.grad for p in fresh], [self._sums.get(p) for p in fresh])
        for parameter, total in zip(fresh, totals):
            self._sums[parameter], parameter.grad = total, None

    @torch.no_grad()
    def average(self, over_ranks: Callable[[Sequence[Tensor]], None]) -> None:
        """Make the sums, and the gradients that are fp32 anyway, the mean over the ranks, by `over_ranks`, in place.

        A parameter that had no gradient on any rank still has none afterwards; all ranks go through the same collectives.
        """
        trainable = [p for p in self._parameters if p.requires_grad]
        if not trainable:
            return
        found = [self._sums.get(p) if p.dtype in LOW else p.grad for p in trainable]
        there = torch.tensor([float(g is not None) for g in found], device=trainable[0].device)
        mine = [
            torch.zeros_like(p, dtype=torch.float32 if p.dtype in LOW else p.dtype) if g is None else g
            for p, g in zip(trainable, found)
        ]
        over_ranks([*mine, there])
        if all(g is not None for g in found):
            return  # no wait for the device
        for parameter, before, after, share in zip(trainable, found, mine, there.tolist()):
            if before is None and share > 0:
                if parameter.dtype in LOW:
                    self._sums[parameter] = after
                else:
                    parameter.grad = after

    def gradients(self) -> Iterator[Tensor]:
        """The sums."""
        return iter(self._sums.values())

    def hand_over(self) -> None:
        """At the end of a window: the sums become gradients."""
        for parameter, total in self._sums.items():
            holder = self._holder(parameter)
            holder.grad = total if holder is not parameter else total.to(parameter.dtype)
        self._handed = True

    def drop(self, parameters: Iterable[Tensor]) -> None:
        """Forget the sums of these: they have been stepped on, or cleared."""
        for parameter in parameters:
            self._sums.pop(parameter, None)

    def clear(self) -> None:
        """Forget everything, the models too."""
        self.on = self._handed = False
        self._parameters.clear()
        self._sums.clear()

    def _holder(self, parameter: Tensor) -> Tensor:
        return self._masters.get(id(parameter), parameter)


# A parameter → the tensor that is stepped for it, and the mapping that its state is in.
Holder = Callable[[Tensor], tuple[Tensor, Any]]


@dataclass(slots=True)
class Averages:
    """Exponential moving averages of one optimizer's parameters, where torch steps it.

    ema += (p - ema) × (1 - decay) at each step that moves p, from p's value before its first one ("Acceleration of Stochastic
    Approximation by Averaging", Polyak and Juditsky, 1992; exponential as in Adam's arXiv:1412.6980, section 7.2). It lies under the key
    "ema" in the optimizer's state, in fp32, split as the other states are, so checkpoints keep it as one of them.
    """

    holder: Holder  # says of each parameter where its average goes
    decay: float | None  # None: there are none

    def around(
        self, parameters: Iterable[Tensor], step: Callable[[], Any], found_inf: Tensor | None = None
    ) -> Any:
        """`step()`, after which the averages of `parameters`, which it may move, follow them, unless `found_inf` is above 0."""
        if self.decay is None:
            return step()
        there = [(p, *self.holder(p)) for p in parameters]
        # The state of a parameter that has none is torch's to begin.
        new = {id(p): _start(p) for _, p, states in there if EMA not in states.get(p, {})}
        result = step()
        # A closure may give some no gradient.
        held = [(p, states) for parameter, p, states in there if parameter.grad is not None]
        for p, states in held:
            if id(p) in new:
                states[p][EMA] = new[id(p)]
        if held:
            averages = [local(states[p][EMA]) for p, states in held]
            weights = [local(p).detach().to(a.dtype) for (p, _), a in zip(held, averages)]
            share: Any = 1.0 - self.decay
            if found_inf is not None:
                good = (found_inf <= 0) * share
                shares = {a.device: to_device(good, a.device) for a in averages}
                share = [shares[a.device].to(a.dtype) for a in averages]
            with torch.no_grad():
                torch._foreach_lerp_(averages, weights, share)
        return result


def _start(parameter: Tensor) -> Tensor:
    now = parameter.detach()
    return now.to(torch.float32) if now.dtype in LOW else now.clone(memory_format=torch.preserve_format)

"""fp32 tensors beside the parameters: masters of low-precision weights, sums of gradients, averages of weights."""

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
from .torch_step import Snapshot


class Masters:
    """fp32 masters of one optimizer's low-precision parameters; its param groups hold them from now until `release`.

    An update is often smaller than the spacing of half-precision numbers around a weight ("Mixed Precision Training",
    Micikevicius et al., arXiv:1710.03740, section 3.1). Gradients move to the masters before they are unscaled, clipped
    or stepped on, and the parameters are the masters, rounded, after each step.

    Scripts know the parameters only. A weight that is not its master rounded was written by the script, and its master
    takes that value before the next step. A gradient that has moved stays in ``.grad``, and what a script does to it
    there reaches the master's. `masters`, id of a parameter → its master, is shared by the optimizers of a run; with
    `frozen`, parameters that are frozen now get masters, too.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, masters: dict[int, Tensor], frozen: bool = True) -> None:
        self._optimizer, self._frozen, self._masters = optimizer, frozen, masters
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._moved: list[_MovedGradient] = []
        self.low: dict[int, Tensor] = {}  # id of a master → its parameter
        self.add_groups(optimizer.param_groups)

    def add_groups(self, groups: Iterable[dict[str, Any]]) -> None:
        """Put masters into these groups of the optimizer, for parameters that have none yet."""
        states = self._optimizer.state
        for params in (group["params"] for group in groups):
            for i, parameter in enumerate(params):
                if parameter.dtype not in LOW or not (parameter.requires_grad or self._frozen):
                    continue
                master = parameter.detach().to(torch.float32).requires_grad_(parameter.requires_grad)
                self._pairs.append((parameter, master))
                self._masters[id(parameter)] = params[i] = master
                self.low[id(master)] = parameter
                if parameter in states:
                    states[master] = {
                        key: value.float() if isinstance(value, Tensor) and value.dtype in LOW else value
                        for key, value in states.pop(parameter).items()
                    }

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that have a master here."""
        return [parameter for parameter, _ in self._pairs]

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters, each with its master, which has taken over new values of the parameter."""
        self.follow()
        return list(self._pairs)

    def have_gradients(self) -> bool:
        """Whether gradients have moved to a master."""
        return any(master.grad is not None for _, master in self._pairs)

    @torch.no_grad()
    def follow(self) -> None:
        """Copy to masters the elements that the script changed in parameters. Does not wait for the device."""
        for parameter, master in self._pairs:
            weight, wide = local(parameter), local(master)
            rounded = wide.to(weight.dtype)
            if not (rounded.is_cpu and torch.equal(rounded, weight)):
                torch.where(rounded == weight, wide, weight, out=wide)

    @torch.no_grad()
    def gather(self, free: bool = False) -> None:
        """Add the parameters' gradients to their masters'. They stay the parameters', too, unless `free`."""
        self._follow_changes()
        moved = {id(gradient.parameter) for gradient in self._moved}
        pairs = [(p, m) for p, m in self._pairs if p.grad is not None and id(p) not in moved]
        for (parameter, master), total in zip(pairs, added([p.grad for p, _ in pairs], [m.grad for _, m in pairs])):
            master.grad = total
            if free:
                parameter.grad = None
            else:
                self._moved.append(_MovedGradient(parameter, master))

    @torch.no_grad()
    def show(self) -> None:
        """Copy the masters' gradients, rounded, to the parameters' ``.grad``, where scripts read and change them."""
        self.gather()
        self._moved.clear()
        for parameter, master in self._pairs:
            if master.grad is not None:
                parameter.grad = master.grad.to(parameter.dtype)
                self._moved.append(_MovedGradient(parameter, master, shown=True))

    @torch.no_grad()
    def hide(self) -> None:
        """Before a backward, which adds to ``.grad``: leave the gradients to the masters alone."""
        self._follow_changes()
        self._free_moved()

    def _follow_changes(self) -> None:
        self._moved = [gradient for gradient in self._moved if gradient.follow_change()]

    def _free_moved(self) -> None:
        for gradient in self._moved:
            gradient.parameter.grad = None
        self._moved.clear()

    @torch.no_grad()
    def write_back(self) -> None:
        """After a step, a skipped one too: the parameters become their masters, rounded, and gradients are freed."""
        if self._pairs:
            torch._foreach_copy_([local(p) for p, _ in self._pairs], [local(m) for _, m in self._pairs])
        self._free_moved()
        for _, master in self._pairs:
            master.grad = None

    def clear(self) -> None:
        """Drop the gradients of parameters and masters."""
        self._moved.clear()
        for parameter, master in self._pairs:
            parameter.grad = master.grad = None

    def release(self) -> None:
        """Give the optimizer its parameters back, with the states of the masters."""
        states = self._optimizer.state
        for params in (group["params"] for group in self._optimizer.param_groups):
            for i, master in enumerate(params):
                if (parameter := self.low.get(id(master))) is not None:
                    params[i] = parameter
                    if master in states:
                        states[parameter] = states.pop(master)
        for parameter, _ in self._pairs:
            self._masters.pop(id(parameter), None)
        self._pairs.clear()
        self._moved.clear()
        self.low.clear()


class _MovedGradient:
    """A gradient that has moved to a master and is still the parameter's.

    `shown`: easymp made the parameter's gradient for the script to read and change, also by ``.data``, which leaves no
    trace. The first `follow_change` therefore compares values.
    """

    def __init__(self, parameter: Tensor, master: Tensor, shown: bool = False) -> None:
        self.parameter, self._master, self._shown = parameter, master, shown
        self._low, self._wide = Snapshot(parameter), Snapshot(master)

    def follow_change(self) -> bool:
        """Do to the master's gradient what a script did to the parameter's. False if it was cleared."""
        gradient, total = self.parameter.grad, self._master.grad
        if gradient is None or total is None:
            self.parameter.grad = self._master.grad = None
            return False
        current = self._wide.unchanged
        if self._low.unchanged and not (self._shown and current):
            return True
        if not current and not self._shown:
            raise StepError(
                f"the gradient of a parameter of shape {tuple(gradient.shape)} was changed after it had moved to the "
                "fp32 master: change gradients before you clip, or call acc.unscale_gradients() first"
            )
        if current:
            # The elements that differ: `.data` writes leave no trace in the version.
            low, wide = local(gradient), local(total)
            torch.where(wide.to(low.dtype) == low, wide, low, out=wide)
        else:
            self._master.grad = gradient.to(total.dtype)
        self._low, self._wide, self._shown = Snapshot(self.parameter), Snapshot(self._master), False
        return True


def added(gradients: Sequence[Any], totals: Sequence[Tensor | None]) -> list[Tensor]:
    """Add low-precision `gradients` to fp32 `totals`, where None begins one; StepError for a sparse gradient."""
    if any(g.is_sparse for g in gradients):
        raise StepError(
            "a sparse gradient of a low-precision parameter cannot be summed in fp32: use Embedding(sparse=False), or "
            "keep the embedding's weights in fp32"
        )
    sums = [(local(t), local(g)) for g, t in zip(gradients, totals) if t is not None]
    if sums:
        torch._foreach_add_([t for t, _ in sums], [g for _, g in sums])
    return [g.to(torch.float32) if t is None else t for g, t in zip(gradients, totals)]


class Sums:
    """fp32 sums of low-precision gradients over an accumulation window: one in bf16 would lose most of the later ones.

    Each micro-step's gradients leave `.grad` for a sum on this rank. At the end of the window the sums are averaged
    over the ranks, once, and become `.grad` in the parameter's type, or the master's gradient.
    """

    def __init__(self, masters: Mapping[int, Tensor]) -> None:
        self.on = False  # whether a model needs them; until then no method need be called
        self._masters = masters  # id of a parameter → its master
        self._parameters: list[Tensor] = []  # all that may train, low-precision or not
        self._sums: dict[Tensor, Tensor] = {}
        self._handed_over = False

    def watch(self, parameters: list[Tensor]) -> None:
        """Begin to sum gradients. `parameters` are all trainable ones of the run, low-precision or not."""
        self.on, self._parameters = True, parameters

    def begin(self) -> None:
        """Prepare for a backward: take back the sums that an earlier backward of this micro-step has handed over."""
        if not self._handed_over:
            return
        self._handed_over = False
        for parameter in list(self._sums):
            holder = self._holder(parameter)
            if holder.grad is None:
                del self._sums[parameter]  # cleared since
            elif holder is not parameter:
                self._sums[parameter] = holder.grad
            else:
                parameter.grad = None

    @torch.no_grad()
    def add(self) -> None:
        """After a backward: move its gradients into the sums; StepError for a sparse one."""
        parameters = [p for p in self._parameters if p.grad is not None and p.dtype in LOW]
        totals = added([p.grad for p in parameters], [self._sums.get(p) for p in parameters])
        for parameter, total in zip(parameters, totals):
            self._sums[parameter], parameter.grad = total, None

    @torch.no_grad()
    def average(self, over_ranks: Callable[[Sequence[Tensor]], None]) -> None:
        """Average the sums, and gradients in fp32 anyway, by `over_ranks`, in the same collectives on all ranks."""
        trainable = [p for p in self._parameters if p.requires_grad]
        if not trainable:
            return
        totals = [self._sums.get(p) if p.dtype in LOW else p.grad for p in trainable]
        present = torch.tensor([float(total is not None) for total in totals], device=trainable[0].device)
        averages = [
            torch.zeros_like(p, dtype=torch.float32 if p.dtype in LOW else p.dtype) if total is None else total
            for p, total in zip(trainable, totals)
        ]
        over_ranks([*averages, present])
        if all(total is not None for total in totals):
            return  # no wait for the device
        for parameter, total, average, share in zip(trainable, totals, averages, present.tolist()):
            if total is None and share > 0:
                if parameter.dtype in LOW:
                    self._sums[parameter] = average
                else:
                    parameter.grad = average

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """The fp32 sum of a parameter's gradients, or its ``.grad`` where there is no sum."""
        return self._sums.get(parameter, parameter.grad)

    def gradients(self) -> Iterator[Tensor]:
        """The sums."""
        return iter(self._sums.values())

    def hand_over(self) -> None:
        """At the end of a window: the sums become gradients."""
        for parameter, total in self._sums.items():
            holder = self._holder(parameter)
            holder.grad = total if holder is not parameter else total.to(parameter.dtype)
        self._handed_over = True

    def drop(self, parameters: Iterable[Tensor]) -> None:
        """Forget the sums of these: they have been stepped on, or cleared."""
        for parameter in parameters:
            self._sums.pop(parameter, None)

    def clear(self) -> None:
        """Forget everything, the models too."""
        self.on = self._handed_over = False
        self._parameters.clear()
        self._sums.clear()

    def _holder(self, parameter: Tensor) -> Tensor:
        return self._masters.get(id(parameter), parameter)


@dataclass(slots=True)
class Averages:
    """Exponential moving averages of one optimizer's parameters, where torch steps it.

    ema += (p - ema) × (1 - decay) at each step that moves p, from p's value before its first one ("Acceleration of
    Stochastic Approximation by Averaging", Polyak and Juditsky, 1992). It is "ema" in the optimizer's state, in fp32,
    split as the other states are, so checkpoints keep it as one of them.
    """

    # Of a parameter: the tensor that is stepped, and the mapping of its state.
    holder: Callable[[Tensor], tuple[Tensor, Any]]
    decay: float | None  # None: there are none

    def follow_step(
        self, parameters: Iterable[Tensor], step: Callable[[], Any], found_inf: Tensor | None = None
    ) -> Any:
        """`step()`, after which the averages of `parameters` that it moves follow, unless `found_inf` is above 0."""
        if self.decay is None:
            return step()
        holders = [(p, *self.holder(p)) for p in parameters]
        # The state of a parameter that has none is torch's to begin. An average in half precision would not move.
        without_average = [p for _, p, states in holders if EMA not in states.get(p, {})]
        first = {id(p): p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in without_average}
        result = step()
        # A closure may give some no gradient.
        moved = [(p, states) for parameter, p, states in holders if parameter.grad is not None]
        for p, states in moved:
            if id(p) in first:
                states[p][EMA] = first[id(p)]
        if moved:
            averages = [local(states[p][EMA]) for p, states in moved]
            weights = [local(p).detach().to(a.dtype) for (p, _), a in zip(moved, averages)]
            share: Any = 1.0 - self.decay
            if found_inf is not None:
                shares = {a.device: to_device((found_inf <= 0) * share, a.device) for a in averages}
                share = [shares[a.device].to(a.dtype) for a in averages]
            with torch.no_grad():
                torch._foreach_lerp_(averages, weights, share)
        return result

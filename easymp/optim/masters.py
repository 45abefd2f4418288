"""fp32 masters of low-precision parameters: what the optimizer steps in their place.

An update is often smaller than the spacing of half-precision numbers around a weight: added there it would vanish. So the optimizer
holds an fp32 copy of each fp16 or bf16 parameter ("Mixed Precision Training", Micikevicius et al., arXiv:1710.03740, section 3.1).
Gradients move to the copies before anything is done to them (unscaled, clipped, stepped on), and the parameters are the copies,
rounded, after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import cuda
from ..base.dtensor import local
from ..cuda import EMA

if TYPE_CHECKING:
    from ..cuda.casts import Adder

from typing import TYPE_CHECKING

from ..errors import StepError
from ..precision.mixed import LOW

if TYPE_CHECKING:
    from ..cuda.casts import Adder


class Masters:
    """The masters of one optimizer; its param groups hold them from here on, until `release`.

    A parameter that is written to from outside (``model.load_state_dict``, a broadcast) is noticed by its version, and its master
    takes the new values before the next step. Writing through ``.data`` is not noticed.

    Args:
        optimizer: its groups' low-precision parameters are replaced, in place; what it remembers of them moves along, in fp32.
        of: id of a parameter → its master; filled here, shared by the optimizers of a run.
        frozen: parameters that are frozen now get masters, too.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, of: dict[int, Tensor], frozen: bool = True) -> None:
        self._optimizer = optimizer
        self._frozen = frozen
        self._of = of
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._versions: list[int] = []
        self.low: dict[int, Tensor] = {}  # id of a master → its parameter
        self.take(optimizer.param_groups)

    @cached_property
    def _adder(self) -> Adder:
        return cuda.Adder()

    def take(self, groups: Iterable[dict[str, Any]]) -> None:
        """Put masters into these groups of the optimizer, for parameters that have none yet."""
        for group in groups:
            held = group["params"]
            for i, parameter in enumerate(held):
                if parameter.dtype in LOW and (parameter.requires_grad or self._frozen):
                    master = parameter.detach().to(torch.float32).requires_grad_(parameter.requires_grad)
                    self._pairs.append((parameter, master))
                    self._versions.append(parameter._version)
                    self._of[id(parameter)] = master
                    self.low[id(master)] = parameter
                    self._swap(parameter, master)
                    held[i] = master

    def _swap(self, old: Tensor, new: Tensor) -> None:
        if old in self._optimizer.state:
            state = self._optimizer.state.pop(old)
            self._optimizer.state[new] = {
                key: value.to(torch.float32) if isinstance(value, Tensor) and value.dtype in LOW else value
                for key, value in state.items()
            }

    @property
    def parameters(self) -> list[Tensor]:
        """Those that have a master here."""
        return [parameter for parameter, _ in self._pairs]

    @torch.no_grad()
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters, each with its master, which has taken over what was written to the parameter."""
        self._follow()
        return list(self._pairs)

    @torch.no_grad()
    def gather(self) -> None:
        """Move the parameters' gradients to their masters, where they add up.

        Raises:
            StepError: a sparse gradient.
        """
        self._follow()
        fresh = [(parameter, master) for parameter, master in self._pairs if parameter.grad is not None]
        if not fresh:
            return
        totals = added(self._adder, [p.grad for p, _ in fresh], [m.grad for _, m in fresh])
        for (parameter, master), total in zip(fresh, totals):
            master.grad, parameter.grad = total, None

    def _follow(self) -> None:
        changed = [
            i for i, (parameter, _) in enumerate(self._pairs) if parameter._version != self._versions[i]
        ]
        if changed:
            self._copy([self._pairs[i][1] for i in changed], [self._pairs[i][0] for i in changed])
            for i in changed:
                self._versions[i] = self._pairs[i][0]._version

    @torch.no_grad()
    def give_back(self) -> None:
        """After a step: the parameters become their masters, rounded, and the gradients, used up, are freed.

        Of a skipped step nothing comes back but what was there.
        """
        if self._pairs:
            self._copy([parameter for parameter, _ in self._pairs], [master for _, master in self._pairs])
        for i, (parameter, master) in enumerate(self._pairs):
            master.grad = None
            self._versions[i] = parameter._version

    def clear(self) -> None:
        """Drop gradients, wherever they are."""
        for parameter, master in self._pairs:
            parameter.grad = master.grad = None

    def release(self) -> None:
        """Give the optimizer its parameters back, with what it remembers of the masters."""
        back = {id(master): parameter for parameter, master in self._pairs}
        for group in self._optimizer.param_groups:
            held = group["params"]
            for i, master in enumerate(held):
                if id(master) in back:
                    parameter = held[i] = back[id(master)]
                    if master in self._optimizer.state:
                        self._optimizer.state[parameter] = self._optimizer.state.pop(master)
        for parameter, _ in self._pairs:
            self._of.pop(id(parameter), None)
        self._pairs.clear()
        self._versions.clear()
        self.low.clear()

    @staticmethod
    def _copy(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        torch._foreach_copy_([local(t) for t in to], [local(v) for v in values])


def added(adder: Adder, gradients: Sequence[Any], totals: Sequence[Tensor | None]) -> list[Tensor]:
    """fp32 `totals`, made where there is none, in the layouts of low-precision `gradients`, with these added to them.

    Raises:
        StepError: a sparse one.
    """
    if any(g.is_sparse for g in gradients):
        raise StepError(
            "a sparse gradient of a low-precision parameter cannot be summed in fp32: use Embedding(sparse=False), or keep the embedding's "
            "weights in fp32"
        )
    wide = [torch.empty_like(g, dtype=torch.float32) if t is None else t for g, t in zip(gradients, totals)]
    adder([local(g) for g in gradients], [local(w) for w in wide], [t is None for t in totals])
    return wide


# -- fp32 sums of low-precision gradients over an accumulation window.


class Sums:
    """The sums of one run.

    Attributes:
        on: whether there is a model that needs them; until then none of the methods need be called.

    Args:
        masters: id of a parameter → its master.
    """

    def __init__(self, masters: Mapping[int, Tensor]) -> None:
        self.on = False
        self._masters = masters
        self._parameters: list[Tensor] = []  # all that may train, low-precision or not
        self._sums: dict[Tensor, Tensor] = {}
        self._handed = False

    @cached_property
    def _adder(self) -> Adder:
        return cuda.Adder()

    def watch(self, model: nn.Module) -> bool:
        """Sum for `model`, too; returns whether it has trainable low-precision parameters."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._parameters += parameters
        needed = any(p.dtype in LOW for p in parameters)
        self.on |= needed
        return needed

    def begin(self) -> None:
        """Before a backward: sums that an earlier one of this micro-step has handed over are taken up again."""
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
        """After a backward: move its gradients into the sums.

        Raises:
            StepError: a sparse gradient.
        """
        fresh = [p for p in self._parameters if p.grad is not None and p.dtype in LOW]
        totals = added(self._adder, [p.grad for p in fresh], [self._sums.get(p) for p in fresh])
        for parameter, total in zip(fresh, totals):
            self._sums[parameter], parameter.grad = total, None

    @torch.no_grad()
    def average(self, over_ranks: Callable[[Sequence[Tensor]], None]) -> None:
        """Make the sums, and the gradients that are fp32 anyway, the mean over the ranks.

        A parameter that had no gradient on any rank still has none afterwards; all ranks go through the same collectives.

        Args:
            over_ranks: averages tensors in place.
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


# -- An exponential moving average of the weights, beside what the optimizer remembers of each parameter.


# A parameter → what is really stepped of it, and the mapping that its state is in.
Holder = Callable[[Tensor], tuple[Tensor, Any]]


class Averages:
    """The averages of one optimizer's parameters, where torch steps it.

    Args:
        holder: says of each parameter where its average goes.
        decay: None: there are none.
    """

    def __init__(self, holder: Holder, decay: float | None) -> None:
        self._holder, self.decay = holder, decay

    def around(
        self, parameters: Iterable[Tensor], step: Callable[[], Any], found_inf: Tensor | None = None
    ) -> Any:
        """`step()`, after which the averages of `parameters`, which it may move, follow them, unless `found_inf` is above 0."""
        if self.decay is None:
            return step()
        there = [(p, *self._holder(p)) for p in parameters]
        # The state of a parameter that has none is torch's to begin.
        new = {id(p): start(p) for _, p, states in there if EMA not in states.get(p, {})}
        result = step()
        # A closure may give some no gradient.
        held = [(p, states) for parameter, p, states in there if parameter.grad is not None]
        for p, states in held:
            if id(p) in new:
                states[p][EMA] = new[id(p)]
        if held:
            self._follow(
                [local(p) for p, _ in held], [local(states[p][EMA]) for p, states in held], found_inf
            )
        return result

    @torch.no_grad()
    def _follow(self, parameters: list[Tensor], averages: list[Tensor], found_inf: Tensor | None) -> None:
        assert self.decay is not None
        weights = [p.detach().to(a.dtype) for p, a in zip(parameters, averages)]
        share = 1.0 - self.decay
        if found_inf is None:
            torch._foreach_lerp_(averages, weights, share)
        else:
            shares = {a.device: ((found_inf <= 0) * share).to(a.device, non_blocking=True) for a in averages}
            torch._foreach_lerp_(averages, weights, [shares[a.device].to(a.dtype) for a in averages])


def start(parameter: Tensor) -> Tensor:
    """An average that begins."""
    now = parameter.detach()
    return now.to(torch.float32) if now.dtype in LOW else now.clone(memory_format=torch.preserve_format)


def without(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """Optimizer states, by whatever they go, without averages; the very same dicts where there were none."""
    kept = {}
    for key, state in states.items():
        has = isinstance(state, Mapping) and EMA in state
        kept[key] = {name: value for name, value in state.items() if name != EMA} if has else state
    return kept

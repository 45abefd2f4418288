"""fp32 masters of low-precision parameters: what the optimizer steps in their place.

An update is often smaller than the spacing of half-precision numbers around a weight: added there it would vanish. So the optimizer
holds an fp32 copy of each fp16 or bf16 parameter ("Mixed Precision Training", Micikevicius et al., arXiv:1710.03740, section 3.1).
Gradients move to the copies before anything is done to them (unscaled, clipped, stepped on), and the parameters are the copies,
rounded, after each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import cuda
from ..base.dtensor import local
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

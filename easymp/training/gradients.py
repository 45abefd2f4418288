"""The gradients of an update, of all prepared optimizers: summed, averaged, watched, unscaled and clipped.

`begin_backward` and `end_backward` enclose each backward pass; `clip`, `clamp` and `unscale` act on what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import optim
from ..base.accumulation import MicroStep, Phase
from ..base.dtensor import local
from ..errors import StepError
from .state import Run

if TYPE_CHECKING:
    from ..optim.optimizer import PreparedOptimizer
    from .prepare import Preparation


class Gradients:
    """What one run does to gradients between a backward and the step of its prepared optimizers."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._prepared: Preparation = run.prepared
        # Decided at each backward: whether changes of gradients are looked for, and whether sums are kept in fp32.
        self._watches = self._sums_window = False
        self._plain_micro_step = MicroStep(run.window)

    def micro_step(self, models: Sequence[nn.Module], sync_each_batch: bool) -> MicroStep:
        """The context of one micro-step of `accumulate`."""
        run, prepared = self._run, self._prepared
        if run.window.accumulation != 1 and not prepared.refuses_unprepared:
            prepared.refuse_unprepared()
        if run.world.size == 1 or sync_each_batch:
            return self._plain_micro_step
        modules = [route.module for route in prepared.routes(models)]
        return MicroStep(
            run.window, prepared.strategy.no_sync, modules, prepared.sums.on and run.window.accumulation != 1
        )

    # -- backward

    def begin_backward(self, create_graph: bool) -> Callable[[], None] | None:
        """Check what the script did to gradients since the last backward, and make ready for the next one.

        Returns the check to run after a backward that reduces gradients, if any; it raises where some are not reduced.
        """
        run, prepared = self._run, self._prepared
        window, world = run.window, run.world
        accumulates = window.accumulation != 1
        self._watches = (
            prepared.shares_gradients
            or run.scaler.scales
            or bool(prepared.masters)
            or "change of gradients" in run.refused
        )
        for optimizer in prepared.optimizers:
            if accumulates or self._watches:
                optimizer.check_before_backward()
            if optimizer.turn.phase is not Phase.ACCUMULATING:
                optimizer.resume_accumulating()
        window.backwards += 1
        if run.scaler.enabled and run.scaler.has_stepped():
            self._update_scale()
        self._sums_window = accumulates and prepared.sums.on
        if self._sums_window:
            prepared.sums.begin()
        if world.size == 1:
            return None
        world.note_training_thread()
        if not window.sync or window.ranks_differ or self._sums_window:
            return None
        return prepared.strategy.after_backward([route.module for route in prepared.models], create_graph)

    def _update_scale(self) -> None:
        """Let the loss scale follow the last steps, and gradients that no step has used follow the loss scale."""
        scaler, optimizers = self._run.scaler, self._prepared.optimizers
        waiting = [o for o in optimizers if o.turn.phase is Phase.ACCUMULATING and not o.turn.spent]
        if not (waiting and scaler.scales):
            scaler.update()
            return
        before = torch.as_tensor(scaler.current_scale).clone()
        scaler.update()
        for optimizer in waiting:
            optimizer.multiply_gradients(scaler.current_scale / before)

    def end_backward(self, sync_each_batch: bool) -> None:
        """Add gradients up, average them, and divide them by the items of the window, as the micro-step asks for."""
        window, world, prepared = self._run.window, self._run.world, self._prepared
        if self._sums_window:
            prepared.sums.add()
            if window.sync and world.size > 1 and not sync_each_batch and not window.ranks_differ:
                modules = [route.module for route in prepared.models]
                prepared.sums.average(partial(prepared.strategy.average, modules))
        if window.sync and window.counts_items:
            window.finish_items(self._all(), world)
        if window.sync and self._sums_window:
            prepared.sums.hand_over()
            self.show(prepared.optimizers)
        if self._watches or not window.sync:
            self.watch()

    def _all(self) -> Iterator[Tensor]:
        """All gradients of prepared models' parameters, fp32 sums among them."""
        for route in self._prepared.models:
            yield from (p.grad for p in route.original.parameters() if p.grad is not None)
        yield from self._prepared.sums.gradients()

    def final(self) -> list[tuple[Tensor, Tensor]]:
        """The parameters that optimizers step, each with its gradient, at the end of a window."""
        pairs = []
        for optimizer in self._prepared.optimizers:
            for stepped, parameter in optimizer.parameters():
                gradient = parameter.grad if stepped.grad is None else stepped.grad
                if gradient is not None:
                    pairs.append((parameter, gradient))
        return pairs

    # -- changes of gradients by the script

    def watch(self) -> None:
        """Note the gradients that backward left: the step refuses changes of them that would train wrongly."""
        scaler, prepared = self._run.scaler, self._prepared
        refusal = scaler.refuse_changes if scaler.scales else self._refusal_of_changes()
        for optimizer in prepared.optimizers:
            optimizer.watch_gradients(refusal, prepared.shares_gradients)

    def _refusal_of_changes(self) -> Callable[[], str] | None:
        """Says why a script may not change `.grad` by itself, where the strategy does not allow that."""
        refusal = self._run.refused.get("change of gradients")
        return None if refusal is None else lambda: refusal

    def accept(self) -> None:
        """Accept changes of gradients since `watch`, for a caller that knows how they are scaled."""
        for optimizer in self._prepared.optimizers:
            optimizer.accept_gradients()

    def show(self, optimizers: Iterable[Optimizer]) -> None:
        """Let the script read, and mostly change, gradients of `optimizers` that easymp has just changed in memory."""
        refusal = self._refusal_of_changes()
        if not self._prepared.masters and refusal is None:
            return
        for optimizer in optimizers:
            if isinstance(optimizer, optim.PreparedOptimizer):
                optimizer.show_gradients()
                if refusal is not None:
                    optimizer.watch_gradients(refusal)

    # -- clips

    def clip(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float
    ) -> tuple[Tensor, list[Tensor]]:
        """Clip gradients, in memory or as steps read them; returns the norm before and the optimizers' parameters."""
        clipped, prepared = self._stepped(parameters), self._prepared
        optimizers = self._optimizers_of_exactly(clipped) if norm_type == 2 else []
        if optimizers and optim.can_clip_in_step(optimizers):
            return optim.clip_in_step(optimizers, max_norm, self._run.scaler), clipped
        norm = prepared.strategy.clip(self._unscaled(clipped), max_norm, norm_type)
        self.show(prepared.optimizers)
        return norm, clipped

    def clamp(self, parameters: Iterable[Tensor] | Tensor, limit: float) -> None:
        """Clamp every element of the gradients to [-limit, limit]."""
        gradients = []
        for parameter in self._unscaled(self._stepped(parameters)):
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()  # so that a row of several parts is clamped whole
                gradients.append(parameter.grad._values())
            elif parameter.grad is not None:
                gradients.append(local(parameter.grad))
        if gradients:
            torch._foreach_clamp_min_(gradients, -limit)
            torch._foreach_clamp_max_(gradients, limit)
        self.show(self._prepared.optimizers)

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divide the gradients of `optimizers`, prepared or not, by the loss scale in memory, and clip as asked."""
        for optimizer in optimizers:
            if isinstance(optimizer, optim.PreparedOptimizer):
                optimizer.check_gradients()
                optimizer.apply_clip()
                optimizer.gather(in_memory=True)
                optimizer = optimizer.optimizer
            self._run.scaler.ensure_unscaled(optimizer)

    def _stepped(self, parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
        """`parameters`, or their fp32 masters with the gradients, as optimizers hold them."""
        listed, masters = [parameters] if isinstance(parameters, Tensor) else list(parameters), self._prepared.masters
        if self._watches:
            for optimizer in self._prepared.optimizers:
                optimizer.check_gradients()
        if not masters:
            return listed
        holders = [masters.get(id(p), p) for p in listed]
        for optimizer in self._prepared.optimizers_of(holders):
            optimizer.gather()
        return holders

    def _unscaled(self, parameters: list[Tensor]) -> list[Tensor]:
        """Unscale the gradients of `parameters` in memory, and apply earlier clips; returns `parameters`."""
        scaler, prepared = self._run.scaler, self._prepared
        pending = any(optimizer.turn.clip is not None for optimizer in prepared.optimizers)
        if scaler.enabled or prepared.masters or pending:
            optimizers = prepared.optimizers_of(parameters)
            if scaler.scales:
                self._refuse_unstepped(parameters, optimizers)
            self.unscale(optimizers)
        return parameters

    def _refuse_unstepped(self, parameters: list[Tensor], optimizers: Sequence[PreparedOptimizer]) -> None:
        """Raise StepError under a loss scale where `optimizers` do not step all of `parameters` that have gradients."""
        stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        unstepped = [p for p in parameters if p.grad is not None and id(p) not in stepped]
        if unstepped:
            name = self._prepared.owner.get(id(unstepped[0]), "one of them")
            raise StepError(
                f"a clip of {len(parameters)} parameters under a loss scale: {len(unstepped)} of them ({name!r} …) "
                "have gradients and are in no prepared optimizer, so that nothing divides these gradients by the "
                "loss scale. Pass the parameters that optimizers step, or call requires_grad_(False) on the others"
            )

    def _optimizers_of_exactly(self, parameters: Sequence[Tensor]) -> list[PreparedOptimizer]:
        """The optimizers that together step exactly these; none where there are none, or such clips gain nothing."""
        if not any(optimizer.engine.worth() for optimizer in self._prepared.optimizers):
            return []
        optimizers, stepped = [], set[int]()
        trained = {id(p) for p in parameters if p.requires_grad or p.grad is not None}
        for optimizer in self._prepared.optimizers:
            own_parameters = (p for group in optimizer.param_groups for p in group["params"])
            own_trained = {id(p) for p in own_parameters if p.requires_grad or p.grad is not None}
            if own_trained & trained:
                stepped |= own_trained
                optimizers.append(optimizer)
        return optimizers if stepped == trained else []

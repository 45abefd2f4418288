"""Strategy "auto", once it is known what must fit: the arithmetic of the first models decides, before they are wrapped.

Models that come later change nothing: what is spread stays as it is, and the log says when memory is short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..base.units import size
from ..logging import get_logger
from ..plan import AUTO, candidates, room
from ..protocols import Precision, Strategy
from ..strategies import STRATEGIES
from .memory import FP32, SPARE, Memory, by_memory, estimate, fits
from .state import Run

logger = get_logger(__name__)


class Fitting:
    """What a run's models need, beside what a rank has.

    Args:
        free: whether another strategy may be taken; False where options of the planned one were given.
    """

    def __init__(self, run: Run, precision: Precision, free: bool) -> None:
        self._run, self._precision, self._free = run, precision, free
        self._planned = run.plan.strategy
        self._needs: Memory | None = None  # of all models so far

    def choose(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], strategy: Strategy
    ) -> Strategy:
        """The strategy for `models`, none of which is wrapped: another than `strategy` only where these are the first.

        All ranks call it with alike models; for the first ones that takes a collective.
        """
        plan, world = self._run.plan, self._run.world
        if plan.settings.strategy != AUTO or not models:
            return strategy
        if self._needs is not None:
            self._needs += self._need(strategy.name, models, optimizers)
            if not fits(self._needs, room(plan)):
                short = by_memory({strategy.name: self._needs}, room(plan)).reason
                logger.warning(
                    "strategy %s stays, for models are wrapped already; with this one %s",
                    strategy.name,
                    short,
                )
            return strategy
        names = candidates(plan) if self._free else iter([strategy.name])
        first = next(names)
        seen = world.gather_objects((room(plan), self._need(first, models, optimizers)))
        available, needs = min(have for have, _ in seen), {first: seen[0][1]}  # the same figures on all ranks
        choice = self._planned
        if not fits(needs[first], available):
            needs.update({name: self._need(name, models, optimizers) for name in names})
            choice = by_memory(needs, available)
            if not self._free:
                choice = replace(
                    choice, reason=f"{choice.reason}; options of {choice.value} were given, so it stays"
                )
            tell = logger.info if fits(needs[choice.value], available) else logger.warning
            tell("strategy %s: %s", choice.value, choice.reason)
        self._needs = needs[choice.value]
        self._run.plan = plan.replace(strategy=choice)
        if choice.value == strategy.name:
            return strategy
        kind = STRATEGIES[choice.value]
        return kind(world, kind.Options())  # type: ignore[call-arg]

    def reduce_early(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        strategy: Strategy,
        say: bool,
    ) -> None:
        """Settle whether `strategy` reduces gradients at each micro-batch, where its options leave that open; a collective.

        Args:
            say: micro-batches are accumulated, and the plan tells how.
        """
        words = ""
        if strategy.early is None and models:
            need = self._need(strategy.name, models, optimizers, strategy.options)
            whole = sum(p.numel() * FP32 for model in models for p in model.parameters() if p.requires_grad)
            available = min(self._run.world.gather_objects(room(self._run.plan)))
            strategy.early = not fits(replace(need, reducing=need.reducing + whole), available)
            words = f": {size(whole)} of whole gradients {'do not fit' if strategy.early else 'fit'} beside {size(need.total)} a rank of "
            words += f"{size(int(available * (1 - SPARE)))}"
        plan = self._run.plan
        if (
            say
            and models
            and STRATEGIES[strategy.name].sharded
            and "gradients" not in plan.accumulation.reason
        ):
            way = (
                "gradients are reduced to shards at each"
                if strategy.early
                else "gradients stay whole and are reduced at the last"
            )
            choice = plan.accumulation
            self._run.plan = plan.replace(
                accumulation=replace(choice, reason=f"{choice.reason}; {way}{words}")
            )

    def forget(self) -> None:
        """The models are let go of: the next ones are the first again."""
        self._needs = None

    def _need(
        self,
        name: str,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        options: Any = None,
    ) -> Memory:
        world, total = self._run.world, None
        for model in models:
            own = {id(p) for p in model.parameters()}
            mine = [
                o
                for o in optimizers
                if any(id(p) in own for group in o.param_groups for p in group["params"])
            ]
            one = estimate(
                model,
                strategy=name,
                precision=self._precision,
                world=world.size,
                per_node=world.local_size,
                optimizer=mine or "adamw",  # prepared later: taken for the usual one
                options=options,
                averages=self._run.plan.settings.ema_decay is not None,
            )
            total = one if total is None else total + one
        assert total is not None, "there are models"
        return total

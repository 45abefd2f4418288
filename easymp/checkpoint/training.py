"""What a checkpoint keeps of a training: models, the optimizers that step them, their schedulers, the loss scale."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from ..optim import PreparedOptimizer, PreparedScheduler
from ..precision import Scaler
from .models import ModelState
from .names import canonical
from .objects import ScaleState, ScheduleState
from .optimizers import OptimizerState
from .snapshot import Kept


def numbered(word: str, number: int) -> str:
    """``"model"``, ``"model_1"`` …"""
    return f"{word}_{number}" if number else word


def kept_of(
    models: Sequence[nn.Module],
    optimizers: Sequence[PreparedOptimizer],
    schedulers: Sequence[PreparedScheduler],
    scaler: Scaler,
    mastered: Collection[int] = (),
    apart: bool = False,
) -> list[Kept]:
    """In the order in which it is put back: masters after the parameters that they round to, schedules after what they count.

    Args:
        models: the user's own modules, as a strategy left them.
        mastered: ids of parameters that have masters.
        apart: whether optimizers remember something else on each rank.
    """
    names = [numbered("model", i) for i in range(len(models))]
    owner = {
        id(p): f"{name}/{canonical(n)}"
        for name, model in zip(names, models)
        for n, p in model.named_parameters()
    }
    return [
        *(ModelState(name, model, mastered) for name, model in zip(names, models)),
        *(
            OptimizerState(numbered("optimizer", i), optimizer, owner, apart)
            for i, optimizer in enumerate(optimizers)
        ),
        *(ScheduleState(f"scheduler_{i}", scheduler) for i, scheduler in enumerate(schedulers)),
        ScaleState(scaler),
    ]

"""What an Accelerator does about checkpoints: it says what is kept, and where."""

from __future__ import annotations

import os
from typing import Any

from .checkpoint.loading import load
from .checkpoint.local import LocalStorage
from .checkpoint.models import ModelState
from .checkpoint.objects import ObjectState
from .checkpoint.optimizers import OptimizerState
from .checkpoint.saves import Saves
from .checkpoint.saving import Target
from .checkpoint.snapshot import Kept
from .errors import StepError
from .precision import Scaler
from .preparing import Preparation
from .state import Run


def numbered(word: str, number: int) -> str:
    """``"model"``, ``"model_1"`` …"""
    return f"{word}_{number}" if number else word


class Checkpointing:
    """save_state, load_state, and what belongs to them."""

    _run: Run
    _prepared: Preparation
    _scaler: Scaler
    _saves: Saves

    def _kept(self) -> list[Kept]:
        """All that a checkpoint keeps, in the order in which it is put back."""
        prepared = self._prepared
        kept: list[Kept] = []
        owner: dict[int, str] = {}
        for i, model in enumerate(prepared.models):
            prefix = f"{numbered('model', i)}." if i else ""
            owner.update((id(p), prefix + name) for name, p in model.route.original.named_parameters())
            kept.append(ModelState(numbered("model", i), model.route.original))
        for i, optimizer in enumerate(prepared.optimizers):
            kept.append(OptimizerState(numbered("optimizer", i), optimizer, owner))
        for i, scheduler in enumerate(prepared.schedulers):
            kept.append(ObjectState(f"scheduler_{i}", scheduler))
        for i, loader in enumerate(prepared.loaders):
            kept.append(ObjectState(f"loader_{i}", loader))
        kept.append(ObjectState("scaler", self._scaler))
        return kept

    def save_state(self, path: str | os.PathLike[str]) -> str:
        """Write a checkpoint to the folder `path`; returns it."""
        clock = self._run.clock
        if clock.accumulation != 1 and not clock.sync:
            raise StepError(
                f"save_state() in micro-step {clock.micro} of {clock.accumulation}: gradients of an unfinished window are "
                "not kept. Save where accelerator.sync_gradients is true, after the optimizer's step"
            )
        parent, name = os.path.split(os.path.abspath(path))
        step = max((o.updates for o in self._prepared.optimizers), default=0)
        self._saves.save(Target(LocalStorage(parent), name, step, self._run.plan.as_dict()), self._kept())
        return str(path)

    def load_state(self, path: str | os.PathLike[str]) -> Any:
        """Put the checkpoint in the folder `path` into all that is prepared."""
        parent, name = os.path.split(os.path.abspath(path))
        return load(self._run.world, LocalStorage(parent), name, self._kept())

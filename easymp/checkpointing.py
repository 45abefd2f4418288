"""What an Accelerator does about checkpoints: it says what is kept, and where."""

from __future__ import annotations

import os

from .checkpoint.loading import Loaded, load
from .checkpoint.local import LocalStorage
from .checkpoint.objects import ObjectState
from .checkpoint.saves import Saves
from .checkpoint.saving import Target
from .checkpoint.snapshot import Kept
from .checkpoint.training import kept_of
from .errors import StepError
from .precision import Scaler
from .preparing import Preparation
from .state import Run


class Checkpointing:
    """save_state, load_state, and what belongs to them."""

    _run: Run
    _prepared: Preparation
    _scaler: Scaler
    _saves: Saves

    def _kept(self) -> list[Kept]:
        """All that a checkpoint keeps, in the order in which it is put back."""
        prepared = self._prepared
        self._scaler.settle()
        kept = kept_of(
            [model.route.original for model in prepared.models],
            prepared.optimizers,
            prepared.schedulers,
            self._scaler,
            prepared.masters.keys(),
            prepared.strategy.apart,
        )
        for i, loader in enumerate(prepared.loaders):
            kept.append(ObjectState(f"loader_{i}", loader))
        return kept

    def save_state(self, path: str | os.PathLike[str]) -> str:
        """Write a checkpoint to the folder `path`; returns it."""
        clock = self._run.clock
        if clock.accumulation != 1 and not clock.sync:
            raise StepError(
                f"save_state() in micro-step {clock.micro} of {clock.accumulation}: gradients of an unfinished window are "
                "not kept. Save where accelerator.sync_gradients is true, after the optimizer's step"
            )
        self._run.world.settle()
        parent, name = os.path.split(os.path.abspath(path))
        step = max((o.updates for o in self._prepared.optimizers), default=0)
        self._saves.save(Target(LocalStorage(parent), name, step, self._run.plan.as_dict()), self._kept())
        return str(path)

    def load_state(self, path: str | os.PathLike[str], strict: bool = True) -> Loaded:
        """Put the checkpoint in the folder `path` into all that is prepared.

        Args:
            strict: False loads what fits; what is skipped is in the log, and in `Loaded.skipped`.
        """
        parent, name = os.path.split(os.path.abspath(path))
        return load(self._run.world, LocalStorage(parent), name, self._kept(), strict)

"""A folder of Accelerate's `save_state`, told in the words of our own checkpoints, so that it goes the same way into what is live.

What it says by order (parameters of an optimizer, objects of a run) is taken in the order of what is live here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .accelerate_folder import AccelerateStates, read_accelerate
from .boxes import whole
from .local import LocalStorage
from .manifest import Manifest
from .names import canonical
from .optimizers import OptimizerState
from .renumbered import by_name, named_as, streams_of, tied
from .slabs import Want
from .snapshot import Reading
from .storage import Tick, nothing
from .stored import Piece, Stored
from .training import numbered
from .trees import pack

LOADERS = "where loaders stood (Accelerate's folders do not say it; go on with skip_first_batches)"


class Translated(Reading):
    """Such a folder, all of it in memory.

    Args:
        models: those that take the weights, in the order in which they were prepared.
        optimizers: likewise.
        seed: of the run that loads.
        options: of `read_accelerate`, which says what they risk.

    Raises:
        CheckpointError: as `read_accelerate`; or an optimizer that had other param groups.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        models: Sequence[nn.Module],
        optimizers: Sequence[OptimizerState],
        seed: int,
        rank: int = 0,
        strict: bool = True,
        **options: Any,
    ) -> None:
        found = read_accelerate(folder, **options)
        self._tensors: dict[str, Tensor] = {}
        states, aliases = self._states(found, models, optimizers, seed)
        tensors = {
            name: Stored(t.dtype, tuple(t.shape), (Piece(whole(tuple(t.shape)), name, 0),))
            for name, t in self._tensors.items()
        }
        step = max((states[o.name]["updates"] for o in optimizers if o.name in states), default=0)
        manifest = Manifest(step, max(len(found.rng), 1), "", "Accelerate", {}, tensors, {}, states, aliases)
        super().__init__(LocalStorage(folder), "", manifest, rank, strict, again=True)

    def run(self, tick: Tick = nothing) -> None:
        self._refill(self._wanted)
        self._wanted.clear()

    def _refill(self, wants: Sequence[Want]) -> None:
        with torch.no_grad():
            for want in wants:
                want.into.copy_(self._within(want))

    def _within(self, want: Want) -> Tensor:
        values = self._tensors[want.stored.pieces[0].file]
        for dim, (offset, count) in enumerate(zip(want.box.offset, want.box.shape)):
            values = values.narrow(dim, offset, count)
        return values

    def _pack(self, name: str, value: Any) -> Any:
        return pack(value, name, self._tensors)

    def _states(
        self,
        found: AccelerateStates,
        models: Sequence[nn.Module],
        optimizers: Sequence[OptimizerState],
        seed: int,
    ) -> tuple[dict[str, Any], dict[str, str]]:
        trees: dict[str, Any] = {}
        aliases: dict[str, str] = {}
        for i, weights in enumerate(found.models):
            name = numbered("model", i)
            live = models[i].state_dict(keep_vars=True) if i < len(models) else {}
            trees[name] = named_as({canonical(n) for n in live}, weights)
            aliases |= {f"{name}/{n}": f"{name}/{of}" for n, of in tied(live, trees[name])}
        for i, state in enumerate(found.optimizers):
            name = numbered("optimizer", i)
            if i < len(optimizers):
                trees[name], trees[f"{name}/state"] = by_name(state, optimizers[i])
                trees[f"{name}/masters"] = {}
            else:
                trees[name] = {}  # nobody takes it, which is said
        trees |= {f"state/scheduler_{i}": state for i, state in enumerate(found.schedulers)}
        trees |= {f"state/object_{i}": state for i, state in enumerate(found.custom)}
        if found.scaler:
            trees["state/scaler"] = found.scaler
        for rank, streams in found.rng.items():
            slices = {"data_rank": rank, "data_size": len(found.rng), "seed": seed}
            trees[f"ranks/{rank:05d}/state/random"] = {**slices, "streams": streams_of(streams)}
        return {name: self._pack(name, tree) for name, tree in trees.items()}, aliases

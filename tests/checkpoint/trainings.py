"""Trainings that are saved in one run and continued in another, and their states as digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from easymp import Accelerator, GradScalerKwargs
from easymp.checkpoint.storage import as_bytes

from ..strategies.models import BATCH, MODELS, train_step, whole
from ..strategies.ways import WAYS

SCALE = GradScalerKwargs(init_scale=1024.0, growth_interval=3)  # grows on the way
BEFORE, AFTER = 2, 2  # updates before the save, and after it


def entropy(outputs: Any, y: Any) -> Any:
    return nn.functional.cross_entropy(outputs.float(), y)


class Row(NamedTuple):
    """One training: a label of WAYS, a kind of model, and so on."""

    way: str
    kind: str = "mlp"
    precision: str = "no"
    accumulation: int = 1
    size: int = 2

    @property
    def name(self) -> str:
        return "-".join(map(str, self)).replace(" ", "_")


class Training:
    """A model, an AdamW (SGD under O3, whose fp16 has no number as small as AdamW's epsilon) and a schedule, prepared."""

    def __init__(self, row: Row, seed: int = 3) -> None:
        way = WAYS[row.way]
        self.acc = Accelerator(
            mixed_precision=row.precision,
            strategy=way.strategy,
            strategy_options={**way.options, **way.more.get(row.kind, {})},
            gradient_accumulation_steps=row.accumulation,
            convert_sync_batchnorm=True,
            kwargs_handlers=[SCALE],
            probe=False,
            timeout=50,
        )
        torch.manual_seed(seed)
        model = MODELS[row.kind]()
        given = list(model.parameters())
        optimizer: Any = torch.optim.AdamW(given, 0.01)
        if row.precision == "O3":
            optimizer = torch.optim.SGD(given, 0.05, momentum=0.9)
        schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, 20)
        self.model, self.optimizer, self.schedule = self.acc.prepare(model, optimizer, schedule)

    def run(self, begin: int, end: int) -> list[float]:
        """The losses of updates `begin` to `end`, whose batches are always the same."""
        acc, spread, losses = self.acc, self.acc._prepared.strategy, []
        for update in range(begin, end):
            generator = torch.Generator().manual_seed(update)
            total = torch.zeros(())
            for _ in range(acc.gradient_accumulation_steps):
                x = torch.randn(BATCH, 12, generator=generator)
                y = torch.randint(0, 5, (BATCH,), generator=generator)
                x, y = (t.chunk(spread.data_size)[spread.data_rank] for t in (x, y))
                with acc.accumulate(self.model):
                    total += train_step(acc, self.model, entropy, x, y)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
            losses.append(float(acc.reduce(total, "mean")))
        return losses

    def state(self) -> dict[str, Any]:
        """Digests of all tensors, whole, as far as they are here; and what else must be the same."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        masters = self.optimizer.masters
        names.update((id(master), names[id(p)]) for p, master in masters)
        found = dict(digests(self.model.state_dict(keep_vars=True), "model"))
        found |= dict(digests({names[id(p)]: master for p, master in masters}, "master"))
        for parameter, state in self.optimizer.state.items():
            found |= dict(digests(state, f"state/{names[id(parameter)]}"))
        group, mine = self.optimizer.param_groups[0], ("params", "fused", "foreach")
        found["group"] = {key: value for key, value in group.items() if key not in mine}
        return {**found, "schedule": self.schedule.state_dict(), "scale": self.acc.scaler.state_dict()}


def digests(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Tensor) and not value.is_meta:
            full = whole(value).resolve_conj().contiguous().cpu()
            digest = hashlib.sha256(as_bytes(full)).hexdigest()[:16]
            yield f"{prefix}/{name}", (str(full.dtype), tuple(full.shape), digest)
        elif not isinstance(value, Tensor):
            yield f"{prefix}/{name}", value


def saved(rows: Sequence[Row], folder: Path) -> list[tuple[dict[str, Any], list[float]]]:
    """Train each row, save, go on: the state when saved, and the losses that followed."""
    found = []
    for row in rows:
        run = Training(row)
        with run.acc:
            run.run(0, BEFORE)
            run.acc.save_state(folder / row.name)
            state = run.state()
            found.append((state, run.run(BEFORE, BEFORE + AFTER)))
    return found


def loaded(before: Sequence[Row], after: Row, folder: Path) -> list[tuple[dict[str, Any], list[float]]]:
    """Load one checkpoint after the other into one training, built with another seed, and go on from each."""
    found = []
    run = Training(after, seed=11)
    with run.acc:
        for row in before:
            run.acc.load_state(folder / row.name)
            state = run.state()
            found.append((state, run.run(BEFORE, BEFORE + AFTER)))
    return found


def all_loaded(tables: Sequence[tuple[Sequence[Row], Row]], folder: Path) -> list[Any]:
    return [loaded(before, after, folder) for before, after in tables]


def saved_and_loaded(rows: Sequence[Row], folder: Path) -> list[Any]:
    """Both, in the same processes."""
    return list(zip(saved(rows, folder), [loaded([row], row, folder)[0] for row in rows]))


def union(states: Sequence[Mapping[str, Any]], apart: bool = False) -> dict[str, Any]:
    """All ranks' states as one; what several have is the same on all of them, but for what local_sgd remembers."""
    together: dict[str, Any] = {}
    for state in states:
        for name, value in state.items():
            if together.setdefault(name, value) != value:
                assert apart and name.startswith("state/"), f"{name} differs between the ranks"
    return together


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first names whose values are not the same, in words."""
    apart = [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
    return f"{len(apart)} differ: {[(n, one.get(n), other.get(n)) for n in apart[:3]]}" if apart else None

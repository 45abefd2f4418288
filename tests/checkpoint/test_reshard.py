"""A training goes on from a checkpoint.

Bit for bit where it runs as before, and from the same values everywhere else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from easymp import Accelerator, GradScalerKwargs, Settings
from easymp.checkpoint.buffers import as_bytes

from ..strategies.models import BATCH, MODELS, train_step, whole
from ..strategies.ways import WAYS

SCALE = GradScalerKwargs(init_scale=1024.0, growth_interval=3)  # grows on the way
BEFORE, AFTER = 2, 2  # updates before the save, and after it


def entropy(outputs: Any, y: Any) -> Any:
    return nn.functional.cross_entropy(outputs.float(), y)


class Row(NamedTuple):
    """One training: a label of WAYS, a kind of model, and so on."""

    label: str
    kind: str = "mlp"
    precision: str = "no"
    accumulation: int = 1
    size: int = 2

    @property
    def name(self) -> str:
        return "-".join(map(str, self)).replace(" ", "_")


class Training:
    """A prepared model, AdamW (SGD under O3, whose fp16 cannot hold AdamW's epsilon) and a schedule."""

    def __init__(self, row: Row, seed: int = 3) -> None:
        setup = WAYS[row.label]
        self.acc = Accelerator(
            mixed_precision=row.precision,
            strategy=setup.strategy,
            strategy_options={**setup.options, **setup.more.get(row.kind, {})},
            gradient_accumulation_steps=row.accumulation,
            settings=Settings(convert_sync_batchnorm=True, scaler_options=SCALE, timeout=50),
        )
        torch.manual_seed(seed)
        model = MODELS[row.kind]()
        parameters = list(model.parameters())
        optimizer: Any = torch.optim.AdamW(parameters, 0.01)
        if row.precision == "O3":
            optimizer = torch.optim.SGD(parameters, 0.05, momentum=0.9)
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
        digests_by_name = dict(digests(self.model.state_dict(keep_vars=True), "model"))
        digests_by_name |= dict(digests({names[id(p)]: master for p, master in masters}, "master"))
        for parameter, state in self.optimizer.state.items():
            digests_by_name |= dict(digests(state, f"state/{names[id(parameter)]}"))
        group, local_options = self.optimizer.param_groups[0], ("params", "fused", "foreach")
        digests_by_name["group"] = {key: value for key, value in group.items() if key not in local_options}
        return {**digests_by_name, "schedule": self.schedule.state_dict(), "scale": self.acc.scaler.state_dict()}


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
    results = []
    for row in rows:
        run = Training(row)
        with run.acc:
            run.run(0, BEFORE)
            state = run.state()
            run.acc.save_state(folder / row.name, async_=True)  # the steps that follow change none of it
            results.append((state, run.run(BEFORE, BEFORE + AFTER)))
    return results


def loaded(before: Sequence[Row], after: Row, folder: Path) -> list[tuple[dict[str, Any], list[float]]]:
    """Load one checkpoint after the other into one training, built with another seed, and go on from each."""
    results = []
    run = Training(after, seed=11)
    with run.acc:
        for row in before:
            run.acc.load_state(folder / row.name)
            state = run.state()
            results.append((state, run.run(BEFORE, BEFORE + AFTER)))
    return results


def all_loaded(tables: Sequence[tuple[Sequence[Row], Row]], folder: Path) -> list[Any]:
    return [loaded(before, after, folder) for before, after in tables]


def saved_and_loaded(rows: Sequence[Row], folder: Path) -> list[Any]:
    """Both, in the same processes."""
    return list(zip(saved(rows, folder), [loaded([row], row, folder)[0] for row in rows]))


def union(states: Sequence[Mapping[str, Any]], may_differ: bool = False) -> dict[str, Any]:
    """All ranks' states as one; what several have is the same on all of them, but for what local_sgd remembers."""
    merged: dict[str, Any] = {}
    for state in states:
        for name, value in state.items():
            if merged.setdefault(name, value) != value:
                assert may_differ and name.startswith("state/"), f"{name} differs between the ranks"
    return merged


def difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> str | None:
    """The first names whose values are not the same, in words."""
    differing = [name for name in sorted(first.keys() | second.keys()) if first.get(name) != second.get(name)]
    return (
        f"{len(differing)} differ: {[(n, first.get(n), second.get(n)) for n in differing[:3]]}" if differing else None
    )


SIZES = (1, 2, 4)
KINDS = ("conv", "tied", "idle")  # the fourth, "mlp", accumulates
HALF = ("bf16", "fp16", "O2", "O3", "auto")
WITHOUT_MASTERS = ("pipeline", "local_sgd")  # refuse O2


def labels_of(size: int) -> list[str]:
    return [label for label, setup in WAYS.items() if size in setup.sizes]


def rows_of(size: int) -> list[Row]:
    """Each way with each kind of model, with each precision, and with accumulation."""
    rows = [Row(label, "mlp", "no", 3, size) for label in labels_of(size)]
    for (i, label), (j, precision) in product(enumerate(labels_of(size)), enumerate(("no", *HALF))):
        refused = precision == "O2" and WAYS[label].strategy in WITHOUT_MASTERS
        if not refused and (precision != "auto" or size == 1):
            rows.append(Row(label, KINDS[(i + j) % len(KINDS)], precision, 1, size))
    # What four processes add to two is meshes of two dimensions, and ranks without rows.
    meshes = ("hsdp", "tensor_parallel in fsdp")
    return [row for row in rows if size < 4 or row.label in meshes or row.accumulation > 1]


ROWS = [Row("zero1", "tied", "bf16"), Row("fsdp", "conv", "O2"), Row("pipeline", "tied", "no", 3)]


def not_as_before(rows: Sequence[Row], results: Sequence[Any]) -> list[str]:
    """In words; `found` is each rank's."""
    messages = []
    for i, row in enumerate(rows):
        is_local_sgd = row.label == "local_sgd"
        before, after = (union([rank[i][time][0] for rank in results], is_local_sgd) for time in (0, 1))
        if wrong := difference(before, after):
            messages.append(f"{row}: {wrong}")
        losses = [[rank[i][time][1] for rank in results] for time in (0, 1)]
        if losses[0] != losses[1]:
            messages.append(f"{row}: losses {losses[0]}, and from the checkpoint {losses[1]}")
    return messages


def test_a_training_goes_on_bit_for_bit(ranks: Any, tmp_path: Path) -> None:
    messages = not_as_before(ROWS, ranks(saved_and_loaded, ROWS, tmp_path))
    assert not messages, "\n".join(messages)


@pytest.mark.slow
@pytest.mark.timeout(500)  # other tests may run beside it
@pytest.mark.parametrize("size", SIZES)
def test_every_training_goes_on_bit_for_bit(ranks: Any, tmp_path: Path, size: int) -> None:
    rows = rows_of(size)
    messages = not_as_before(rows, ranks(saved_and_loaded, rows, tmp_path, processes=size, timeout=400))
    assert not messages, "\n".join(messages)


def uninterrupted(kind: str) -> list[float]:
    """The losses of one process after BEFORE updates."""
    run = Training(Row("single", kind, size=1))
    with run.acc:
        return run.run(0, BEFORE + AFTER)[BEFORE:]


def moved(ranks: Any, folder: Path, before: Sequence[Row], after: Sequence[Row], step: int = 1) -> list[str]:
    """What is not as it was saved, when one in `every` of `before` is loaded into each of `after`, in words."""
    states: dict[Row, Any] = {}
    for size in sorted({row.size for row in before}):
        rows = [row for row in before if row.size == size]
        results = ranks(saved, rows, folder, processes=size, timeout=400)
        states.update((row, union([rank[i][0] for rank in results], True)) for i, row in enumerate(rows))
    messages = []
    reference = {kind: ranks(uninterrupted, kind, processes=1)[0] for kind in sorted({row.kind for row in before})}
    for size in sorted({row.size for row in after}):
        fits = {row: [b for b in before if b[1:3] == row[1:3]] for row in after}
        tables = [(fits[row][i % step :: step], row) for i, row in enumerate(after) if row.size == size]
        results = ranks(all_loaded, tables, folder, processes=size, timeout=400)
        for t, (sources, row) in enumerate(tables):
            for i, source in enumerate(sources):
                loaded_state = union([rank[t][i][0] for rank in results], row.label == "local_sgd")
                if wrong := difference(states[source], loaded_state):
                    messages.append(f"{source} to {row}: {wrong}")
                losses = results[0][t][i][1]
                is_comparable = row.precision == "no" and "local_sgd" not in (source.label, row.label)
                if is_comparable and losses != pytest.approx(reference[row.kind], rel=1e-5):
                    messages.append(f"{source} to {row}: losses {losses}, uninterrupted {reference[row.kind]}")
    return messages


def test_a_checkpoint_moves_to_other_strategies_and_worlds(ranks: Any, tmp_path: Path) -> None:
    before = [Row("single", size=1), Row("zero1"), Row("pipeline")]
    after = [Row("tensor_parallel"), Row("fsdp", size=4)]
    messages = moved(ranks, tmp_path, before, after)
    assert not messages, "\n".join(messages)


@pytest.mark.slow
@pytest.mark.timeout(500)  # other tests may run beside it
def test_checkpoints_of_every_strategy_move_to_every_other(ranks: Any, tmp_path: Path) -> None:
    rows = [Row(label, "tied", size=size) for size in SIZES for label in labels_of(size)]
    rows += [Row("ddp", "conv", "O2"), Row("fsdp", "conv", "O2"), Row("zero1", "conv", "O2", size=4)]
    messages = moved(ranks, tmp_path, rows, rows, step=4)
    assert not messages, "\n".join(messages)

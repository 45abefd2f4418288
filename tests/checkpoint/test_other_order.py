"""A resume with data or models in another order than the run that saved is refused, with both descriptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from easymp import Accelerator, BatchError, CheckpointError, DataLoaderConfiguration

N = 16
DATA: Any = range(N)
REVERSED = range(N - 1, -1, -1)


class Own(Sampler[int]):
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Any:
        return iter(torch.randperm(N, generator=torch.Generator().manual_seed(self.seed)).tolist())

    def __len__(self) -> int:
        return N


CONTENTS: dict[str, Any] = {
    "indices": lambda: {"sampler": SubsetRandomSampler(range(N))},
    "other indices": lambda: {"sampler": SubsetRandomSampler(REVERSED)},
    "weights": lambda: {"sampler": WeightedRandomSampler([1.0] * N, N, replacement=False)},
    "other weights": lambda: {"sampler": WeightedRandomSampler([1.0 + i**3 for i in range(N)], N, replacement=False)},
    "seed": lambda: {"sampler": Own(1)},
    "other seed": lambda: {"sampler": Own(2)},
    "subset": lambda: {"dataset": Subset(DATA, range(N)), "shuffle": True},
    "same subset": lambda: {"dataset": Subset(DATA, torch.arange(N)), "shuffle": True},  # type: ignore[arg-type]
    "other subset": lambda: {"dataset": Subset(DATA, REVERSED), "shuffle": True},
    "parts": lambda: {"dataset": ConcatDataset([Subset(DATA, range(8)), Subset(DATA, range(8, N))])},
    "other parts": lambda: {"dataset": ConcatDataset([Subset(DATA, range(8, N)), Subset(DATA, range(8))])},
}


def loader(kind: str) -> DataLoader[Any]:
    data = DATA
    if kind in CONTENTS:
        return DataLoader(**({"dataset": data, "batch_size": 2} | CONTENTS[kind]()))
    if kind == "distributed":
        return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 1, 0, shuffle=True, seed=4))
    if kind.startswith("batches of "):
        size = int(kind.rpartition(" ")[2])
        return DataLoader(data, batch_sampler=type("Own", (BatchSampler,), {})(SequentialSampler(data), size, False))
    return DataLoader(data, batch_size=4 if kind == "by 4" else 2, shuffle=kind != "in order")


def read(folder: Path, kind: str, stop: int, resume: bool = False, strict: bool = True, **loading: Any) -> list[int]:
    """Samples that are read until `stop`, where the run saves; after a resume until the end of the pass."""
    with Accelerator(cpu=True, seed=2, dataloader_config=DataLoaderConfiguration(**loading)) as acc:
        prepared = acc.prepare(loader(kind))
        if resume:
            acc.load_state(folder, strict=strict)
        samples: list[int] = []
        for batch in prepared:
            samples += batch.tolist()
            if len(samples) == stop:
                acc.save_state(folder)
                break
        return samples


@pytest.mark.parametrize(
    ("kind", "new_kind", "message"),
    [
        ("shuffled", "in order", "reads samples shuffled, and this loader reads them in the data set's order"),
        ("in order", "shuffled", "reads samples in the data set's order, and this loader reads them shuffled"),
        ("shuffled", "distributed", "shuffled, and this loader reads them shuffled by DistributedSampler of seed 4"),
        ("batches of 2", "batches of 4", "by Own, in batches of 2, and this loader reads them by Own, in batches of 4"),
    ],
)
def test_data_in_another_order(tmp_path: Path, kind: str, new_kind: str, message: str) -> None:
    read(tmp_path / "state", kind, stop=8)
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path / "state", new_kind, stop=0, resume=True)
    assert len(read(tmp_path / "state", new_kind, stop=0, resume=True, strict=False)) == N
    assert len(read(tmp_path / "state", kind, stop=0, resume=True)) == N - 8


@pytest.mark.parametrize("seedable", [True, False])
@pytest.mark.parametrize("kind", ["indices", "weights", "seed", "subset", "parts"])
def test_another_content_of_the_same_kind(tmp_path: Path, kind: str, seedable: bool) -> None:
    loading = {"use_seedable_sampler": seedable}
    first = read(tmp_path / "state", kind, stop=8, **loading)
    with pytest.raises(
        BatchError, match=r"indices of checksum \w+\), and this loader reads them .* \(indices of check"
    ):
        read(tmp_path / "state", f"other {kind}", stop=0, resume=True, **loading)
    same = f"same {kind}" if f"same {kind}" in CONTENTS else kind
    assert sorted(first + read(tmp_path / "state", same, stop=0, resume=True, **loading)) == list(range(N))


def test_what_counts_is_the_order_that_the_resumed_pass_draws() -> None:
    def resumed(weights: str, **changes: Any) -> tuple[Any, Any]:
        prepared = acc.prepare(loader(weights))
        prepared.load_state_dict({key: value for key, value in state.items() if key not in changes} | changes)
        return prepared, prepared.sampler

    with Accelerator(cpu=True, seed=2) as acc:
        prepared = acc.prepare(loader("weights"))
        rest = [batch.tolist() for batch in prepared if prepared.position > 2 or not (state := prepared.state_dict())]
        prepared, sampler = resumed("other weights")
        sampler.weights = torch.ones(N)  # as a script does that keeps its weights outside of the checkpoint
        assert [batch.tolist() for batch in prepared] == rest
        again, _ = resumed("other weights")
        again.load_state_dict(again.state_dict() | {"position": 0})
        assert len(list(again)) == N // 2
        assert len(list(resumed("other weights", digest=None)[0])) == len(rest)  # a state of an older version


def test_another_batch_size_of_the_same_order_is_right(tmp_path: Path) -> None:
    first = read(tmp_path / "state", "shuffled", stop=8)
    assert sorted(first + read(tmp_path / "state", "by 4", stop=0, resume=True)) == list(range(N))


def test_between_two_passes_the_order_may_change(tmp_path: Path) -> None:
    with Accelerator(cpu=True) as acc:
        acc.prepare(loader("shuffled"))
        acc.save_state(tmp_path / "state")
    assert read(tmp_path / "state", "in order", stop=0, resume=True) == list(range(N))


def two_models(kind: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    if kind == "modules":
        return nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    return nn.Linear(2, 2), nn.Linear(2, 2)


@pytest.mark.parametrize("kind", ["modules", "first weights"])
def test_models_of_one_shape_in_another_order(tmp_path: Path, kind: str) -> None:
    def prepared(acc: Accelerator, swapped: bool = False) -> list[nn.Module]:
        models = two_models(kind)
        return list(acc.prepare(*(models[::-1] if swapped else models)))

    with Accelerator(cpu=True) as acc:
        for number, model in enumerate(prepared(acc)):
            nn.init.constant_(next(model.parameters()), number)
        acc.save_state(tmp_path / "state")
    with Accelerator(cpu=True) as acc:
        models = prepared(acc, swapped=True)
        before = [p.clone() for model in models for p in model.parameters()]
        with pytest.raises(
            CheckpointError, match=rf"in another order: 'model' of the checkpoint \({kind} .* is 'model_1' here"
        ):
            acc.load_state(tmp_path / "state")
        assert all(torch.equal(a, b) for a, b in zip(before, (p for model in models for p in model.parameters())))
    with Accelerator(cpu=True) as acc:
        models = prepared(acc)
        acc.load_state(tmp_path / "state")
        assert [next(model.parameters()).mean().item() for model in models] == [0.0, 1.0]

"""A DataLoader that was left out of `prepare` on several ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset

from easymp import Accelerator, Settings

X = torch.arange(64.0).view(16, 4)


class Own(Dataset[torch.Tensor]):
    """Samples of one's own."""

    def __init__(self, first: int = 0) -> None:
        self.files = [f"{first + i}.bin" for i in range(8)]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> torch.Tensor:
        return X[i]


class Graph(Own):
    def __init__(self) -> None:
        super().__init__()
        self.edges, self.empty = torch.eye(8).to_sparse(), torch.empty(2, device="meta")


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        yield from X


def make_loader(kind: str, rank: int, size: int) -> DataLoader[Any]:
    data_set = TensorDataset(X)
    data, options = {
        "plain": (data_set, {}),
        "shuffled": (data_set, {"shuffle": True}),
        "split off": (Subset(data_set, list(range(8))), {"shuffle": True}),
        "own": (Own(), {}),
        "stream": (Stream(), {}),
        "sampler": (data_set, {"sampler": DistributedSampler(data_set, size, rank)}),
        "indices": (Subset(data_set, list(range(rank, 16, size))), {"shuffle": True}),
        "tensors": (TensorDataset(X[rank::size].clone()), {"shuffle": True}),
        "files": (Own(rank * 8), {"shuffle": True}),
        "graph": (Graph(), {}),
    }[kind]
    return DataLoader(data, batch_size=4, **options)


def train(kind: str, prepare: bool = False) -> tuple[list[str], str]:
    """What is warned of, and the plan's line about the data."""
    acc = Accelerator(cpu=True, mixed_precision="no", settings=Settings(timeout=60))
    model = torch.nn.Linear(4, 1)
    model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    loader = make_loader(kind, acc.process_index, acc.num_processes)
    if prepare:
        loader = acc.prepare(loader)
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        for _ in range(3):
            for batch in loader:
                acc.backward(model(batch[0] if isinstance(batch, (list, tuple)) else batch).mean())
                optimizer.step()
                optimizer.zero_grad()
    line = next((line for line in str(acc).splitlines() if line.startswith("data ")), "")
    acc.end_training()
    return [str(w.message) for w in messages if "prepare()" in str(w.message)], " ".join(line.split())


def train_each(names: list[str]) -> list[tuple[list[str], str]]:
    return [train(kind) for kind in names]


def test_ranks_that_read_the_same_are_warned_once(ranks):
    for (first, line), (second, second_line) in zip(*ranks(train_each, ["plain", "split off", "own"])):
        assert len(first) == 1 and second == []
        assert "2 ranks read the same data" in first[0] and "Pass the DataLoader to prepare()" in first[0]
        assert line == second_line and line.startswith("data not prepared a DataLoader (")


APART = {  # what may be split by the program, and the plan's line
    "sampler": "as given no prepared DataLoader is read",
    "stream": "not prepared a DataLoader that was not passed to prepare() is read: Stream must",
    "indices": "not prepared a DataLoader (Subset, RandomSampler)",
    "tensors": "not prepared a DataLoader (TensorDataset, RandomSampler)",
    "files": "not prepared a DataLoader (Own, RandomSampler)",
    "graph": "not prepared a DataLoader (Graph, SequentialSampler)",
}


def test_a_program_that_may_split_its_data_is_not_warned(ranks):
    for start, (first, line), second in zip(APART.values(), *ranks(train_each, list(APART))):
        assert first == [] and second == ([], line) and line.startswith(f"data {start}")


def test_a_prepared_loader_and_one_process_have_no_line(ranks):
    assert ranks(train, "shuffled", True) == [([], "")] * 2
    assert train("shuffled") == ([], "")

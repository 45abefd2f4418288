"""A DataLoader that was left out of `prepare` on several ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset

from easymp import Accelerator

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
    """All samples, in order."""

    def __iter__(self) -> Any:
        yield from X


def make(kind: str, rank: int, size: int) -> DataLoader[Any]:
    whole = TensorDataset(X)
    return {
        "plain": lambda: DataLoader(whole, batch_size=4),
        "shuffled": lambda: DataLoader(whole, batch_size=4, shuffle=True),
        "split off": lambda: DataLoader(Subset(whole, list(range(8))), batch_size=4, shuffle=True),
        "own": lambda: DataLoader(Own(), batch_size=4),
        "stream": lambda: DataLoader(Stream(), batch_size=4),
        "sampler": lambda: DataLoader(whole, batch_size=4, sampler=DistributedSampler(whole, size, rank)),
        "indices": lambda: DataLoader(Subset(whole, list(range(rank, 16, size))), batch_size=4, shuffle=True),
        "tensors": lambda: DataLoader(TensorDataset(X[rank::size].clone()), batch_size=4, shuffle=True),
        "files": lambda: DataLoader(Own(rank * 8), batch_size=4, shuffle=True),
        "graph": lambda: DataLoader(Graph(), batch_size=4),
    }[kind]()


def train(kind: str, prepare: bool = False) -> tuple[list[str], str]:
    """What is warned of, and the plan's line about the data."""
    acc = Accelerator(cpu=True, mixed_precision="no", timeout=60)
    model = torch.nn.Linear(4, 1)
    model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    loader = make(kind, acc.process_index, acc.num_processes)
    if prepare:
        loader = acc.prepare(loader)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            for batch in loader:
                acc.backward(model(batch[0] if isinstance(batch, (list, tuple)) else batch).mean())
                optimizer.step()
                optimizer.zero_grad()
    line = next((line for line in str(acc).splitlines() if line.startswith("data ")), "")
    acc.end_training()
    return [str(w.message) for w in said if "prepare()" in str(w.message)], " ".join(line.split())


@pytest.mark.parametrize("kind", ["plain", "split off", "own"])
def test_ranks_that_read_the_same_are_warned_once(ranks, kind):
    (first, line), (second, other) = ranks(train, kind)
    assert len(first) == 1 and second == []
    assert "2 ranks read the same data" in first[0] and "Pass the DataLoader to prepare()" in first[0]
    assert line == other and line.startswith("data not prepared a DataLoader (")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("sampler", "data as given no prepared DataLoader is read"),
        ("stream", "data not prepared a DataLoader that was not passed to prepare() is read: Stream must"),
        ("indices", "data not prepared a DataLoader (Subset, RandomSampler)"),
        ("tensors", "data not prepared a DataLoader (TensorDataset, RandomSampler)"),
        ("files", "data not prepared a DataLoader (Own, RandomSampler)"),
        ("graph", "data not prepared a DataLoader (Graph, SequentialSampler)"),
    ],
)
def test_a_program_that_may_split_its_data_is_not_warned(ranks, kind, words):
    (first, line), other = ranks(train, kind)
    assert first == [] and other == ([], line) and line.startswith(words)


def test_a_prepared_loader_and_one_process_have_no_line(ranks):
    assert ranks(train, "shuffled", True) == [([], "")] * 2
    assert train("shuffled") == ([], "")

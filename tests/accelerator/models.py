"""Small models and data that the face's tests share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from easymp import Accelerator


@contextmanager
def heard(name: str) -> Iterator[list[tuple[str, str]]]:
    """Level and message of what the logger `name` says inside; also in processes without pytest."""
    said: list[tuple[str, str]] = []
    handler, logger = logging.Handler(), logging.getLogger(name)
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def data(n: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(n, 4, generator=generator)
    return TensorDataset(x, torch.arange(n), (x.sum(1) > 0).long())


def train(
    acc: Accelerator, batch: int, epochs: int = 2, clip: float | None = None, n: int = 24, **loader: Any
) -> list[Tensor]:
    """Parameters after some epochs of the canonical loop."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, batches = acc.prepare(
        model, optimizer, DataLoader(data(n), batch_size=batch, shuffle=True, **loader)
    )
    for _ in range(epochs):
        for x, _, y in batches:
            with acc.accumulate(model):
                acc.backward(nn.functional.cross_entropy(model(x), y))
                if clip:
                    acc.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]

"""A small model and data, and what a logger says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.data import TensorDataset


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
    """Inputs, their indices, and classes."""
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(7))
    return TensorDataset(x, torch.arange(n), (x.sum(1) > 0).long())

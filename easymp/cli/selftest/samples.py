"""The model and data of the checks, the same on every rank, and their training in plain torch, which is the answer to compare with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES, FEATURES, SAMPLES, BATCH = 4, 32, 256, 32
NOISE = 3.0  # beside centres that lie 8 from one another: what can be learnt in three epochs is not all
RATE = 1e-3


def model(seed: int = 0) -> nn.Module:
    """(batch, 32) features to (batch, 4) logits; no layer mixes samples."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(FEATURES, 128),
            nn.LayerNorm(128),
            nn.GELU(),
            nn.Linear(128, 128),
            nn.GELU(),
            nn.Linear(128, CLASSES),
        )


def data() -> TensorDataset:
    """Points around the centres of four classes, with noise; the class is the label."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    labels = torch.arange(SAMPLES) % CLASSES
    return TensorDataset(
        centres[labels] + NOISE * torch.randn(SAMPLES, FEATURES, generator=generator), labels
    )


def loader(batch: int = BATCH) -> DataLoader[tuple[Tensor, Tensor]]:
    """In order, so that every number of processes trains on the same batches."""
    return DataLoader(data(), batch_size=batch)


def trained_by_hand(device: torch.device) -> tuple[float, float]:
    """First and last mean loss of an epoch, after three epochs of plain fp32 torch on one process."""
    net = model().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    losses = []
    for _ in range(3):
        total = 0.0
        for inputs, labels in loader():
            loss = nn.functional.cross_entropy(net(inputs.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        losses.append(total / (SAMPLES // BATCH))
    return losses[0], losses[-1]

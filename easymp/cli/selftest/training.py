"""A small training by the plan, and what it must come to: plain torch's losses, each sample once, and itself after a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ... import checkpoint
from ...accelerator import Accelerator
from ...data import PreparedLoader
from ...options import DataLoaderConfiguration
from ...precision import PRECISIONS
from . import samples
from .findings import Wrong
from .precisions import plain

# How far the last loss may lie from plain torch's, as part of the first: in fp32, and in anything faster.
NEAR = {True: 1e-3, False: 0.1}
SPLIT = DataLoaderConfiguration(split_batches=True)


class Run:
    """A model, its optimizer and loader, prepared; a global batch is 32 samples whatever the number of ranks."""

    def __init__(self, acc: Accelerator) -> None:
        self.acc = acc
        net = samples.model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=samples.RATE)
        self.model, self.optimizer, loader = acc.prepare(net, optimizer, samples.loader())
        self.loader: PreparedLoader = loader

    def epoch(self) -> float:
        """Its mean loss."""
        losses = []
        for inputs, labels in self.loader:
            with self.acc.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(inputs), labels)
                self.acc.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.detach())
        return float(self.acc.mean(torch.stack(losses).mean()))


def training(acc: Accelerator) -> str:
    """Three epochs by the plan end with the loss of plain fp32 torch on one process."""
    run = Run(acc)
    losses = [run.epoch() for _ in range(3)]
    first, wanted = samples.trained_by_hand(acc.device)
    precision = acc.plan.precision.value
    bound = NEAR[plain(PRECISIONS[precision])] * first
    if not abs(losses[-1] - wanted) <= bound:
        raise Wrong(
            f"three epochs in {precision} under {acc.plan.strategy.value} came from a loss of {losses[0]:.4f} to {losses[-1]:.4f}; "
            f"plain torch in fp32 on one process comes to {wanted:.4f}"
        )
    return f"{acc.plan.strategy.value}, {precision}: loss {losses[0]:.3f} to {losses[-1]:.3f}; plain torch in fp32: {wanted:.3f}"


def data(acc: Accelerator) -> str:
    """One shuffled epoch reads each sample once, over all ranks."""
    numbers = torch.arange(101)  # a prime: no number of ranks divides it
    loader = acc.prepare(torch.utils.data.DataLoader(numbers, batch_size=4, shuffle=True))  # type: ignore[arg-type]
    seen = torch.cat([acc.gather_for_metrics(batch) for batch in loader])
    if sorted(seen.tolist()) != numbers.tolist():
        raise Wrong(
            f"an epoch over 101 samples gave {len(seen)}, {len(set(seen.tolist()))} of them different"
        )
    return "101 samples, each once"


def checkpoints(acc: Accelerator, folder: Path) -> str:
    """A run that saved, went on, and went back, goes on the same way again, bit for bit."""
    run = Run(acc)
    run.epoch()
    place = acc.save_state(folder / "checkpoint")
    once = run.epoch()
    acc.load_state(place)
    again = run.epoch()
    if once != again:
        raise Wrong(
            f"the epoch after the checkpoint had a mean loss of {once!r}, and of {again!r} after loading it"
        )
    damages = checkpoint.verify(place) if acc.is_main_process else []
    if damages:
        raise Wrong(
            f"{len(damages)} of its files are not what was written: {damages[0].file} {damages[0].why}"
        )
    return "saved, loaded, and the next epoch is the same, bit for bit"

"""What this folder's programs share, to differ in their approach only: data, model, evaluation, and way to the device.

The digits and the network are those of ``examples/digits.py``. Every program makes updates of 64 samples, with the same
optimizer and the same schedule of learning rates, and counts each test sample once.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1]))
from digits import TRAINING, Net, load

__all__ = [
    "BATCH",
    "LR",
    "Net",
    "Prefetcher",
    "arguments",
    "leave",
    "load",
    "place",
    "report",
    "share",
    "sums",
    "updates",
]

BATCH = 64  # samples in one update, over all processes
LR = 5e-3  # the highest


def arguments(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    return parser


def updates(epochs: int) -> int:
    """Optimizer updates in so many epochs, where the last batch of an epoch is left out if it is not full."""
    return epochs * (TRAINING // BATCH)


def place(local_rank: int) -> tuple[torch.device, str]:
    """This process's device, and the backend of torch.distributed for it."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank), "nccl"


def leave() -> None:
    """End the process group, once nothing holds a model that was wrapped for it.

    Else torch may wait for ever, or abort at exit.
    """
    gc.collect()
    dist.destroy_process_group()


def share(data: TensorDataset, rank: int, size: int) -> Subset:
    """Every `size`-th test sample.

    Torch's DistributedSampler repeats some until all ranks have as many, which would count them twice.
    """
    return Subset(data, range(rank, len(data), size))


class Prefetcher:
    """The batches of `loader`, on `device`; with CUDA the next one is copied on a side stream meanwhile.

    The loader should pin its memory: a copy from other memory waits. On a CPU these are the loader's batches as they
    are.
    """

    def __init__(self, loader: DataLoader, device: torch.device) -> None:
        self.loader, self.device = loader, device

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[list[Tensor]]:
        if self.device.type != "cuda":
            yield from self.loader
            return
        side, upcoming = torch.cuda.Stream(self.device), None
        for batch in self.loader:
            current = upcoming
            with torch.cuda.stream(side):
                upcoming = (
                    [tensor.to(self.device, non_blocking=True) for tensor in batch],
                    side.record_event(),
                )
            if current is not None:
                yield self._arrived(*current)
        if upcoming is not None:
            yield self._arrived(*upcoming)

    def _arrived(self, batch: list[Tensor], copied: torch.cuda.Event) -> list[Tensor]:
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(copied)
        for tensor in batch:
            tensor.record_stream(
                compute
            )  # it is the side stream's memory, which may not be used again before this one is done with it
        return batch


@torch.no_grad()
def sums(model: nn.Module, batches: Prefetcher) -> Tensor:
    """Of this process's test samples: the sum of their losses, how many are classified right, and how many there are.

    Added up over the ranks, and divided by the last one, they are the mean loss and the accuracy, whoever has more
    samples.
    """
    model.eval()
    found = torch.zeros(3, device=batches.device)
    for images, labels in batches:
        outputs = model(images).float()
        loss = F.cross_entropy(outputs, labels, reduction="sum")
        found += torch.stack([loss, (outputs.argmax(1) == labels).sum().float(), loss.new_tensor(len(labels))])
    model.train()
    return found


def report(loss: float, accuracy: float, seconds: float) -> None:
    """Lines for people, and for table.py."""
    print(f"test loss      {loss:.4f}")
    print(f"test accuracy  {accuracy:.2%}")
    print(f"training       {seconds:.2f} s")
    print(f"peak memory    {peak() / 2**20:.0f} MiB")


def peak() -> int:
    """Bytes of the device, or of this process with its libraries on a CPU, at their peak."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path(f"/proc/{os.getpid()}/status")  # getrusage would count what the process's parent had
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))

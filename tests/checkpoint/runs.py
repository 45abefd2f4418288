"""A training that can be killed anywhere and started again, and its result."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import fsspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from easymp import Accelerator, DataLoaderConfiguration
from easymp.checkpoint.storage_local import LocalStorage
from easymp.checkpoint.storage_remote import RemoteStorage

from ..strategies.models import whole

SAMPLES, EPOCHS = 40, 3


class Numbered(Dataset[tuple[int, Tensor, Tensor]]):
    """Samples that say which they are."""

    def __init__(self, count: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(count, 12, generator=generator)
        self.y = torch.randint(0, 5, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[int, Tensor, Tensor]:
        return i, self.x[i], self.y[i]


class Streamed(IterableDataset[tuple[int, Tensor, Tensor]]):
    """The same, as a stream that cannot say where it is."""

    def __init__(self) -> None:
        self.samples = Numbered()

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        for i in range(len(self.samples)):
            yield self.samples[i]


class Remembered(Streamed):
    """One that can, in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        while self.at < len(self.samples):
            self.at += 1
            yield self.samples[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor(self.at)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = int(state["at"])


@dataclass(frozen=True)
class Case:
    """How a run is set up.

    Attributes:
        batch: samples a batch, over all ranks.
        data: "map", "stream" or "remembered".
        validate: a second pass in each epoch, over another loader.
        async_: whether saves go on in the background.
        store: how fsspec reaches S3.
        norm: a BatchNorm, whose statistics each rank takes of its own batches.
    """

    strategy: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "no"
    accumulation: int = 1
    batch: int = 8
    data: str = "map"
    workers: int = 0
    loading: Mapping[str, Any] = field(default_factory=dict)
    validate: bool = True
    every: int = 2
    async_: bool = False
    store: Mapping[str, Any] = field(default_factory=dict)
    norm: bool = False


def loader_of(case: Case) -> DataLoader[Any]:
    more = {"num_workers": case.workers, "persistent_workers": case.workers > 0}
    if case.data == "map":
        return DataLoader(Numbered(), batch_size=case.batch, shuffle=True, **more)
    return DataLoader(Streamed() if case.data == "stream" else Remembered(), batch_size=case.batch, **more)


def die(after: int, number: int = signal.SIGKILL) -> Callable[[], None]:
    """Something that sends this process a signal at its `after`-th call."""
    left = [after]

    def tick() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), number)

    return tick


def signalled(folder: str, case: Case, number: int, to: list[int], step: int) -> dict[str, Any]:
    """The script, and after `step` updates a signal to the ranks `to`."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    return _train(folder, case, die(step if int(os.environ["RANK"]) in to else 0, number))


def train(folder: str, case: Case, kill_step: int = 0, kill_write: int = 0) -> dict[str, Any]:
    """The script: as a user would write it, but that it can end itself, after a number of updates or of writes to the disk."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a loader's workers are children
    step_done, written = die(kill_step), die(kill_write)
    storage: Any = RemoteStorage if "://" in folder else LocalStorage
    put = storage.put

    def counted(*args: Any, **kwargs: Any) -> Any:
        written()
        result = put(*args, **kwargs)
        written()
        return result

    storage.put = counted
    if case.store:
        fsspec.config.conf["s3"] = dict(case.store)
    try:
        return _train(folder, case, step_done)
    finally:
        storage.put = put
        fsspec.config.conf.pop("s3", None)


def _train(folder: str, case: Case, step_done: Callable[[], None]) -> dict[str, Any]:
    acc = Accelerator(
        seed=1,
        project_dir=folder,
        strategy=case.strategy,
        strategy_options=dict(case.options) or None,
        mixed_precision=case.precision,
        gradient_accumulation_steps=case.accumulation,
        dataloader_config=DataLoaderConfiguration(split_batches=True, **case.loading),
    )
    norm = [nn.BatchNorm1d(33)] if case.norm else []
    model: Any = nn.Sequential(
        nn.Linear(12, 33), *norm, nn.Tanh(), nn.Dropout(0.2), nn.Linear(33, 16), nn.Tanh(), nn.Linear(16, 5)
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), 0.01)
    schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, 15)
    plateau: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    loader, test_loader = loader_of(case), DataLoader(Numbered(24), batch_size=8)
    prepared = acc.prepare(model, optimizer, schedule, loader, test_loader)
    model, optimizer, schedule, loader, test_loader = prepared
    plateau = acc.prepare(plateau)
    seen: list[tuple[int, list[int]]] = []
    tested: list[int] = []
    resumed = acc.resume()
    for epoch in acc.epochs(EPOCHS):
        model.train()
        for indices, x, y in loader:
            with acc.accumulate(model):
                loss = F.cross_entropy(model(x + 0.01 * random.random()), y)
                acc.backward(loss)
                optimizer.step()
                if acc.sync_gradients and optimizer.updates % case.every == 0:
                    acc.save_state(async_=case.async_)  # between the optimizer's step and the schedule's
                schedule.step()
                optimizer.zero_grad()
            seen.append((epoch, acc.gather(indices).tolist()))
            if acc.sync_gradients:
                step_done()
        model.eval()
        plateau.step()
        for indices, *_ in test_loader if case.validate else ():
            tested += acc.gather(indices).tolist()
        acc.save_state(async_=case.async_)
    result = {
        "resumed": resumed,
        "seen": seen,
        "tested": tested,
        "weights": {name: whole(p) for name, p in model.named_parameters() if not p.is_meta},
        "statistics": [buffer.clone() for buffer in model.buffers()],
        "lr": schedule.get_last_lr(),
        "updates": optimizer.updates,
        "drawn": (torch.rand(2), random.random()),
    }
    acc.close()
    return result


if __name__ == "__main__":  # a worker of torchrun; the last one dies once
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dies = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == size - 1
    torch.save(train(sys.argv[1], Case("ddp"), 7 if dies else 0), f"{sys.argv[1]}/{rank}.pt")

"""A run that is killed at any moment, or told to end by a signal, and started again ends as the one that was not."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import fsspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from easymp import Accelerator, DataLoaderConfiguration, checkpoint
from easymp.checkpoint.storage import LocalStorage
from easymp.checkpoint.storage_remote import RemoteStorage
from easymp.parts import preemption

from ..examples.run import environment
from ..strategies.models import whole
from .samples import Numbered

EPOCHS = 3


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
        data: "map", "stream" or "remembered".
        every: updates between two saves; there is one at each epoch's end, too.
        async_: whether saves go on in the background.
        store: how fsspec reaches S3.
        norm: a BatchNorm, whose statistics each rank takes of its own batches.
    """

    strategy: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "no"
    accumulation: int = 1
    data: str = "map"
    workers: int = 0
    loading: Mapping[str, Any] = field(default_factory=dict)
    every: int = 2
    async_: bool = False
    store: Mapping[str, Any] = field(default_factory=dict)
    norm: bool = False


@dataclass(frozen=True)
class End:
    """A signal after a number of updates, or of beginnings and ends of writes to the disk, on some ranks."""

    step: int = 0
    write: int = 0
    number: int = signal.SIGKILL
    to: tuple[int, ...] = (0, 1, 2, 3)


def train(folder: str, case: Case, end: End | None = None) -> dict[str, Any]:
    """The script: as a user would write it, but that it can end itself."""
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False  # a loader's workers are children
    if end is None or int(os.environ.get("RANK", 0)) not in end.to:
        end = End()
    left = {"step": end.step, "write": end.write}

    def count(what: str) -> None:
        left[what] -= 1
        if left[what] == 0:
            os.kill(os.getpid(), end.number)

    storage: Any = RemoteStorage if "://" in folder else LocalStorage
    put = storage.put

    def counted(*args: Any, **kwargs: Any) -> Any:
        count("write")
        result = put(*args, **kwargs)
        count("write")
        return result

    storage.put = counted
    if case.store:
        fsspec.config.conf["s3"] = dict(case.store)
    try:
        return _train(folder, case, lambda: count("step"))
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
    layers = [nn.Linear(12, 33), nn.Tanh(), nn.Dropout(0.2), nn.Linear(33, 16), nn.Tanh(), nn.Linear(16, 5)]
    if case.norm:
        layers.insert(1, nn.BatchNorm1d(33))
    model: Any = nn.Sequential(*layers)
    optimizer: Any = torch.optim.AdamW(model.parameters(), 0.01)
    schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, 15)
    plateau: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    data = {"map": Numbered, "stream": Streamed, "remembered": Remembered}[case.data]()
    more = {"num_workers": case.workers, "persistent_workers": case.workers > 0}
    loader: Any = DataLoader(data, batch_size=8, shuffle=True if case.data == "map" else None, **more)
    test_loader: Any = DataLoader(Numbered(24), batch_size=8)
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
        for indices, *_ in test_loader:
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
        "drawn": (torch.rand(2).tolist(), random.random()),
    }
    acc.close()
    return result


PERSISTENT = {"workers": 2}
MICROBATCHES = {"microbatches": 2}
NEVER = 10**9  # updates between two saves
TERM, USR1 = int(signal.SIGTERM), int(signal.SIGUSR1)
# case, processes before, processes after, and the end of the first run
Row = tuple[Case, int, int, End]
ROWS: dict[str, Row] = {
    "one process, in a save": (Case(accumulation=2), 1, 1, End(write=30)),
    "ddp, asynchronously, between saves": (Case("ddp", accumulation=2, async_=True), 2, 2, End(5)),
    "ddp, at an epoch's end": (Case("ddp"), 2, 2, End(5)),
    "ddp, in fp16": (Case("ddp", precision="fp16"), 2, 2, End(7)),
    "fsdp, in a save": (Case("fsdp"), 2, 2, End(write=19)),
    "zero1, in bf16": (Case("zero1", precision="bf16", accumulation=2), 2, 2, End(4)),
    "local_sgd": (Case("local_sgd", {"every": 3}), 2, 2, End(7)),
    "statistics of batches": (Case("ddp", norm=True), 2, 2, End(5)),
    "a stream with a state": (Case("ddp", data="remembered"), 2, 2, End(8)),
    "two processes, then one": (Case(), 2, 1, End(8)),
    "one process, then two": (Case(accumulation=2), 1, 2, End(4)),
    "a signal to all": (Case("ddp", every=NEVER, accumulation=2), 2, 2, End(4, 0, TERM)),
    "a signal to one": (Case("ddp", every=NEVER), 2, 2, End(7, 0, USR1, (1,))),
}
SLOW: dict[str, Row] = {
    "ddp in bf16, four processes, in a save": (Case("ddp", precision="bf16"), 4, 4, End(write=23)),
    "zero1, four processes": (Case("zero1", accumulation=2), 4, 4, End(5)),
    "fsdp in bf16, four processes, in a save": (Case("fsdp", precision="bf16"), 4, 4, End(write=23)),
    "hsdp": (Case("hsdp", {"shard_size": 2}, accumulation=2), 4, 4, End(5)),
    "tensor_parallel in bf16, in a save": (Case("tensor_parallel", precision="bf16"), 2, 2, End(write=23)),
    "tensor_parallel in fsdp": (Case("tensor_parallel", {"size": 2}, accumulation=2), 4, 4, End(5)),
    "pipeline in bf16, in a save": (Case("pipeline", MICROBATCHES, "bf16"), 2, 2, End(write=23)),
    "persistent workers": (Case(**PERSISTENT), 1, 1, End(8)),
    "one process, asynchronously, in a save": (Case(accumulation=2, async_=True), 1, 1, End(write=30)),
    "fsdp in bf16, asynchronously": (Case("fsdp", precision="bf16", async_=True), 2, 2, End(write=31)),
    "two processes, asynchronously, then one": (Case(accumulation=2, async_=True), 2, 1, End(5)),
    "fsdp, four processes, then two": (Case("fsdp"), 4, 2, End(8)),
    "ddp, one process, then four": (Case("auto"), 1, 4, End(8)),
    "a stream": (Case("ddp", data="stream"), 2, 2, End(8)),
    "a stream, two processes, then one": (Case(data="stream"), 2, 1, End(8)),
    "a stream, in workers": (Case(data="remembered", **PERSISTENT), 1, 1, End(8)),
    "dispatched": (Case("ddp", loading={"dispatch_batches": True}), 2, 2, End(8)),
    "statistics of batches, zero1": (Case("zero1", norm=True), 2, 2, End(7)),
    "statistics of batches, fsdp": (Case("fsdp", norm=True), 2, 2, End(7)),
    "statistics of batches, local_sgd": (Case("local_sgd", norm=True), 2, 2, End(7)),
    "the sampler's own random state": (Case("ddp", loading={"use_seedable_sampler": False}), 2, 2, End(7)),
    "a signal under fsdp": (Case("fsdp", every=NEVER), 2, 2, End(5, 0, TERM, (0,))),
    "a signal under local_sgd": (Case("local_sgd", {"every": 3}, every=NEVER), 2, 2, End(6, 0, USR1, (0,))),
    "a signal, and workers": (Case("ddp", every=NEVER, workers=1), 2, 2, End(6, 0, TERM, (1,))),
    "a signal in a pipeline": (Case("pipeline", MICROBATCHES, every=NEVER), 4, 4, End(6, 0, TERM, (2,))),
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """``straight(ranks, case, processes)``: each rank's result of a run without interruption."""
    known: dict[str, Any] = {}

    def results(ranks: Any, case: Case, processes: int, folder: str = "") -> list[Any]:
        case = replace(case, every=2, async_=False)  # neither changes what is trained
        key = f"{case} {processes}"
        if key not in known:
            folder = folder or str(tmp_path_factory.mktemp("straight"))
            known[key] = ranks(train, folder, case, processes=processes)
            assert all(it.committed for it in checkpoint.list_checkpoints(f"{folder}/checkpoints"))
        return known[key]

    return results


def again(ranks: Any, folder: str, row: Row) -> list[Any]:
    """Each rank's result of a run that was ended and started again."""
    case, before, after, end = row
    ended = ranks.fails(train, folder, case, end, processes=before)
    if end.number == signal.SIGKILL:
        assert any(getattr(outcome, "type", "") == "SIGKILL" for outcome in ended)
    else:  # all save together, and say that they may be started again
        assert {(outcome.type, outcome.message) for outcome in ended} == {("SystemExit", "75")}
    return ranks(train, folder, case, processes=after)


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def went_on(straight: list[Any], again: list[Any], exactly: bool) -> None:
    for one, other in zip(straight, again, strict=True):
        assert other["resumed"] is not None
        assert 0 < len(other["seen"]) < len(one["seen"])
        assert other["seen"] == one["seen"][-len(other["seen"]) :]
        assert other["tested"] == one["tested"][-len(other["tested"]) :]
        assert (other["updates"], other["lr"]) == (one["updates"], one["lr"])
        if exactly:
            assert same(other["weights"], one["weights"])
            assert all(map(torch.equal, other["statistics"], one["statistics"]))
            assert other["drawn"] == one["drawn"]


@pytest.mark.parametrize(
    "row",
    [*(pytest.param(row, id=name) for name, row in ROWS.items())]
    + [pytest.param(row, id=name, marks=pytest.mark.slow) for name, row in SLOW.items()],
)
def test_ended_and_started_again(ranks, tmp_path, straight, row):
    case, before, after, end = row
    averaged = case.strategy == "local_sgd" and end.number != signal.SIGKILL  # once more, by the signal's save
    went_on(straight(ranks, case, after), again(ranks, str(tmp_path), row), before == after and not averaged)


@pytest.mark.slow
def test_killed_and_started_again_in_an_object_store(ranks, tmp_path, s3, straight):
    place, case = f"{s3}/{tmp_path.name}", Case("ddp", store=fsspec.config.conf["s3"], async_=True)
    one = straight(ranks, case, 2, f"{place}/straight")
    went_on(one, again(ranks, f"{place}/killed", (case, 2, 2, End(write=29))), exactly=True)


@pytest.mark.slow
def test_killed_and_started_again_by_torchrun(ranks, tmp_path, straight):
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [sys.executable, "-m", *launch, "-m", "tests.checkpoint.test_resume", str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    went_on(straight(ranks, Case("ddp"), 2), results, exactly=True)


def test_killed_in_the_first_save_it_begins_anew(ranks, tmp_path, straight):
    (one,) = straight(ranks, Case(), 1)
    for write in (1, 2, 6):
        (other,) = again(ranks, str(tmp_path / str(write)), (Case(), 1, 1, End(write=write)))
        assert other["resumed"] is None
        assert other["seen"] == one["seen"] and same(other["weights"], one["weights"])


def signalled(folder: str, apart: float, signals: list[tuple[int, float]]) -> None:
    """Sends itself signals, each after some seconds, in a body that never ends; two within `apart` are one."""
    preemption.SAME_SIGNAL = apart  # this process ends with the test
    acc = Accelerator(project_dir=folder, save_on_signal=True) if folder else Accelerator()
    for number, pause in signals:
        time.sleep(pause)
        os.kill(os.getpid(), number)
    acc.close()
    raise ValueError("the body went on")


@pytest.mark.parametrize(
    ("apart", "signals", "ends"),
    [
        (1000.0, [(TERM, 0), (TERM, 0.1), (USR1, 0)], "ValueError"),
        (0.1, [(TERM, 0), (TERM, 0.2)], "SIGTERM"),
        (None, [(TERM, 0)], "SIGTERM"),  # a script that never saves
    ],
)
def test_one_signal_twice_at_once_is_one_and_another_later_ends_it(ranks, tmp_path, apart, signals, ends):
    folder = str(tmp_path) if apart else ""
    (outcome,) = ranks.fails(signalled, folder, apart, signals, processes=1)
    assert outcome.type == ends


def handlers(folder: str) -> list[Any]:
    heard: list[int] = []

    def mine(number: int, frame: Any) -> None:
        heard.append(number)

    signal.signal(signal.SIGUSR1, mine)
    before = signal.getsignal(signal.SIGTERM)
    acc = Accelerator(project_dir=folder)
    kept = signal.getsignal(signal.SIGUSR1) is mine
    acc.resume()
    taken = signal.getsignal(signal.SIGUSR1) is not mine
    os.kill(os.getpid(), signal.SIGUSR1)
    acc.close()
    back = signal.getsignal(signal.SIGUSR1) is mine and signal.getsignal(signal.SIGTERM) == before
    acc = Accelerator(project_dir=folder, save_on_signal=False)
    acc.resume()
    never = signal.getsignal(signal.SIGUSR1) is mine
    acc.close()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    return [kept, taken, heard, back, never]


def test_handlers_come_with_resume_call_the_former_ones_and_go_with_the_accelerator(ranks, tmp_path):
    assert ranks(handlers, str(tmp_path), processes=1) == [[True, True, [USR1], True, True]]


if __name__ == "__main__":  # a worker of torchrun; the last one dies once
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    result = train(sys.argv[1], Case("ddp"), End(7, to=(1,)) if first else None)
    torch.save(result, f"{sys.argv[1]}/{os.environ['RANK']}.pt")


INTERRUPTED = """
import torch
from easymp import Accelerator

acc = Accelerator(cpu=True, project_dir="run")
model = torch.nn.Linear(2, 1)
model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
def train():
    for update in range(2):
        acc.backward(model(torch.ones(2, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
        if update == 0:
            acc.save_state()
    raise KeyboardInterrupt
"""


@pytest.mark.parametrize("call", ["train()", "with acc: train()"])
def test_ctrl_c_is_one_line(tmp_path, call):
    command = [sys.executable, "-c", f"{INTERRUPTED}\n{call}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    place = tmp_path / "run/checkpoints/step-00000001"
    assert done.returncode in (130, -signal.SIGINT)
    assert done.stderr.strip() == f"interrupted after update 2: acc.resume() continues from {place}"

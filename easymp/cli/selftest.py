"""The checks of `easymp test` on one rank: ``python -m easymp.cli.selftest FOLDER``, as the command starts it on every rank.

Small trainings and their parts run on real ranks, each against a known answer. What a rank finds goes to a file of the folder
line by line, so that a rank that dies has left the check that it was in.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from .. import checkpoint
from ..accelerator import Accelerator
from ..base.units import size
from ..cuda.cupy_launcher import Unavailable, launcher_for
from ..distributed import read_ranks
from ..errors import RefusedError, WorldError
from ..optim import AdamW
from ..options import DataLoaderConfiguration
from ..precision import PRECISIONS
from ..training.collectives import broadcast, gather_object

PLAN = "plan.txt"  # in the folder: the plan as rank 0 explains it
TIMEOUT = 30.0  # seconds that a rank waits for another
SPLIT = DataLoaderConfiguration(split_batches=True)
BYTES, ROUNDS = 32 << 20, 5  # of the all-reduce that is timed
# How far outputs may lie from fp32's, as part of their size (2-norms): some roundings of the type, through six layers.
NEAR = {"bf16": 5e-2, "bf16-true": 5e-2, "fp8": 0.25}
NEAR |= dict.fromkeys(("tf32", "fp16", "O1", "O2", "O3", "fp16-true"), 1e-2)
# How far the last loss may lie from plain torch's, as part of the first: in fp32, and in anything faster.
NEAR_LOSS = {True: 1e-3, False: 0.1}
NEAR_KERNELS = 1e-5


class LeftOut(Exception):
    """There is nothing to check here; the message says why."""


class Wrong(Exception):
    """The answer is not the known one; the message holds both."""


# -- the model and its data


CLASSES, FEATURES, SAMPLES, BATCH = 4, 32, 256, 32
NOISE = 3.0  # beside centres that lie 8 apart: three epochs do not learn everything
RATE = 1e-3


def model() -> nn.Module:
    """(batch, 32) features to (batch, 4) logits, the same on every rank; no layer mixes samples."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = nn.Linear(FEATURES, 128), nn.LayerNorm(128), nn.GELU()
        return nn.Sequential(*first, nn.Linear(128, 128), nn.GELU(), nn.Linear(128, CLASSES))


def samples() -> TensorDataset:
    """Points around the centres of four classes, with noise; the class is the label."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    labels = torch.arange(SAMPLES) % CLASSES
    return TensorDataset(
        centres[labels] + NOISE * torch.randn(SAMPLES, FEATURES, generator=generator), labels
    )


def loader() -> DataLoader[tuple[Tensor, Tensor]]:
    """In order, so that every number of processes trains on the same batches."""
    return DataLoader(samples(), batch_size=BATCH)


def train_plain(device: torch.device) -> tuple[float, float]:
    """Mean loss of the first and of the third epoch of plain fp32 torch on one process."""
    net = model().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    losses = []
    for _ in range(3):
        total = 0.0
        for inputs, labels in loader():
            loss = cross_entropy(net(inputs.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        losses.append(total / (SAMPLES // BATCH))
    return losses[0], losses[-1]


class Training:
    """A model, its optimizer and loader, prepared; a global batch is 32 samples whatever the number of ranks."""

    def __init__(self, acc: Accelerator) -> None:
        self.acc, net = acc, model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
        self.model, self.optimizer, self.loader = acc.prepare(net, optimizer, loader())

    def epoch(self) -> float:
        """Its mean loss."""
        losses = []
        for inputs, labels in self.loader:
            with self.acc.accumulate(self.model):
                loss = cross_entropy(self.model(inputs), labels)
                self.acc.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.detach())
        return float(self.acc.mean(torch.stack(losses).mean()))


# -- the checks; each returns its figures in words


def collectives(acc: Accelerator) -> str:
    """Sum, gather and broadcast of numbers, and gather of objects."""
    rank, ranks = acc.process_index, acc.num_processes
    everyone = list(range(ranks))
    total = acc.reduce(torch.full((3,), float(rank + 1), device=acc.device), "sum").tolist()
    mine = torch.tensor([rank], device=acc.device)
    gathered = acc.gather(mine).tolist()
    sent = [broadcast(mine.clone(), from_process=root).item() for root in everyone]
    objects = gather_object([f"rank {rank}"])
    answers: dict[str, tuple[Any, Any]] = {
        f"the sum of 1 to {ranks} over the ranks": (total, [ranks * (ranks + 1) / 2] * 3),
        "the gathered numbers of the ranks": (gathered, everyone),
        "the broadcast numbers of the ranks": (sent, everyone),
        "the gathered names of the ranks": (objects, [f"rank {i}" for i in everyone]),
    }
    for name, (found, wanted) in answers.items():
        if found != wanted:
            raise Wrong(f"{name}: {found}, not {wanted}")
    acc.wait_for_everyone()
    devices = acc.gather(torch.tensor([acc.device.index or 0], device=acc.device)).tolist()
    kind = acc.device.type
    where = f" {', '.join(map(str, devices))}" if kind == "cuda" else ""
    return f"{ranks} rank{'s' * (ranks > 1)} on {kind}{where}"


def bandwidth(acc: Accelerator) -> str:
    """An all-reduce of 32 MiB of fp32; bus bandwidth as NCCL's tests count it, 2 (n - 1) / n × bytes / time."""
    ranks = acc.num_processes
    if ranks == 1:
        raise LeftOut("one process sends nothing")
    block, times = torch.ones(BYTES // 4, device=acc.device), []
    for _ in range(ROUNDS + 1):
        acc.wait_for_everyone()
        begin = time.perf_counter()
        value = acc.reduce(block, "sum")[-1].item()  # waits for the device
        times.append(time.perf_counter() - begin)
        if value != ranks:
            raise Wrong(f"ones summed over {ranks} ranks: {value:g}")
    middle = sorted(times[1:])[ROUNDS // 2]
    speed = size(int(2 * (ranks - 1) / ranks * BYTES / middle))
    return f"{speed}/s between ranks ({size(BYTES)} in {middle * 1e3:.0f} ms)"


def data(acc: Accelerator) -> str:
    """One shuffled epoch reads each sample once, over all ranks."""
    numbers = torch.arange(101)  # a prime: no number of ranks divides it
    prepared = acc.prepare(DataLoader(numbers, batch_size=4, shuffle=True))  # type: ignore[arg-type]
    seen = torch.cat([acc.gather_for_metrics(batch) for batch in prepared])
    if sorted(seen.tolist()) != numbers.tolist():
        different = len(set(seen.tolist()))
        raise Wrong(f"an epoch over 101 samples gave {len(seen)}, {different} of them different")
    return "101 samples, each once"


def training(acc: Accelerator) -> str:
    """Three epochs by the plan end with the loss of plain fp32 torch on one process."""
    run = Training(acc)
    losses = [run.epoch() for _ in range(3)]
    first, wanted = train_plain(acc.device)
    precision, strategy = acc.plan.precision.value, acc.plan.strategy.value
    if not abs(losses[-1] - wanted) <= NEAR_LOSS[_is_fp32(precision)] * first:
        raise Wrong(
            f"three epochs in {precision} under {strategy} came from a loss of {losses[0]:.4f} to {losses[-1]:.4f}; "
            f"plain torch in fp32 on one process comes to {wanted:.4f}"
        )
    return f"{strategy}, {precision}: loss {losses[0]:.3f} to {losses[-1]:.3f}; plain torch in fp32: {wanted:.3f}"


def precisions() -> str:
    """Each precision that this machine does not refuse, against fp32."""
    good, refused = [], []
    for name in PRECISIONS:
        if _is_fp32(name):
            continue
        try:
            good.append(f"{name} {_distance(name):.2%}")
        except RefusedError:
            refused.append(name)
    said = f"outputs off fp32's: {', '.join(good)}" if good else "fp32 only"
    return said + (f"; not here: {', '.join(refused)}" if refused else "")


def _is_fp32(name: str) -> bool:
    return PRECISIONS[name].compute == torch.float32 and not PRECISIONS[name].tf32


def _distance(name: str) -> float:
    """Distance of the outputs from fp32's, as part of their size; then some training steps."""
    with closing(Accelerator(mixed_precision=name, deterministic=False)) as acc:
        inputs, labels = (part.to(acc.device) for part in samples().tensors)
        net = model().to(acc.device)
        with torch.no_grad():
            wanted = net(inputs)
        net, optimizer = acc.prepare(net, torch.optim.AdamW(net.parameters(), lr=RATE))
        with torch.no_grad():
            found = net(inputs)
        distance = float((found.float() - wanted).norm() / wanted.norm())
        if not distance <= NEAR[name]:
            raise Wrong(
                f"{name}: outputs lie {distance:.2%} from fp32's; at most {NEAR[name]:.2%} is rounding"
            )
        for _ in range(3):
            loss = cross_entropy(net(inputs), labels)
            acc.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if not loss.isfinite():
                raise Wrong(f"{name}: the loss is {loss.item()}")
        return distance


def checkpoints(acc: Accelerator, folder: Path) -> str:
    """A run that goes back to its checkpoint repeats the next epoch bit for bit."""
    run = Training(acc)
    run.epoch()
    place = acc.save_state(folder / "checkpoint")
    once = run.epoch()
    acc.load_state(place)
    again = run.epoch()
    if once != again:
        raise Wrong(
            f"the epoch after the checkpoint had a mean loss of {once!r}, and {again!r} after loading it"
        )
    damages = checkpoint.verify(place) if acc.is_main_process else []
    if damages:
        raise Wrong(f"{len(damages)} of its files changed: {damages[0].file} {damages[0].why}")
    return "saved, loaded, and the next epoch is the same, bit for bit"


def kernels(device: torch.device) -> str:
    """Ten steps of AdamW with clipping, by kernels and by torch."""
    if device.type != "cuda":
        raise LeftOut(f"they are for NVIDIA GPUs, and this rank trains on {device.type}")
    launcher = launcher_for(device)
    if isinstance(launcher, Unavailable):
        raise LeftOut(launcher.reason)
    ours, theirs = model().to(device), model().to(device)
    pairs = (
        (ours, AdamW(ours.parameters(), lr=RATE)),
        (theirs, torch.optim.AdamW(theirs.parameters(), lr=RATE)),
    )
    inputs, labels = (part.to(device) for part in samples().tensors)
    for _ in range(10):
        for net, optimizer in pairs:
            cross_entropy(net(inputs), labels).backward()
            if isinstance(optimizer, AdamW):
                optimizer.clip_grad_norm_(0.1)
            else:
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    far = max(float((a - b).abs().max()) for a, b in zip(ours.parameters(), theirs.parameters()))
    if not far <= NEAR_KERNELS:
        raise Wrong(
            f"after 10 steps a weight lies {far:.2g} from torch's; at most {NEAR_KERNELS:g} is rounding"
        )
    return f"10 steps of AdamW with clipping are torch's, up to {far:.1g}"


# -- this rank


def device(folder: Path) -> torch.device:
    """The device of the plan, which rank 0 writes down."""
    with closing(Accelerator(timeout=TIMEOUT)) as acc:
        if acc.is_main_process:
            (folder / PLAN).write_text(str(acc), encoding="utf-8")
        return acc.device


def checks(folder: Path) -> dict[str, Callable[[], str]]:
    """The checks by name, in order."""

    def alone(check: Callable[[Accelerator], str]) -> Callable[[], str]:
        """With an Accelerator of its own, so that a check cannot break the next one."""

        def run() -> str:
            with closing(Accelerator(timeout=TIMEOUT, seed=0, dataloader_config=SPLIT)) as acc:
                return check(acc)

        return run

    return {
        "plan": lambda: f"trains on {device(folder)}",
        "collectives": alone(collectives),
        "bandwidth": alone(bandwidth),
        "data": alone(data),
        "training": alone(lambda acc: training(acc)),
        "precision": precisions,
        "checkpoint": alone(lambda acc: checkpoints(acc, folder)),
        "kernels": lambda: kernels(device(folder)),
    }


def note(folder: Path, check: str, run: Callable[[], str]) -> None:
    """Run one check, and write down its beginning and its outcome: "good", "left out" or "bad"."""

    def write(**finding: Any) -> None:
        with (folder / f"rank-{read_ranks().rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"check": check, "seconds": 0.0, "second_hand": False, **finding}) + "\n")

    write(outcome="begun", words="")
    begin, second_hand = time.perf_counter(), False
    try:
        outcome, words = "good", run()
    except LeftOut as why:
        outcome, words = "left out", str(why)
    except Wrong as why:
        outcome, words = "bad", str(why)
    except Exception as error:  # any error is a finding about this machine
        outcome, words = "bad", f"{type(error).__name__}: {error}"
        second_hand = isinstance(error, WorldError)  # it failed because another rank did
    write(outcome=outcome, words=words, seconds=time.perf_counter() - begin, second_hand=second_hand)


if __name__ == "__main__":
    for name, check in checks(Path(sys.argv[1])).items():
        note(Path(sys.argv[1]), name, check)

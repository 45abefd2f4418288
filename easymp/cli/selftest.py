"""The checks of `easymp test` on one rank: ``python -m easymp.cli.selftest FOLDER``, as the command starts it on every rank.

Small trainings and their parts run on real ranks, each against a known answer. Each rank writes its findings to a file of the folder
line by line, so that a rank that dies has left the check that it was in.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
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
BYTES, ROUNDS = 32 << 20, 5  # of the all-reduce that is timed
# How far outputs may lie from fp32's, as part of their size (2-norms): some roundings of the type, through six layers.
NEAR = {"bf16": 5e-2, "bf16-true": 5e-2, "fp8": 0.25, "mxfp8": 0.25, "nvfp4": 0.5}
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
    centres, labels = torch.randn(CLASSES, FEATURES, generator=generator), torch.arange(SAMPLES) % CLASSES
    noise = NOISE * torch.randn(SAMPLES, FEATURES, generator=generator)
    return TensorDataset(centres[labels] + noise, labels)


def parts(device: torch.device | str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """A model, its optimizer and its data, in order, so that every number of processes trains on the same batches."""
    net = model().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    return net, optimizer, DataLoader(samples(), batch_size=BATCH)


def epoch(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Any],
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> Tensor:
    """Train once through `loader`; the mean loss of this rank's samples."""
    losses, device = [], next(net.parameters()).device
    for inputs, labels in loader:
        loss = cross_entropy(net(inputs.to(device)), labels.to(device))
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


# -- the checks; each returns its figures in words


def collectives(acc: Accelerator) -> str:
    """Sum, gather and broadcast of numbers, and gather of objects."""
    rank, ranks, device = acc.process_index, acc.num_processes, acc.device
    everyone, mine = list(range(ranks)), torch.tensor([acc.process_index], device=acc.device)
    sums = acc.reduce(torch.full((3,), float(rank + 1), device=device), "sum").tolist()
    sent = [broadcast(mine.clone(), from_process=root).item() for root in everyone]
    for name, found, wanted in (
        (f"sum of 1 to {ranks} over", sums, [ranks * (ranks + 1) / 2] * 3),
        ("gathered numbers of", acc.gather(mine).tolist(), everyone),
        ("broadcast numbers of", sent, everyone),
        ("gathered names of", gather_object([f"rank {rank}"]), [f"rank {i}" for i in everyone]),
    ):
        if found != wanted:
            raise Wrong(f"the {name} the ranks: {found}, not {wanted}")
    acc.wait_for_everyone()
    devices = acc.gather(torch.tensor([device.index or 0], device=device)).tolist()
    where = f" {', '.join(map(str, devices))}" if device.type == "cuda" else ""
    return f"{ranks} rank{'s' * (ranks > 1)} on {device.type}{where}"


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
    seen = torch.cat([acc.gather_for_metrics(batch) for batch in prepared]).tolist()
    if sorted(seen) != numbers.tolist():
        raise Wrong(f"an epoch over 101 samples gave {len(seen)}, {len(set(seen))} of them different")
    return "101 samples, each once"


def training(acc: Accelerator) -> str:
    """Three epochs by the plan end with the loss of plain fp32 torch on one process."""
    ours, plain = acc.prepare(*parts()), parts(acc.device)
    losses = [float(acc.mean(epoch(*ours, acc.backward))) for _ in range(3)]
    first, _, wanted = (float(epoch(*plain)) for _ in range(3))
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
        try:
            good += [] if _is_fp32(name) else [f"{name} {_distance(name):.2%}"]
        except RefusedError:
            refused.append(name)
    said = f"outputs off fp32's: {', '.join(good)}" if good else "fp32 only"
    return said + (f"; not here: {', '.join(refused)}" if refused else "")


def _is_fp32(name: str) -> bool:
    return PRECISIONS[name].compute == torch.float32 and not PRECISIONS[name].tf32


def _distance(name: str) -> float:
    """Distance of the outputs from fp32's, as part of their size; then an epoch of training."""
    options = {"mixed_precision": name, "deterministic": False, "gradient_accumulation_steps": 1}
    with closing(Accelerator(**options)) as acc, torch.no_grad():
        inputs = samples().tensors[0].to(acc.device)
        wanted = model().to(acc.device)(inputs)
        ours = acc.prepare(*parts())
        distance = float((ours[0](inputs).float() - wanted).norm() / wanted.norm())
        most = NEAR[name]
        if not distance <= most:
            raise Wrong(f"{name}: outputs lie {distance:.2%} from fp32's; at most {most:.2%} is rounding")
        with torch.enable_grad():
            loss = epoch(*ours, acc.backward)
        if not loss.isfinite():
            raise Wrong(f"{name}: the loss is {loss.item()}")
        return distance


def checkpoints(acc: Accelerator, folder: Path) -> str:
    """A run that goes back to its checkpoint repeats the next epoch bit for bit."""
    ours = acc.prepare(*parts())
    epoch(*ours, acc.backward)
    place = acc.save_state(folder / "checkpoint")
    once = float(acc.mean(epoch(*ours, acc.backward)))
    acc.load_state(place)
    again = float(acc.mean(epoch(*ours, acc.backward)))
    if once != again:
        losses = f"a mean loss of {once!r}, and {again!r} after loading it"
        raise Wrong(f"the epoch after the checkpoint had {losses}")
    damages = checkpoint.verify(place) if acc.is_main_process else []
    if damages:
        raise Wrong(f"{len(damages)} of its files changed: {damages[0].file} {damages[0].why}")
    return "saved, loaded, and the next epoch is the same, bit for bit"


def kernels(device: torch.device) -> str:
    """An epoch of AdamW with clipping, by kernels and by torch."""
    if device.type != "cuda":
        raise LeftOut(f"they are for NVIDIA GPUs, and this rank trains on {device.type}")
    launcher = launcher_for(device)
    if isinstance(launcher, Unavailable):
        raise LeftOut(launcher.reason)
    net, optimizer, loader = parts(device)
    ours = model().to(device)
    kernel = AdamW(ours.parameters(), lr=RATE)

    def clipped(loss: Tensor) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)

    epoch(net, optimizer, loader, clipped)
    epoch(ours, kernel, loader, lambda loss: (loss.backward(), kernel.clip_grad_norm_(0.1)))
    far = max(float((a - b).abs().max()) for a, b in zip(ours.parameters(), net.parameters()))
    if not far <= NEAR_KERNELS:
        most = f"at most {NEAR_KERNELS:g} is rounding"
        raise Wrong(f"after an epoch a weight lies {far:.2g} from torch's; {most}")
    return f"{SAMPLES // BATCH} steps of AdamW with clipping are torch's, up to {far:.1g}"


# -- this rank


def plan(folder: Path) -> torch.device:
    """The device of the plan, which rank 0 writes down."""
    with closing(Accelerator(timeout=TIMEOUT)) as acc:
        if acc.is_main_process:
            (folder / PLAN).write_text(str(acc), encoding="utf-8")
        return acc.device


def checks(folder: Path) -> dict[str, Callable[[], str]]:
    """The checks by name, in order."""

    def alone(check: Callable[[Accelerator], str]) -> Callable[[], str]:
        """With an Accelerator of its own, so that a check cannot break the next one; a global batch is 32 samples."""

        def run() -> str:
            split = DataLoaderConfiguration(split_batches=True)
            known = {"seed": 0, "gradient_accumulation_steps": 1, "dataloader_config": split}
            with closing(Accelerator(timeout=TIMEOUT, **known)) as acc:
                return check(acc)

        return run

    return {
        "plan": lambda: f"trains on {plan(folder)}",
        "collectives": alone(collectives),
        "bandwidth": alone(bandwidth),
        "data": alone(data),
        "training": alone(training),
        "precision": precisions,
        "checkpoint": alone(lambda acc: checkpoints(acc, folder)),
        "kernels": lambda: kernels(plan(folder)),
    }


def note(folder: Path, check: str, run: Callable[[], str]) -> None:
    """Run one check, and write down its beginning and its outcome: "good", "left out" or "bad"."""

    def write(outcome: str, words: str = "", seconds: float = 0.0, second_hand: bool = False) -> None:
        said = {"words": words, "seconds": seconds, "second_hand": second_hand}
        line = {"check": check, "outcome": outcome, **said}
        with (folder / f"rank-{read_ranks().rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    write("begun")
    begin, second_hand = time.perf_counter(), False
    try:
        outcome, words = "good", run()
    except (LeftOut, Wrong) as why:
        outcome, words = "bad" if isinstance(why, Wrong) else "left out", str(why)
    except Exception as error:  # any error is a finding about this machine
        outcome, words = "bad", f"{type(error).__name__}: {error}"
        second_hand = isinstance(error, WorldError)  # it failed because another rank did
    write(outcome, words, time.perf_counter() - begin, second_hand)


if __name__ == "__main__":
    for name, check in checks(Path(sys.argv[1])).items():
        note(Path(sys.argv[1]), name, check)

"""The checks of `easymp test` on one rank: ``python -m easymp.cli.selftest FOLDER``, as the command starts it.

Each check trains or exchanges something small on real ranks, and compares it with a known answer. Rank 0 writes a line
at the begin of each check and one with its outcome. Any other error ends the rank, as it ends a script.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from .. import checkpoint
from ..accelerator import Accelerator
from ..base.units import size
from ..cuda.cupy_launcher import launcher_for
from ..errors import RefusedError
from ..optim import Engine
from ..options import DataLoaderConfiguration
from ..precision import PRECISIONS
from ..settings import Settings
from ..training.collectives import broadcast, gather_object
from .test import BEGUN, PLAN, ROWS, Row

SETTINGS = Settings(timeout=30.0)  # seconds that a rank waits for another
BYTES, ROUNDS = 32 << 20, 5  # of the all-reduce that is timed
# Bounds of the distance of outputs from fp32's, relative to their norm: roundings of the type in six layers.
TOLERANCES = {"bf16": 5e-2, "bf16-true": 5e-2, "fp8": 0.25}
TOLERANCES |= dict.fromkeys(("tf32", "fp16", "O1", "O2", "O3", "fp16-true"), 1e-2)
# Bounds of the distance of the last loss from plain torch's, relative to the first loss: in fp32, and in others.
FP32_LOSS_TOLERANCE, LOSS_TOLERANCE = 1e-3, 0.1
KERNEL_TOLERANCE = 1e-5  # of a weight
CLASSES, FEATURES, SAMPLES, BATCH = 4, 32, 256, 32
NOISE = 3.0  # standard deviation around centres that lie 8 apart, so that three epochs do not learn everything


class SkippedCheck(Exception):
    """The check does not apply here; the message says why."""


class WrongAnswer(Exception):
    """The answer is not the known one; the message holds both."""


class Training(NamedTuple):
    """A model, its optimizer and its data."""

    model: nn.Module
    optimizer: Any
    loader: DataLoader[Any]

    @classmethod
    def on(cls, device: torch.device | str = "cpu") -> Training:
        """The same on every rank. The data is not shuffled, so every number of processes trains on the same batches."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = [nn.Linear(FEATURES, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 128), nn.GELU()]
            model = nn.Sequential(*layers, nn.Linear(128, CLASSES)).to(device)
            centres, labels = torch.randn(CLASSES, FEATURES), torch.arange(SAMPLES) % CLASSES
            dataset = TensorDataset(centres[labels] + NOISE * torch.randn(SAMPLES, FEATURES), labels)
        optimizer = torch.optim.AdamW(model.parameters(), eps=1e-4)  # which fp16 weights need
        return cls(model, optimizer, DataLoader(dataset, batch_size=BATCH))

    def epoch(self, backward: Callable[[Tensor], Any] = Tensor.backward) -> Tensor:
        """Train once through the loader; the mean loss of this rank's samples."""
        losses, device = [], next(self.model.parameters()).device
        for inputs, labels in self.loader:
            loss = cross_entropy(self.model(inputs.to(device)), labels.to(device))
            backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses).mean()


def prepared(acc: Accelerator) -> Training:
    return Training(*acc.prepare(*Training.on()))


def check_collectives(acc: Accelerator, folder: Path) -> str:
    """Sum, gather and broadcast of numbers."""
    ranks, rank = list(range(acc.num_processes)), torch.tensor([acc.process_index], device=acc.device)
    indices = acc.gather(torch.tensor([acc.device.index or 0], device=acc.device)).tolist()
    for name, result, expected in (
        ("sum over", acc.reduce(rank + 1, "sum").tolist(), [sum(ranks) + len(ranks)]),
        ("gathered numbers of", acc.gather(rank).tolist(), ranks),
        ("broadcast numbers of", [broadcast(rank.clone(), from_process=r).item() for r in ranks], ranks),
    ):
        if result != expected:
            raise WrongAnswer(f"the {name} the ranks: {result}, not {expected}")
    devices = f" {', '.join(map(str, indices))}" if acc.device.type == "cuda" else ""
    return f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on {acc.device.type}{devices}"


def check_bandwidth(acc: Accelerator, folder: Path) -> str:
    """Time an all-reduce of 32 MiB of fp32. Bus bandwidth is that of NCCL's tests: 2 (n - 1) / n × bytes / time."""
    ranks = acc.num_processes
    if ranks == 1:
        raise SkippedCheck("one process sends nothing")
    block, times = torch.ones(BYTES // 4, device=acc.device), []
    for _ in range(ROUNDS + 1):
        acc.wait_for_everyone()
        start = time.perf_counter()
        value = acc.reduce(block, "sum")[-1].item()  # waits for the device
        times.append(time.perf_counter() - start)
        if value != ranks:
            raise WrongAnswer(f"ones summed over {ranks} ranks: {value:g}")
    seconds = statistics.median(times[1:])
    bandwidth = size(2 * (ranks - 1) / ranks * BYTES / seconds)
    return f"{bandwidth}/s between ranks ({size(BYTES)} in {seconds * 1e3:.0f} ms)"


def check_data(acc: Accelerator, folder: Path) -> str:
    """One shuffled epoch reads each sample once, over all ranks."""
    numbers = torch.arange(101)  # a prime: no number of ranks divides it
    loader = acc.prepare(DataLoader(TensorDataset(numbers), batch_size=4, shuffle=True))
    samples = torch.cat([acc.gather_for_metrics(batch) for (batch,) in loader]).tolist()
    if sorted(samples) != numbers.tolist():
        raise WrongAnswer(f"an epoch over 101 samples gave {len(samples)}, {len(set(samples))} of them different")
    return "101 samples, each once"


def check_training(acc: Accelerator, folder: Path) -> str:
    """Three epochs by the plan end with the loss of plain fp32 torch on one process."""
    training, reference = prepared(acc), Training.on(acc.device)
    losses = [float(acc.mean(training.epoch(acc.backward))) for _ in range(3)]
    references = [float(reference.epoch()) for _ in range(3)]
    precision, strategy = acc.plan.precision.value, acc.plan.strategy.value
    tolerance = FP32_LOSS_TOLERANCE if is_fp32(precision) else LOSS_TOLERANCE
    if not abs(losses[-1] - references[-1]) <= tolerance * references[0]:
        raise WrongAnswer(
            f"three epochs in {precision} under {strategy} came from a loss of {losses[0]:.4f} to {losses[-1]:.4f}; "
            f"plain torch in fp32 on one process comes to {references[-1]:.4f}"
        )
    reached = f"loss {losses[0]:.3f} to {losses[-1]:.3f}; plain torch in fp32: {references[-1]:.3f}"
    return f"{strategy}, {precision}: {reached}"


def check_precisions() -> str:
    """Each precision that this machine does not refuse: outputs near fp32's, and a finite loss after an epoch."""
    distances, refused = [], []
    for name in PRECISIONS:
        precision: Any = name
        if is_fp32(name):
            continue
        try:
            acc = Accelerator(mixed_precision=precision, deterministic=False, gradient_accumulation_steps=1)
        except RefusedError:
            refused.append(name)
            continue
        with closing(acc):
            training, reference = prepared(acc), Training.on(acc.device)
            inputs = torch.cat([inputs for inputs, _ in reference.loader]).to(acc.device)
            with torch.no_grad():
                expected = reference.model(inputs)
                distance = float((training.model(inputs).float() - expected).norm() / expected.norm())
            if not distance <= TOLERANCES[name]:
                bound = f"at most {TOLERANCES[name]:.2%} is rounding"
                raise WrongAnswer(f"{name}: outputs lie {distance:.2%} from fp32's; {bound}")
            if not (loss := training.epoch(acc.backward)).isfinite():
                raise WrongAnswer(f"{name}: the loss is {loss.item()}")
        distances.append(f"{name} {distance:.2%}")
    summary = f"outputs off fp32's: {', '.join(distances)}" if distances else "fp32 only"
    return summary + (f"; not here: {', '.join(refused)}" if refused else "")


def is_fp32(name: str) -> bool:
    return PRECISIONS[name].compute == torch.float32 and not PRECISIONS[name].tf32


def check_checkpoint(acc: Accelerator, folder: Path) -> str:
    """A run that goes back to its checkpoint repeats the next epoch bit for bit."""
    training = prepared(acc)
    training.epoch(acc.backward)
    path = acc.save_state(folder / "checkpoint")
    loss = float(acc.mean(training.epoch(acc.backward)))
    acc.load_state(path)
    repeated = float(acc.mean(training.epoch(acc.backward)))
    if loss != repeated:
        raise WrongAnswer(f"the epoch after the checkpoint had a mean loss of {loss!r}, and {repeated!r} once loaded")
    damages = checkpoint.verify(path) if acc.is_main_process else []
    if damages:
        raise WrongAnswer(f"{len(damages)} of its files changed: {damages[0].file} {damages[0].why}")
    return "saved, loaded, and the next epoch is the same, bit for bit"


def check_kernels(acc: Accelerator, folder: Path) -> str:
    """Compare steps of AdamW with clipping by our kernels with torch's, of the same gradients."""
    device = acc.device
    if device.type != "cuda":
        raise SkippedCheck(f"they are for NVIDIA GPUs, and this rank trains on {device.type}")
    launcher = launcher_for(device)
    if isinstance(launcher, str):
        raise SkippedCheck(launcher)
    training, reference = Training.on(device), Training.on(device)
    engine, steps = Engine(training.optimizer), SAMPLES // BATCH
    pairs = list(zip(training.model.parameters(), reference.model.parameters()))
    for _ in range(steps):
        for weight, expected in pairs:
            expected.grad = torch.randn_like(expected)
            weight.grad = expected.grad.clone()
        engine.clip_grad_norm_(0.1)
        engine.step()
        nn.utils.clip_grad_norm_(reference.model.parameters(), 0.1)
        reference.optimizer.step()
    distance = max(float((weight - expected).abs().max()) for weight, expected in pairs)
    if not distance <= KERNEL_TOLERANCE:
        raise WrongAnswer(
            f"after {steps} steps a weight lies {distance:.2g} from torch's; at most {KERNEL_TOLERANCE:g} is rounding"
        )
    return f"{steps} steps of AdamW with clipping are torch's, up to {distance:.1g}"


def check_plan(acc: Accelerator, folder: Path) -> str:
    with closing(Accelerator(settings=SETTINGS)) as planned:  # by the user's settings alone
        if planned.is_main_process:
            (folder / PLAN).write_text(str(planned), encoding="utf-8")
        return f"trains on {planned.device}"


CHECKS: dict[str, Callable[[Accelerator, Path], str]] = {
    "plan": check_plan,
    "collectives": check_collectives,
    "bandwidth": check_bandwidth,
    "data": check_data,
    "training": check_training,
    "precision": lambda acc, folder: check_precisions(),
    "checkpoint": check_checkpoint,
    "kernels": check_kernels,
}


def main(folder: Path) -> None:
    """Run the checks, each with an Accelerator of its own, so that no check can break the next."""
    for name, check in CHECKS.items():
        start = time.perf_counter()
        loaders = DataLoaderConfiguration(split_batches=True)  # a global batch is 32 samples
        acc = Accelerator(seed=0, gradient_accumulation_steps=1, dataloader_config=loaders, settings=SETTINGS)
        with closing(acc):
            write(acc, folder, Row(name, BEGUN, 0.0, ""))
            try:
                outcome = "good", check(acc, folder)
            except SkippedCheck as reason:
                outcome = "left out", str(reason)
            except WrongAnswer as difference:
                rank = f"rank {acc.process_index}: " if acc.num_processes > 1 else ""
                outcome = "bad", f"{rank}{difference}"
            outcomes = gather_object([outcome])
            kind, message = next((outcome for outcome in outcomes if outcome[0] == "bad"), outcomes[0])
            write(acc, folder, Row(name, kind, time.perf_counter() - start, message))


def write(acc: Accelerator, folder: Path, row: Row) -> None:
    if acc.is_main_process:
        with (folder / ROWS).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(row)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Who runs the step after backward in `fused_step`, and on what.

Lists of tensors as GPTs have them, and the loops of their users.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from easymp import Accelerator, GradScalerKwargs, Settings
from easymp.cuda.cupy_launcher import CupyLauncher
from easymp.cuda.kernel import Rounding
from easymp.cuda.step import EMA, FusedStep
from easymp.optim import Engine
from easymp.optim import engine as torch_engine
from easymp.optim.rules import ADAM

# Name → vocabulary, length, width, blocks; "tiny" has 35k parameters. The last three are GPT-2's small, medium and
# extra large.
SIZES = {
    "8k": (64, 16, 16, 2),
    "16k": (64, 16, 24, 2),
    "tiny": (64, 16, 36, 2),
    "65k": (64, 16, 50, 2),
    "129k": (64, 16, 71, 2),
    "260k": (64, 16, 102, 2),
    "1M": (64, 16, 204, 2),
    "3M": (64, 16, 350, 2),
    "10M": (256, 256, 320, 8),
    "124M": (50257, 1024, 768, 12),
    "350M": (50257, 1024, 1024, 24),
    "1.5B": (50257, 1024, 1600, 48),
}
DECAY = 0.999  # of averages
MAX_NORM = 1.0
NEVER = 2**30  # good steps until a loss scale grows


def shapes(size: str) -> list[tuple[int, ...]]:
    vocabulary, length, width, blocks = SIZES[size]
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    block = [
        *norm,
        *((3 * width, width), (3 * width,)),
        *((width, width), (width,)),
        *norm,
        *((4 * width, width), (4 * width,)),
        *((width, 4 * width), (width,)),
    ]
    return [(vocabulary, width), (length, width), *block * blocks, *norm]


def count(size: str) -> int:
    """Of parameters."""
    return sum(math.prod(shape) for shape in shapes(size))


class Job:
    """Parameters with gradients and moments, which the contenders of a table share: they step the same tensors in turn.

    Gradients are beyond the clip at first. torch's loops divide and clip them in memory, each time again, and at a
    scale of 1 and a norm of 1 they stay what they are.

    Args:
        kind: "fp32", "ema" (with averages of the weights), "masters" (bf16 weights and gradients, stepped in fp32) or
            "bf16" (all of it).
        launcher: of our kernels.
        scale: of the loss; gradients are so many times larger.
    """

    def __init__(
        self,
        size: str,
        kind: str,
        device: torch.device,
        launcher: CupyLauncher | None = None,
        scale: float = 1.0,
    ) -> None:
        self.kind, self.device, self.launcher = kind, device, launcher
        made = torch.Generator(device).manual_seed(0)
        low = torch.bfloat16 if kind in ("masters", "bf16") else torch.float32
        self.parameters = [nn.Parameter(self._random(shape, made).mul_(0.02).to(low)) for shape in shapes(size)]
        for p in self.parameters:
            p.grad = self._random(tuple(p.shape), made).mul_(0.01 * scale).to(low)
        self.scale = torch.full((), scale, device=device)
        self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters] if kind == "masters" else []
        self.held = self.masters or self.parameters  # by optimizers
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.held]
        self.averages = [p.detach().clone() for p in self.held] if kind == "ema" else []

    def _random(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, device=self.device, generator=generator)

    def optimizer(
        self, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
    ) -> torch.optim.Optimizer:
        """One more that steps these parameters, on the same moments; counters are its own."""
        optimizer = make(self.held, lr=1e-4, weight_decay=0.01, **options)
        counters = torch.device("cpu") if options.get("foreach") else self.device  # where torch's own lie
        for i, (parameter, (first, second)) in enumerate(zip(self.held, self.moments)):
            state = {"step": torch.zeros((), device=counters), "exp_avg": first, "exp_avg_sq": second}
            if self.averages and not options:
                state[EMA] = self.averages[i]
            optimizer.state[parameter].update(state)
        return optimizer


Run = Callable[[], Any]
Make = Callable[[Job], "tuple[Run, str]"]  # what is timed, and what it says of itself


@dataclass(frozen=True)
class Contender:
    """One way to step.

    Attributes:
        make: of a job, what is timed, and a word to add to the name.
        bytes: read and written, a parameter; of ours where the kernels run.
        scaled: whether it takes a loss scale; others get gradients without one.
        ours: whether it is easymp.
    """

    make: Make
    bytes: int
    scaled: bool = False
    ours: bool = False


# -- torch's loops -----------------------------------------------------------------------------------------------------


def clip(job: Job) -> None:
    nn.utils.clip_grad_norm_(job.parameters, MAX_NORM)


def clip_and(**options: Any) -> Make:
    def make(job: Job) -> tuple[Run, str]:
        optimizer = job.optimizer(**options)

        def run() -> None:
            clip(job)
            optimizer.step()

        return run, ""

    return make


def scaler_clip_and(**options: Any) -> Make:
    def make(job: Job) -> tuple[Run, str]:
        optimizer = job.optimizer(**options)
        scaler = torch.amp.GradScaler(job.device.type, init_scale=float(job.scale), growth_interval=NEVER)
        scaler.scale(torch.zeros((), device=job.device))  # makes the scale, as that of the loss does

        def run() -> None:
            scaler.unscale_(optimizer)
            clip(job)
            scaler.step(optimizer)
            scaler.update()

        return run, ""

    return make


def clip_fused_ema(job: Job) -> tuple[Run, str]:
    optimizer = job.optimizer(fused=True)

    @torch.no_grad()
    def run() -> None:
        clip(job)
        optimizer.step()
        torch._foreach_lerp_(job.averages, job.held, 1 - DECAY)

    return run, ""


def clip_fused_masters(job: Job) -> tuple[Run, str]:
    optimizer = job.optimizer(fused=True)
    for master in job.masters:
        master.grad = torch.empty_like(master)

    @torch.no_grad()
    def run() -> None:
        clip(job)
        torch._foreach_copy_([m.grad for m in job.masters], [p.grad for p in job.parameters])
        optimizer.step()
        torch._foreach_copy_(job.parameters, job.masters)

    return run, ""


# -- easymp's ----------------------------------------------------------------------------------------------------------


def grad_scale(job: Job) -> tuple[Run, str]:
    """What easymp does where its kernels do not run."""
    engine = Engine(job.optimizer(fused=True))
    good = torch.zeros((), dtype=torch.int32, device=job.device)

    def run() -> None:
        _, factor, found = engine.measure(MAX_NORM, job.scale)
        engine.step(factor, found)
        torch._amp_update_scale_(job.scale, good, found, 2.0, 0.5, NEVER)

    return run, ""


def kernels(job: Job) -> tuple[Run, str]:
    assert job.launcher is not None
    low = {id(master): parameter for master, parameter in zip(job.masters, job.parameters)}
    step = FusedStep(
        job.optimizer(),
        ADAM,
        job.launcher,
        gradient=(lambda master: low[id(master)].grad) if low else lambda parameter: parameter.grad,
        copy=low,
        ema_decay=DECAY if job.kind == "ema" else None,
        state_dtype=torch.bfloat16 if job.kind == "bf16" else None,
        rounding=Rounding() if job.kind == "bf16" else None,
    )
    good = torch.zeros((), dtype=torch.int32, device=job.device)

    def run() -> None:
        _, factor, found = step.measure(MAX_NORM, job.scale).unbind()
        step.step(factor, found)
        torch._amp_update_scale_(job.scale, good, found, 2.0, 0.5, NEVER)

    return run, ""


def graphed(job: Job) -> tuple[Run, str]:
    """The same, replayed: the first call compiles and lays out, the second captures."""
    return Replay(kernels(job)[0]), ""


class Replay:
    """Calls of `run` as one CUDA graph."""

    def __init__(self, run: Run) -> None:
        self._run, self._warm = run, False
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if not self._warm:
            self._warm = True
            self._run()
            return
        if self._graph is None:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._run()
            self._graph = graph
        self._graph.replay()


def accelerator(precision: str) -> Make:
    """As users call it, from the clip to what the next backward does first."""

    def make(job: Job) -> tuple[Run, str]:
        start = GradScalerKwargs(init_scale=float(job.scale), growth_interval=NEVER)
        accelerated = Accelerator(
            mixed_precision=precision, cpu=job.device.type == "cpu", settings=Settings(scaler_options=start)
        )
        _, optimizer = accelerated.prepare(nn.ParameterList(job.parameters), job.optimizer())
        scaler, loss = accelerated.scaler, torch.zeros((), device=job.device)
        scaler.scale(loss)

        def run() -> None:
            accelerated.clip_grad_norm_(job.parameters, MAX_NORM)
            optimizer.step()
            scaler.settle()
            scaler.scale(loss)  # as the next backward does

        return run, optimizer.engine.name

    return make


def worth_from(least: float, make: Make) -> Make:
    """`make`'s, which leaves the factor to the step from `least` elements on."""

    def made(job: Job) -> tuple[Run, str]:
        before, torch_engine.WORTH = torch_engine.WORTH, least  # type: ignore[assignment]
        try:
            run, word = make(job)
            run()  # the engine asks once
        finally:
            torch_engine.WORTH = before
        return run, word

    return made


def own(job: Job) -> tuple[Run, str]:
    """Without an Accelerator."""
    engine = Engine(job.optimizer(fused=True))

    def run() -> None:
        engine.clip_grad_norm_(MAX_NORM)
        engine.step()

    return run, engine.name


def scaler_own(job: Job) -> tuple[Run, str]:
    """With torch's scaler, which divides in memory."""
    optimizer = job.optimizer(fused=True)
    engine = Engine(optimizer)
    scaler = torch.amp.GradScaler(job.device.type, init_scale=float(job.scale), growth_interval=NEVER)
    scaler.scale(torch.zeros((), device=job.device))

    def run() -> None:
        scaler.unscale_(optimizer)
        engine.clip_grad_norm_(MAX_NORM)
        engine.step()
        scaler.update()

    return run, engine.name


SCALER_FUSED, FUSED = "GradScaler, clip, AdamW(fused)", "clip, AdamW(fused)"
SCALER_FOREACH, FOREACH = "GradScaler, clip, AdamW(foreach)", "clip, AdamW(foreach)"
KERNELS, GRAPH, FACTOR = "easymp, kernels", "easymp, kernels, as a CUDA graph", "grad_scale of AdamW(fused)"
ACCELERATOR, ACCELERATOR_SCALED = "easymp, Accelerator", "easymp, Accelerator(fp16)"
OWN, SCALER_OWN = "clip, easymp.optim.Engine", "GradScaler, clip, easymp.optim.Engine"
PLAIN = {
    FUSED: Contender(clip_and(fused=True), 40),
    FOREACH: Contender(clip_and(foreach=True), 92),
    ACCELERATOR: Contender(accelerator("no"), 32, ours=True),
    OWN: Contender(own, 32, ours=True),
}
SCALED = {
    SCALER_FUSED: Contender(scaler_clip_and(fused=True), 48, scaled=True),
    SCALER_FOREACH: Contender(scaler_clip_and(foreach=True), 100, scaled=True),
    ACCELERATOR_SCALED: Contender(accelerator("fp16"), 32, scaled=True, ours=True),
    SCALER_OWN: Contender(scaler_own, 40, scaled=True, ours=True),
}
# Precision → an Accelerator that clips in memory, and one that leaves the factor to the step, whatever the size.
MEMORY, LEFT = "in memory", "left to the step"
WORTH = {
    precision: {
        MEMORY: Contender(worth_from(math.inf, accelerator(precision)), 0, scaled, ours=True),
        LEFT: Contender(worth_from(0, accelerator(precision)), 0, scaled, ours=True),
    }
    for precision, scaled in (("no", False), ("fp16", True))
}
# Kind → contenders, that which others are measured by first. Bytes are those that an implementation cannot do without,
# as torch's does it.
KINDS: dict[str, dict[str, Contender]] = {
    "fp32": {
        SCALER_FUSED: SCALED[SCALER_FUSED],
        FUSED: PLAIN[FUSED],
        SCALER_FOREACH: SCALED[SCALER_FOREACH],
        FOREACH: PLAIN[FOREACH],
        FACTOR: Contender(grad_scale, 36, scaled=True, ours=True),
        KERNELS: Contender(kernels, 32, scaled=True, ours=True),
        GRAPH: Contender(graphed, 32, scaled=True, ours=True),
        ACCELERATOR_SCALED: SCALED[ACCELERATOR_SCALED],
        OWN: PLAIN[OWN],
    },
    "ema": {
        "clip, AdamW(fused), lerp": Contender(clip_fused_ema, 52),
        KERNELS: Contender(kernels, 40, scaled=True, ours=True),
    },
    "masters": {
        "clip, widen, AdamW(fused), round": Contender(clip_fused_masters, 46),
        KERNELS: Contender(kernels, 30, scaled=True, ours=True),
    },
    "bf16": {
        FUSED: Contender(clip_and(fused=True), 20),
        KERNELS: Contender(kernels, 16, scaled=True, ours=True),
    },
}

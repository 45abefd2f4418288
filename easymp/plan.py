"""The decision: what will run here, each choice with its reason and its source.

`make_plan` is pure: settings, hardware and ranks in, plan out. It asks each strategy and precision by `refuse`, and the
table of `easymp.conflicts`. A refusal of a request is an error; a refusal of a candidate of "auto" leads to the next
one, and its reason is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from . import conflicts
from .base.units import columns
from .distributed import Ranks
from .errors import RefusedError
from .hardware import Hardware
from .precision import ALIASES, PRECISIONS
from .protocols import Choice, Facts, Source
from .settings import Settings
from .strategies import STRATEGIES

AUTO = "auto"
# Candidates of strategy "auto". It takes the first that runs on this many processes and, once models are known, fits
# into memory.
AUTOMATIC = ("single", "ddp", "fsdp")


@dataclass(frozen=True)
class Plan:
    """What runs, each decision with its reason, and the facts behind it.

    Attributes:
        device: torch's device of this rank, as text (``"cuda:0"``).
        precision: a key of `PRECISIONS`.
        weights: dtype of trainable parameters, and how low-precision ones are stepped.
        strategy: a key of `STRATEGIES`.
        accumulation: micro-batches in an update.
        optimizer: which optimizer step runs.
        settings: what was asked for.
        hardware: this machine.
        ranks: this process among the others.
        memory: bytes that a rank may use: the setting, or its device's memory, or on a CPU its share of the machine's.
        activations: which activations are recomputed or offloaded; None: none.
        compile: what torch.compile compiles where the precision implies it; None: what the settings say.
        data: how several ranks split the data, if no prepared loader is read.
        candidates: what strategy "auto" chose from, once models are known on several ranks: "strategy", "bytes" of a
            rank without activations, whether it "fits", and "reason" in words.

    Example:
        >>> plan = Accelerator(cpu=True, mixed_precision="bf16").plan
        >>> plan.choices["precision"].value, plan.as_dict()["processes"]
        ('bf16', 1)
        >>> print(plan.explain().splitlines()[1])
        device        cpu     cpu=True
    """

    device: Choice[str]
    precision: Choice[str]
    weights: Choice[str]
    strategy: Choice[str]
    accumulation: Choice[int]
    optimizer: Choice[str]
    settings: Settings
    hardware: Hardware
    ranks: Ranks
    memory: int
    activations: Choice[str] | None = None
    compile: Choice[str] | None = None
    data: Choice[str] | None = None
    candidates: tuple[dict[str, Any], ...] = ()

    @property
    def choices(self) -> dict[str, Choice[Any]]:
        """The decisions by name, in order."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Choice)}

    @property
    def compiles(self) -> bool:
        """Whether torch.compile runs.

        Example:
            >>> Accelerator(cpu=True).plan.compiles
            False
        """
        return (self.settings.compile if self.compile is None else self.compile.value) not in (None, "no")

    def explain(self) -> str:
        """Show the plan to people.

        Returns:
            A few aligned lines: name, value, reason.
        """
        nodes = f" on {self.ranks.nodes} nodes" if self.ranks.nodes > 1 else ""
        rows = [("processes", f"{self.ranks.size}{nodes}", self.ranks.announced or self.ranks.single_reason)]
        rows += [(name, str(choice.value), choice.reason) for name, choice in self.choices.items()]
        for i, candidate in enumerate(self.candidates):
            rows.append(("" if i else "candidates", candidate["strategy"], candidate["reason"]))
        return "\n".join(columns(rows, 3))

    def as_dict(self) -> dict[str, Any]:
        """Show the plan to programs.

        Returns:
            Decision → value, reason and source, as plain values; "processes"; and "candidates", if there are any.
        """
        choices = {n: {**vars(choice), "source": choice.source.value} for n, choice in self.choices.items()}
        candidates = {"candidates": [*self.candidates]} if self.candidates else {}
        return {"processes": self.ranks.size, **choices, **candidates}


def make_plan(settings: Settings, hardware: Hardware, ranks: Ranks) -> Plan:
    """Decide what runs, from facts alone: nothing is measured, allocated or started.

    Args:
        settings: from `resolve`.
        hardware: from `detect`, or written by hand for another machine.
        ranks: this process among the others.

    Returns:
        The plan.

    Raises:
        RefusedError: a request cannot run here; the message says why, and names an alternative.

    Example:
        >>> from easymp.distributed import Ranks
        >>> make_plan(resolve(cpu=True), detect(), Ranks()).strategy.value
        'single'
    """
    device = _device(settings, hardware, ranks)
    facts = _facts(hardware, ranks, device.value)
    precision, strategy = _precision(settings, facts), _strategy(settings, facts)
    precision_class, strategy_class = PRECISIONS[precision.value], STRATEGIES[strategy.value]
    conflict_words = {precision.value, strategy.value, *conflicts.words_of(settings)}
    conflicts.check(conflict_words, conflicts.rows_of(strategy_class, precision_class, settings))
    steps = settings.gradient_accumulation_steps
    reason = f"{steps} micro-batches an update" if steps > 1 else "every batch is an update"
    accumulation = Choice(steps, reason, settings.source("gradient_accumulation_steps")[0])
    origin, reason = settings.source("fused")
    optimizer = Choice("as given", reason, origin)
    if settings.fused:
        reason = "torch's fused step, where it has one and the caller left that open"
        optimizer = Choice("fused", reason, origin)
    decided = (device, precision, _weights(precision), strategy, accumulation, optimizer)
    memory = _memory(settings, hardware, ranks, device.value)
    later = _activations(settings, facts.device), _compile(settings, facts, precision)
    return Plan(*decided, settings, hardware, ranks, memory, *later)


def _facts(hardware: Hardware, ranks: Ranks, device: str) -> Facts:
    node_devices = hardware.devices[: max(ranks.local_size, ranks.local_rank + 1)]  # of the ranks of this node
    return Facts(dataclasses.replace(hardware, devices=node_devices), device.split(":")[0], ranks.size)


def _device(settings: Settings, hardware: Hardware, ranks: Ranks) -> Choice[str]:
    if settings.cpu:
        origin, reason = settings.source("cpu")
        return Choice("cpu", reason, origin)
    if not hardware.devices:
        reason = hardware.looked_for[0] if hardware.looked_for else "no accelerator was found"
        return Choice("cpu", reason, Source.DETECTED)
    is_alone = ranks.bound or ranks.unknown == "rank"  # on a machine of its own, as far as is known
    index = 0 if is_alone and len(hardware.devices) == 1 else ranks.local_rank
    index = index if ranks.device is None else ranks.device
    if index >= len(hardware.devices):
        raise RefusedError(
            f"this is process {ranks.local_rank} of its node (counted from 0), which has {len(hardware.devices)} "
            f"{hardware.devices[0].name}: two processes on one device slow each other down and NCCL refuses them. "
            f"Start at most {len(hardware.devices)} here, or train on the CPU with cpu=True"
        )
    device = hardware.devices[index]
    if not device.built_for:
        raise RefusedError(
            f"{device.name} is {device.architecture}, for which this build of torch has no code: install a torch built "
            f"for {device.architecture} (its CUDA version must know the card), or train on the CPU with cpu=True"
        )
    device_text = f"{device.kind}:{device.index}" if device.kind != "mps" else "mps"
    return Choice(device_text, device.name, Source.DETECTED)


def _precision(settings: Settings, facts: Facts) -> Choice[str]:
    origin, reason = settings.source("mixed_precision")
    name = ALIASES.get(settings.mixed_precision, settings.mixed_precision)
    if name != AUTO:
        refusal = PRECISIONS[name].refuse(facts)
        if refusal is not None:
            raise RefusedError(f"{reason} cannot run here: {refusal}")
        cpu, compute = facts.hardware.cpu, PRECISIONS[name].compute
        supported = {torch.bfloat16: cpu.bf16, torch.float16: cpu.fp16}.get(compute, True)
        if facts.device == "cpu" and cpu.features and not supported:
            kind = "bf16" if compute == torch.bfloat16 else "fp16"
            reason = f"{reason}; this CPU has no {kind} instructions, so it is slower than fp32"
        return Choice(name, reason, origin)
    name, reason = _automatic(facts)
    return Choice(name, reason, Source.DETECTED)


def _automatic(facts: Facts) -> tuple[str, str]:
    """The precision for "auto", and the reason. It follows a rule; a measurement would depend on the machine's load."""
    cpu = facts.hardware.cpu
    if facts.device == "cpu" and "amx_bf16" in cpu.features:
        return "bf16", "this CPU has AMX tiles for bf16"
    if facts.device == "cpu" and cpu.bf16:
        kind = next(kind for kind in ("avx512_bf16", "sve_bf16", "neon_bf16") if kind in cpu.features)
        return "fp32", f"{kind} without AMX tiles may be slower; easymp compare measures bf16"
    if facts.device == "cpu":
        return "fp32", "this CPU has no bf16 instructions" if cpu.features else "its instructions are not known"
    if facts.device == "mps":
        return "fp32", "on Apple GPUs half precision is not reliably faster"
    # All ranks of a node must decide alike, so their weakest card decides.
    device = min(facts.hardware.devices, key=lambda d: (d.fp16, d.bf16))
    name = device.architecture or device.name
    if device.bf16:
        return "bf16", f"native bf16 on {name}: fp32's range, no loss scale needed"
    if device.fp16:
        return "fp16", f"{name} has Tensor Cores for fp16 and no bf16 units; with a loss scale"
    return "fp32", f"{device.name} ({device.architecture}) has no Tensor Cores: half precision gains nothing in speed"


def _weights(precision: Choice[str]) -> Choice[str]:
    """The plan's line on weights before models are known; `Preparation` refines it."""
    kind = PRECISIONS[precision.value]
    if kind.raises:
        return Choice("fp32", "trainable parameters in bf16 or fp16 are raised at prepare", precision.source)
    if kind.param == torch.float32:
        return Choice("as given", "no parameter is cast", precision.source)
    stepping = "fp32 masters, or stochastic rounding" if kind.keeps_updates else "plain rounding"
    stepping = "fp32 masters" if kind.masters else stepping
    return Choice(str(kind.param).removeprefix("torch."), f"stepped with {stepping}", precision.source)


def _strategy(settings: Settings, facts: Facts) -> Choice[str]:
    origin, reason = settings.source("strategy")
    if settings.strategy != AUTO:
        refusal = STRATEGIES[settings.strategy].refuse(facts)
        if refusal is not None:
            raise RefusedError(f"{reason} cannot run here: {refusal}")
        return Choice(settings.strategy, reason, origin)
    for name in AUTOMATIC:
        if STRATEGIES[name].refuse(facts) is None:
            reason = f"{facts.world_size} processes" if facts.world_size > 1 else "one process"
            return Choice(name, reason, Source.DETECTED)
    raise AssertionError("some strategy takes any world")


def candidates(plan: Plan) -> Iterator[str]:
    """Yield the strategies that "auto" may take on this many processes, best first, and import each then."""
    facts = _facts(plan.hardware, plan.ranks, plan.device.value)
    precision, settings = PRECISIONS[plan.precision.value], plan.settings
    for name in AUTOMATIC:
        strategy = STRATEGIES[name]
        in_force = {name, precision.name, *conflicts.words_of(settings)}
        rows = conflicts.rows_of(strategy, precision, settings)
        if strategy.refuse(facts) is None and conflicts.find(in_force, rows) is None:
            yield name


def _memory(settings: Settings, hardware: Hardware, ranks: Ranks, device: str) -> int:
    if settings.memory is not None:
        return int(settings.memory)
    kind, _, index = device.partition(":")
    memories = (d.memory for d in hardware.devices if d.kind == kind and d.index == int(index or d.index))
    return next(memories, hardware.cpu.memory // max(1, ranks.local_size))


def _activations(settings: Settings, device: str) -> Choice[str] | None:
    recomputed, texts = settings.activation_checkpointing or "no", []
    origin = settings.source("activation_checkpointing")[0]
    if recomputed != "no":
        texts.append(f"recomputed ({recomputed})")
    if settings.activation_offload:
        source, reason = settings.source("activation_offload")
        if device != "cuda":
            raise RefusedError(
                f"{reason} cannot run here: activations are copied from a CUDA device to the host's memory, and this "
                f"is {device}. Leave it out, or use activation_checkpointing"
            )
        texts.append("offloaded")
        origin = origin if recomputed != "no" else source
    return Choice(" and ".join(texts), "counted in the first forward", origin) if texts else None


def _compile(settings: Settings, facts: Facts, precision: Choice[str]) -> Choice[str] | None:
    """The repeated blocks, on a GPU, where the precision's casts are slow alone and the user has said nothing."""
    slow = facts.device == "cuda" and PRECISIONS[precision.value].swaps
    if not slow or settings.compile is not None or settings.strategy == "data_parallel":
        return None
    if find_spec("triton") is None:
        return Choice("no", f"{precision.value} is slow without: Triton is not installed", Source.DETECTED)
    return Choice("blocks", f"fuses {precision.value}'s casts; compile='no' leaves it out", Source.DETECTED)

"""The one list of strategies, precisions and parts: adding one is a file and a line here.

Each class is imported at first use. Settings, the command line and `easymp config` take their words from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

from .base.lazy import imported
from .base.parts import Part
from .protocols import Precision, Strategy

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Classes by name, of rows with "file below the package:class" and a description in a few words."""

    def __init__(self, rows: Mapping[str, tuple[str, str]]) -> None:
        self.homes = {name: home for name, (home, _) in rows.items()}  # where the class is
        self.words = {name: words for name, (_, words) in rows.items()}  # its description

    def __getitem__(self, name: str) -> T:
        file, _, kind = self.homes[name].partition(":")
        found: T = getattr(imported(f".{file}", __package__), kind)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.homes)

    def __len__(self) -> int:
        return len(self.homes)


# One line a strategy: its name, its class, and its description.
STRATEGIES: Registry[type[Strategy]] = Registry(
    {
        "single": ("strategies.single:Single", "one process alone"),
        "data_parallel": ("strategies.single:DataParallel", "one process drives all GPUs; ddp is better"),
        "ddp": ("strategies.ddp:DDP", "each process holds the whole model"),
        "zero1": ("strategies.zero1:ZeRO1", "as ddp, with a part of the optimizer's states each"),
        "fsdp": ("strategies.fsdp:FSDP", "each process holds a part of everything: the least memory"),
        "hsdp": ("strategies.fsdp:HSDP", "as fsdp inside a node, with copies on each node"),
        "tensor_parallel": ("strategies.tensor_parallel:TensorParallel", "each process holds parts of layers"),
        "pipeline": ("strategies.pipeline:Pipeline", "each process holds some of the layers"),
        "local_sgd": ("strategies.local_sgd:LocalTraining", "models are averaged now and then"),
    }
)
# One line a precision.
PRECISIONS: Registry[type[Precision]] = Registry(
    {
        "fp32": ("precision.policies:FP32", "exact"),
        "tf32": ("precision.policies:TF32", "fp32, but products keep 10 bits of mantissa"),
        "bf16": ("precision.policies:BF16", "half the bits with fp32's range: no loss scale"),
        "fp16": ("precision.policies:FP16", "half the bits, more digits, less range: the loss is scaled"),
        "fp8": ("precision.policies:FP8", "a quarter of the bits in Linear layers, the rest as bf16"),
        "bf16-true": ("precision.levels:BF16True", "bf16 weights, with masters or stochastic rounding"),
        "fp16-true": ("precision.levels:FP16True", "fp16 weights, with masters: the loss is scaled"),
        "O0": ("precision.levels:O0", "fp32 under Apex's name"),
        "O1": ("precision.levels:O1", "fp16 by Apex's lists of operations"),
        "O2": ("precision.levels:O2", "an fp16 model, with fp32 copies for the optimizer"),
        "O3": ("precision.levels:O3", "fp16 throughout: gradients that vanish are lost"),
    }
)


class PartRegistry(Registry[type[Part]]):
    """Parts by name. A row's third entry is the setting that asks for the part; "" where its class decides alone."""

    def __init__(self, rows: Mapping[str, tuple[str, str, str]]) -> None:
        super().__init__({name: row[:2] for name, row in rows.items()})
        self._settings = {name: setting for name, (_, _, setting) in rows.items()}

    def asked(self, settings: Any) -> list[str]:
        """The parts that `settings` may ask for, in the order of their calls; their class decides (`Part.wanted`)."""
        return [name for name, setting in self._settings.items() if not setting or getattr(settings, setting)]


# One line a part, in the order of their calls: what changes an update comes before what watches it, and what may end or
# save the run comes last. Its name, its class, what it does, and the setting that asks for it.
PARTS = PartRegistry(
    {
        "unprepared": ("parts.unprepared:UnpreparedData", "looks for data that all ranks read alike", ""),
        "activation_checkpointing": (
            "parts.activations:Recomputation",
            "computes blocks again in backward",
            "activation_checkpointing",
        ),
        "activation_offload": ("parts.activations:ActivationOffload", "offloads activations", "activation_offload"),
        "fp8_weights": ("parts.fp8:RoundedWeights", "rounds weights to fp8 once an update", ""),
        "optimizer_in_backward": ("parts.in_backward:StepInBackward", "steps in backward", "optimizer_in_backward"),
        "local_sgd": ("parts.local_averaging:LocalAveraging", "averages models now and then", ""),
        "ema": ("parts.ema:AveragedWeights", "keeps a moving average of the weights", "ema_decay"),
        "nonfinite": ("parts.nonfinite:Nonfinite", "answers to numbers that are not finite", ""),
        "replicas": ("parts.replicas:Replicas", "compares the ranks' parameters", "replica_check"),
        "gc": ("parts.gc:GarbageCollection", "collects garbage at every 500th update", "gc"),
        "out_of_memory": ("parts.out_of_memory:OutOfMemory", "lists what fills a device that is out of memory", ""),
        "record": ("trackers.recorder:Recorder", "writes down a run for easymp compare", ""),
        "console": ("trackers.console:Console", "shows a running training", "log_with"),
        "replay": ("parts.ring:UpdateRing", "keeps the last updates for easymp replay", "replay"),
        "preemption": ("parts.preemption:Preemption", "saves and ends at a signal", ""),
    }
)
# Parts that a script passes by ``Accelerator(parts=[...])``.
PASSED_PARTS: Registry[type[Part]] = Registry({"guard": ("parts.spikes:SpikeGuard", "leaves out spikes")})
ALIASES = {"no": "fp32", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}

# The words that settings take, for type checkers, which read no tables; tests/typing compares them with the tables.
Parallel = Literal["data_parallel", "ddp", "zero1", "fsdp", "hsdp", "tensor_parallel", "pipeline"]
StrategyName = Literal["auto", "single", Parallel, "local_sgd"]
Alias = Literal["no", "float32", "bfloat16", "float16", "half"]
Level = Literal["bf16-true", "fp16-true", "O0", "O1", "O2", "O3"]
PrecisionName = Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8", Level, Alias]


def reported(precision: Any) -> PrecisionName:
    """Accelerate's name of a precision: "no" for "fp32", its own name for any other."""
    name: PrecisionName = "no" if precision == "fp32" else precision
    return name

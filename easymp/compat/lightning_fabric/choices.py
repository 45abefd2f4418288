"""Choices in Fabric's words: accelerators, strategies, numbers of devices, precisions, seeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...base.rng import set_seed
from ...errors import RefusedError, SettingError, nearest
from ..accelerate.plugins import FullyShardedDataParallelPlugin
from ..layer import Layer

layer = Layer("Lightning Fabric")
PRECISIONS = {
    **dict.fromkeys(("32", "32-true"), "no"),
    **dict.fromkeys(("16", "16-mixed"), "fp16"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bf16"),
    "16-true": "fp16-true",
    "bf16-true": "bf16-true",
    "transformer-engine": "fp8",
}
OFFLOADED, UNUSED = {"cpu_offload": True}, {"find_unused_parameters": True}
STRATEGIES: dict[str, tuple[str, dict[str, bool] | None]] = {
    "auto": ("auto", None),
    "dp": ("data_parallel", None),
    "single_device": ("single", None),
    **dict.fromkeys(("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook"), ("ddp", None)),
    "ddp_find_unused_parameters_true": ("ddp", UNUSED),
    "ddp_find_unused_parameters_false": ("ddp", None),
    "fsdp": ("fsdp", None),
    "fsdp_cpu_offload": ("fsdp", OFFLOADED),
}
ACCELERATORS = {"gpu": ("cuda", "xpu", "mps"), "cuda": ("cuda",), "mps": ("mps",)}


class Chosen:
    """A strategy of easymp with its options."""

    def __init__(
        self, strategy: str, options: Any = None, activation_checkpointing: bool | None = None
    ) -> None:
        self.strategy, self.options = strategy, options
        self.activation_checkpointing = activation_checkpointing


class FSDPStrategy(Chosen):
    """Strategy "fsdp" (or "hsdp", "ddp") in the words of torch's FSDP; see `FullyShardedDataParallelPlugin` for its options."""

    def __init__(self, activation_checkpointing_policy: Any = None, **options: Any) -> None:
        plugin = FullyShardedDataParallelPlugin(**options)
        again = None if activation_checkpointing_policy is None else True
        super().__init__(plugin.strategy, plugin.options, again)


class DDPStrategy(Chosen):
    """Strategy "ddp"; `options` are fields of `easymp.DistributedDataParallelKwargs`."""

    def __init__(self, **options: Any) -> None:
        super().__init__("ddp", options or None)


def on_cpu(accelerator: Any) -> bool:
    """Whether the CPU is asked for; an accelerator that this machine lacks is a SettingError."""
    if accelerator in ("auto", "cpu"):
        return accelerator == "cpu"
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type not in ACCELERATORS.get(str(accelerator), ()):
        raise SettingError(f"accelerator={accelerator!r}: this machine has {found or 'a CPU only'}")
    return False


def _known(name: str, given: str, known: Mapping[str, Any]) -> Any:
    if given not in known:
        raise RefusedError(
            f"{name}={given!r} is not run here{nearest(given, known) or '.'} Known: {', '.join(known)}"
        )
    return known[given]


def precision(given: Any) -> str | None:
    """The precision of the Accelerator; None where the script does not say it."""
    return None if given is None else _known("precision", str(given), PRECISIONS)


def strategy(given: Any) -> Chosen:
    """The strategy of the Accelerator for several processes."""
    if isinstance(given, Chosen):
        return given
    if str(given).startswith("deepspeed"):
        stage = "zero1" if "1" in str(given) else "fsdp"
        raise RefusedError(
            f"strategy={given!r}: its counterpart is easymp.Accelerator(strategy={stage!r}); pass 'fsdp'"
        )
    return Chosen(*_known("strategy", str(given), STRATEGIES))


def processes(devices: Any, cpu: bool) -> int:
    """Processes on this machine."""
    if isinstance(devices, (list, tuple)):
        if list(devices) != list(range(len(devices))):
            raise RefusedError(
                f"devices={devices!r}: name devices by CUDA_VISIBLE_DEVICES, and pass their number"
            )
        return len(devices)
    if str(devices) in ("auto", "-1"):
        return 1 if cpu else max(1, torch.accelerator.device_count())
    if not str(devices).isdigit() or int(devices) < 1:
        raise SettingError(f"devices={devices!r} is neither a number of processes, nor -1, nor 'auto'")
    return int(devices)


def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
    """Seed all random streams; returns the seed, 0 by default. Workers of prepared loaders are seeded by it always."""
    set_seed(seed or 0)
    return seed or 0

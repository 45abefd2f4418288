"""Choices in Fabric's words: accelerators, strategies, numbers of devices, precisions, seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
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
REDUCTIONS = {word: word for word in ("mean", "sum", "max", "min", "product")}
ACCELERATORS = {"gpu": ("cuda", "xpu", "mps"), "cuda": ("cuda",), "mps": ("mps",)}


class Strategy:
    """A strategy of easymp with its options."""

    def __init__(self, strategy: str, options: Any = None, activation_checkpointing: Any = None) -> None:
        self.strategy, self.options = strategy, options
        self.activation_checkpointing = activation_checkpointing


def _classes(option: str, policy: Any) -> list[str] | None:
    """Names of the classes in a policy."""
    if policy is None:
        return None
    kinds = list(policy) if isinstance(policy, (set, frozenset, list, tuple)) else [policy]
    if not all(isinstance(kind, type) for kind in kinds):
        raise RefusedError(f"{option}={policy!r} is not honoured: pass a set of the modules' classes")
    return [kind.__name__ for kind in kinds]


class FSDPStrategy(Strategy):
    """Strategy "fsdp" (or "hsdp", "ddp") in the words of torch's FSDP. Policies are sets of classes."""

    def __init__(
        self, *, auto_wrap_policy: Any = None, activation_checkpointing_policy: Any = None, **options: Any
    ) -> None:
        wrap = _classes("auto_wrap_policy", auto_wrap_policy)
        plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=wrap, **options)
        again = _classes("activation_checkpointing_policy", activation_checkpointing_policy)
        super().__init__(plugin.strategy, plugin.options, again)


class DDPStrategy(Strategy):
    """Strategy "ddp"; `options` are fields of `easymp.DistributedDataParallelKwargs`."""

    def __init__(self, **options: Any) -> None:
        super().__init__("ddp", options or None)


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "auto": partial(Strategy, "auto"),
    "dp": partial(Strategy, "data_parallel"),
    "single_device": partial(Strategy, "single"),
    **dict.fromkeys(("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook"), DDPStrategy),
    "ddp_find_unused_parameters_true": partial(DDPStrategy, find_unused_parameters=True),
    "ddp_find_unused_parameters_false": DDPStrategy,
    "fsdp": FSDPStrategy,
    "fsdp_cpu_offload": partial(FSDPStrategy, cpu_offload=True),
}


def on_cpu(accelerator: Any) -> bool:
    """Whether the CPU is asked for; an accelerator that this machine lacks is a SettingError."""
    if accelerator in ("auto", "cpu"):
        return accelerator == "cpu"
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type not in ACCELERATORS.get(str(accelerator), ()):
        raise SettingError(f"accelerator={accelerator!r}: this machine has {found or 'a CPU only'}")
    return False


def reduction(given: Any) -> str:
    """The word of a reduction over ranks, from Fabric's or a torch.distributed.ReduceOp."""
    word = str(given).rpartition(".")[2].lower()
    return str(_known("reduce_op", {"avg": "mean", "prod": "product"}.get(word, word), REDUCTIONS))


def _known(name: str, given: str, known: Mapping[str, Any]) -> Any:
    if given not in known:
        near = nearest(given, known) or "."
        raise RefusedError(f"{name}={given!r} is not run here{near} Known: {', '.join(known)}")
    return known[given]


def precision(given: Any) -> str | None:
    """The precision of the Accelerator; None where the script does not say it."""
    return None if given is None else _known("precision", str(given), PRECISIONS)


def strategy(given: Any) -> Strategy:
    """The strategy of the Accelerator for several processes."""
    if isinstance(given, Strategy):
        return given
    if str(given).startswith("deepspeed"):
        stage = "zero1" if "1" in str(given) else "fsdp"
        raise RefusedError(f"strategy={given!r} is Accelerator(strategy={stage!r}) of easymp: pass 'fsdp'")
    return _known("strategy", str(given), STRATEGIES)()  # type: ignore[no-any-return]


def processes(devices: Any, cpu: bool) -> int:
    """Processes on this machine."""
    if isinstance(devices, (list, tuple)):
        if list(devices) != list(range(len(devices))):
            raise RefusedError(
                f"devices={devices!r}: set CUDA_VISIBLE_DEVICES, and pass the number of devices"
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

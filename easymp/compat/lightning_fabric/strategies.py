"""Fabric's names of precisions, strategies and devices, and what of easymp they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ...distributed import read_ranks
from ...errors import RefusedError, SettingError, nearest
from ..accelerate.plugins import FullyShardedDataParallelPlugin
from ..layer import Layer

layer = Layer("Lightning Fabric", "lightning_fabric", "lightning_fabric")
DOUBLE = "64-true"  # of this layer: easymp's "no", of a model in fp64
PRECISIONS = {
    **dict.fromkeys(("32", "32-true"), "no"),
    **dict.fromkeys(("16", "16-mixed"), "fp16"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bf16"),
    "16-true": "O3",
    "bf16-true": "bf16-true",
    **dict.fromkeys(("64", "64-true"), DOUBLE),
    "transformer-engine": "fp8",
}
ON_CPU = {"fp16": "bf16"}  # in place of a precision that CPUs have not
TRUE_DTYPES = {"O3": torch.float16, "bf16-true": torch.bfloat16, DOUBLE: torch.float64}  # of weights and all else
MIXED_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}  # of what forward gets
REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}
REDUCTIONS |= dict.fromkeys(("product", "prod"), "product")
FORKED = ("ddp_spawn", "ddp_fork", "ddp_notebook")
# Types of devices; of "auto" and "cpu" none is asked for.
ACCELERATORS = {"auto": (), "cpu": (), "gpu": ("cuda", "xpu", "mps"), "cuda": ("cuda",), "mps": ("mps",)}
# Attributes of a strategy that the Fabric has.
OF_FABRIC = """root_device world_size global_rank local_rank node_rank is_global_zero barrier broadcast all_gather
    all_reduce""".split()


class Strategy:
    """A strategy of easymp with its options. Of a Fabric it also knows ranks, device and collectives."""

    fabric: Callable[[], Any] = staticmethod(lambda: None)  # a weak reference to the Fabric that runs it

    def __init__(self, strategy: str, options: Any = None, activation_checkpointing: Any = None) -> None:
        self.strategy, self.options = strategy, options
        self.activation_checkpointing = activation_checkpointing

    num_nodes = property(lambda self: max(1, read_ranks().nodes))

    def __getattr__(self, name: str) -> Any:
        fabric = self.fabric()
        if name not in OF_FABRIC or fabric is None:
            raise AttributeError(f"a strategy has no {name!r} here{nearest(name, OF_FABRIC)}")
        return getattr(fabric, "device" if name == "root_device" else name)


def _class_names(option: str, policy: Any) -> list[str] | None:
    if policy is None:
        return None
    classes = list(policy) if isinstance(policy, (set, frozenset, list, tuple)) else [policy]
    if not all(isinstance(item, type) for item in classes):
        raise RefusedError(f"{option}={policy!r} is not honoured: pass a set of the modules' classes")
    return [item.__name__ for item in classes]


class FSDPStrategy(Strategy):
    """Strategy "fsdp", "hsdp" or "ddp", by the arguments of torch's FSDP. Policies are sets of classes."""

    def __init__(
        self, *, auto_wrap_policy: Any = None, activation_checkpointing_policy: Any = None, **options: Any
    ) -> None:
        wrap = _class_names("auto_wrap_policy", auto_wrap_policy)
        plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=wrap, **options)
        recomputed = _class_names("activation_checkpointing_policy", activation_checkpointing_policy)
        super().__init__(plugin.strategy, plugin.options, recomputed)


class DDPStrategy(Strategy):
    """Strategy "ddp"; `options` are fields of `easymp.DistributedDataParallelKwargs`."""

    def __init__(self, **options: Any) -> None:
        super().__init__("ddp", options or None)


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "auto": partial(Strategy, "auto"),
    "dp": partial(Strategy, "data_parallel"),
    "single_device": partial(Strategy, "single"),
    "ddp": DDPStrategy,
    **dict.fromkeys(FORKED, DDPStrategy),
    "ddp_find_unused_parameters_true": partial(DDPStrategy, find_unused_parameters=True),
    "ddp_find_unused_parameters_false": DDPStrategy,
    "fsdp": FSDPStrategy,
    "fsdp_cpu_offload": partial(FSDPStrategy, cpu_offload=True),
}


def lookup(option: str, name: str, table: Mapping[str, Any], error: type[ValueError] = RefusedError) -> Any:
    """The entry of `table` for the `name` that was passed as `option`. An `error` where there is none."""
    if name not in table:
        hint = nearest(name, table) or "."
        raise error(f"You selected an invalid {option} name: {option}={name!r}{hint} Known: {', '.join(table)}")
    return table[name]


def read_strategy(strategy: Any) -> Strategy:
    """The strategy that a name or an object asks for. RefusedError for names that are not run here."""
    if isinstance(strategy, Strategy):
        return strategy
    if str(strategy).startswith("deepspeed"):
        native = "zero1" if "1" in str(strategy) else "fsdp"
        raise RefusedError(f"strategy={strategy!r} is Accelerator(strategy={native!r}) of easymp: pass 'fsdp'")
    strategy_class: Callable[[], Strategy] = lookup("strategy", str(strategy), STRATEGIES)
    return strategy_class()


def is_cpu(accelerator: Any) -> bool:
    """Whether the CPU was asked for. SettingError for an accelerator that this machine does not have."""
    types = lookup("accelerator", str(accelerator), ACCELERATORS, SettingError)
    device = torch.accelerator.current_accelerator(check_available=True)
    if types and (device is None or device.type not in types):
        raise SettingError(f"accelerator={accelerator!r}: this machine has {device or 'a CPU only'}")
    return bool(accelerator == "cpu")


def count_processes(devices: Any, cpu: bool) -> int:
    """Processes on this machine that `devices` asks for."""
    if isinstance(devices, (list, tuple)) and devices:
        if list(devices) != list(range(len(devices))):
            raise RefusedError(f"devices={devices!r}: set CUDA_VISIBLE_DEVICES, and pass their number")
        return len(devices)
    if str(devices) in ("auto", "-1"):
        return 1 if cpu else max(1, torch.accelerator.device_count())
    if not str(devices).isdigit() or int(devices) < 1:
        raise SettingError(f"devices={devices!r} is neither a number of processes, nor -1, nor 'auto'")
    return int(devices)

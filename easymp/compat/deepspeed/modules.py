"""DeepSpeed's small modules: ``deepspeed.accelerator``, ``checkpointing``, ``utils`` and ``zero``, as `MODULES` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as recompute

from ...distributed import read_ranks
from ...errors import RefusedError
from ...logging import get_logger
from ..layer import device_of
from .config import Section, layer

logger = get_logger("easymp.compat.deepspeed.utils")

# -- accelerator ---------------------------------------------------------------------------------------------------------


# Answers on the CPU to names of torch.cuda, torch.xpu and their like.
ON_CPU: dict[str, int | None] = {"device_count": 1, "current_device": 0}
ON_CPU |= dict.fromkeys(
    "set_device synchronize empty_cache reset_peak_memory_stats manual_seed manual_seed_all".split()
)


class Device:
    """The device of this process, by DeepSpeed's names. Other names are those of torch.cuda or its like."""

    def __init__(self) -> None:
        self._kind = device_of(read_ranks()).type

    def device_name(self, device_index: int | None = None) -> str:
        """``"cuda"``, ``"cuda:1"``, ``"cpu"``."""
        return self._kind if device_index is None or self._kind == "cpu" else f"{self._kind}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def is_available(self) -> bool:
        return True

    is_fp16_supported = is_available

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self._kind == "cuda" else True

    def communication_backend_name(self) -> str:
        return "nccl" if self._kind == "cuda" else "gloo"

    def __getattr__(self, name: str) -> Any:
        """device_count, memory_allocated, empty_cache …; on the CPU there is one device, and memory is 0."""
        if not name.startswith("_") and self._kind != "cpu":
            return getattr(torch.get_device_module(self._kind), name)
        if name.startswith(("memory_", "max_memory_")):
            return lambda *_, **__: 0
        if name in ON_CPU:
            return lambda *_, **__: ON_CPU[name]
        raise AttributeError(f"get_accelerator().{name} is not part of easymp.compat: use torch.accelerator")


def get_accelerator() -> Device:
    """The device of this process."""
    return Device()


# -- checkpointing -------------------------------------------------------------------------------------------------------

_cpu: bool | None = None  # whether inputs are kept in host memory; None before `configure`


def configure(
    mpu_: Any = None, deepspeed_config: Any = None, checkpoint_in_cpu: bool | None = None, **others: Any
) -> None:
    """Set where the inputs of checkpointed functions are kept.

    Args:
        checkpoint_in_cpu: in host memory.
        others: partition_activations and other options of DeepSpeed, without effect.
    """
    global _cpu
    config = deepspeed_config if isinstance(deepspeed_config, dict) else {}
    named = Section(config, "activation_checkpointing").flag("cpu_checkpointing")
    _cpu = named if checkpoint_in_cpu is None else checkpoint_in_cpu
    ignored = [f"checkpointing.configure({name}=…)" for name, value in others.items() if value]
    layer.ignore(dict.fromkeys(ignored, "torch keeps inputs whole"))


def is_configured() -> bool:
    """Whether `configure` has been called."""
    return _cpu is not None


def reset() -> None:
    """Do nothing: no buffers are kept between iterations."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, computed again in backward with the same random numbers; only the arguments are kept."""
    with torch.autograd.graph.save_on_cpu() if _cpu else nullcontext():
        return recompute(function, *args, use_reentrant=False)


class CheckpointFunction:
    """For scripts that call ``CheckpointFunction.apply``."""

    apply = staticmethod(checkpoint)


# -- utils ---------------------------------------------------------------------------------------------------------------


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = 20) -> None:
    """Log `message` on these ranks; on all ranks for None, an empty list, or -1 among them."""
    rank = read_ranks().rank
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


class RepeatingLoader:
    """Iterates over `loader` again and again."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches: Iterator[Any] = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log `message` and the device memory of this rank if `force` is True."""
    if force:
        used, most = (f() / 2**30 for f in (Device().memory_allocated, Device().max_memory_allocated))
        logger.info("%s: memory allocated %.2f GiB, at most %.2f GiB", message, used, most)


# -- zero ----------------------------------------------------------------------------------------------------------------


@contextmanager
def Init(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Inside, the model is built whole; `initialize` shards it. To build without memory use ``torch.device("meta")``."""
    layer.ignore({"zero.Init": "the model is built whole, and sharded by initialize"})
    yield


@contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Inside, parameters are whole, as they are before `initialize` and up to stage 2.

    Raises:
        RefusedError: a parameter is sharded.
    """
    chosen = [params] if isinstance(params, torch.Tensor) else list(params)
    if enabled and any(hasattr(p, "full_tensor") for p in chosen):
        raise RefusedError(
            "zero.GatheredParameters of sharded parameters: read them by parameter.full_tensor() on all ranks (all of them by "
            "engine.accelerator.get_state_dict(engine)), and change them before initialize()"
        )
    yield


WHOLE = "of a sharded parameter use parameter.full_tensor() on all ranks; all weights are engine.accelerator.get_state_dict(engine)"
MODULES: dict[str, dict[str, Any]] = {
    "accelerator": {"get_accelerator": get_accelerator},
    "checkpointing": {
        **{f.__name__: f for f in (CheckpointFunction, checkpoint, configure, is_configured, reset)},
        "model_parallel_cuda_manual_seed": torch.manual_seed,
    },
    "utils": {
        "RepeatingLoader": RepeatingLoader,
        "log_dist": log_dist,
        "logger": logger,
        "see_memory_usage": see_memory_usage,
        "absent": {
            "safe_get_full_fp32_param": WHOLE,
            "safe_get_full_grad": f"{WHOLE}; gradients are parameter.grad",
            "safe_get_full_optimizer_state": "engine.optimizer.state has this rank's part",
            "zero_to_fp32": "easymp.load_weights(model, folder_of_a_checkpoint) reads whole weights of any number of ranks",
            "set_z3_leaf_modules": "say what is sharded as one by FullyShardedDataParallelPlugin's auto_wrap_policy",
            "groups": "use torch.distributed.new_group",
            "timer": "set wall_clock_breakdown, or use time.perf_counter",
        },
    },
    "zero": {
        "GatheredParameters": GatheredParameters,
        "Init": Init,
        "absent": {
            "register_external_parameter": "leave it out: FSDP gathers the parameters of whole modules",
            "TiledLinear": "use torch.nn.Linear",
        },
    },
}

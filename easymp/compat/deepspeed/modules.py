"""DeepSpeed's small modules: ``deepspeed.comm``, ``accelerator``, ``checkpointing``, ``utils`` and ``zero``, as `MODULES` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from ...base.dtensor import local
from ...checkpoint.conversion import convert, read_weights
from ...checkpoint.weights import load_weights
from ...distributed import World, locate, read_ranks
from ...errors import RefusedError
from ...logging import get_logger
from ...training.state import accelerators
from ..layer import device_of, named
from .config import NAMES, layer
from .engine import save_whole

logger = get_logger("easymp.compat.deepspeed.utils")

# -- comm ----------------------------------------------------------------------------------------------------------------

_world: World | None = None


def init_distributed(
    dist_backend: str | None = None, auto_mpi_discovery: bool = True, distributed_port: int = 29500, verbose: bool = True,
    timeout: Any = None, init_method: str | None = None, dist_init_required: bool | None = None, config: Any = None, rank: int = -1,
    world_size: int = -1,
) -> None:  # fmt: skip
    """Join the processes that a launcher announced; a process alone is a group of one. A group that runs is kept."""
    global _world
    if init_method or rank >= 0 or world_size > 0:
        raise RefusedError("init_distributed(init_method=…, rank=…, world_size=…): the launcher says them")
    if dist_backend not in (None, "nccl", "gloo"):
        layer.ignore({"init_distributed(dist_backend)": "NCCL on GPUs, gloo elsewhere"})
    if dist.is_initialized() or dist_init_required is False:
        return
    ranks = read_ranks()
    if ranks.announced:
        seconds = timeout.total_seconds() if hasattr(timeout, "total_seconds") else 120.0
        ranks = locate(ranks, seconds)
        _world = World(ranks, device_of(ranks), seconds)
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)


def get_rank(group: Any = None) -> int:
    """Rank of this process."""
    return dist.get_rank(group) if dist.is_initialized() else read_ranks().rank


def get_world_size(group: Any = None) -> int:
    """Number of processes."""
    return dist.get_world_size(group) if dist.is_initialized() else read_ranks().size


def get_local_rank() -> int:
    """Rank of this process on its node."""
    return read_ranks().local_rank


def log_summary(*args: Any, **kwargs: Any) -> None:
    """Do nothing: `Accelerator.profile` shows the time of communication."""


def destroy_process_group(group: Any = None) -> None:
    """Leave the group."""
    global _world
    if _world is not None and group is None:
        _world.close()
        _world = None
    elif dist.is_initialized():
        dist.destroy_process_group(group)


# -- accelerator ---------------------------------------------------------------------------------------------------------


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


# Names of torch.cuda and its like, for the CPU.
CPU = SimpleNamespace(
    **dict.fromkeys(NAMES["accelerator"]["cpu"]["nothing"].split(), _answer(None)),
    **dict.fromkeys(NAMES["accelerator"]["cpu"]["zero"].split(), _answer(0)),
    **dict.fromkeys(("manual_seed", "manual_seed_all"), torch.manual_seed),
    **dict.fromkeys(("stream", "device"), lambda index=None: nullcontext()),
    device_count=_answer(1),
    memory_stats=_answer({}),
    initial_seed=torch.initial_seed,
    get_rng_state=lambda device_index=None: torch.get_rng_state(),
    set_rng_state=lambda new_state, device_index=None: torch.set_rng_state(new_state),
    default_generators=[torch.default_generator],
)


class Device:
    """The device of this process, by DeepSpeed's names. Other names are those of torch.cuda or its like."""

    def __init__(self) -> None:
        self._name = device_of(read_ranks()).type

    def device_name(self, device_index: int | None = None) -> str:
        """``"cuda"``, ``"cuda:1"``, ``"cpu"``."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def communication_backend_name(self) -> str:
        return "nccl" if self._name == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self._name == "cuda" else True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def random(self) -> Any:
        return torch.random

    def default_generator(self, device_index: int) -> Any:
        return self.default_generators[device_index]

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def __getattr__(self, name: str) -> Any:
        """device_count, get_rng_state, manual_seed, memory_allocated …; on the CPU there is one device, and memory is 0."""
        if name in NAMES["accelerator"]["same"]:
            return _answer(NAMES["accelerator"]["same"][name])
        if name.endswith("Tensor") and hasattr(torch, name):
            return getattr(torch, name)
        there = CPU if self._name == "cpu" else torch.get_device_module(self._name)
        if name.startswith("_") or not hasattr(there, name):
            raise AttributeError(f"get_accelerator().{name} is not here: use torch.accelerator")
        return getattr(there, name)


def get_accelerator() -> Device:
    """The device of this process."""
    return Device()


# -- checkpointing -------------------------------------------------------------------------------------------------------

_cpu: bool | None = None  # whether inputs are kept in host memory; None before `configure`


def configure(
    mpu_: Any = None, deepspeed_config: Any = None, partition_activations: Any = None, contiguous_checkpointing: Any = None,
    num_checkpoints: Any = None, checkpoint_in_cpu: bool | None = None, synchronize: Any = None, profile: Any = None,
) -> None:  # fmt: skip
    """Set whether the inputs of checkpointed functions are kept in host memory; the other options have no effect."""
    global _cpu
    given = deepspeed_config if isinstance(deepspeed_config, dict) else {}
    named = bool(given.get("activation_checkpointing", {}).get("cpu_checkpointing"))
    _cpu = named if checkpoint_in_cpu is None else checkpoint_in_cpu
    others = {"partition_activations": partition_activations, "profile": profile}
    layer.ignore(
        {f"checkpointing.configure({n}=…)": "torch keeps inputs whole" for n, v in others.items() if v}
    )


def is_configured() -> bool:
    """Whether `configure` has been called."""
    return _cpu is not None


def reset() -> None:
    """Do nothing: no buffers are kept between iterations."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args)``, computed again in backward with the same random numbers; only the arguments are kept."""
    with torch.autograd.graph.save_on_cpu() if _cpu else nullcontext():
        return recompute(function, *args, use_reentrant=False, **kwargs)


# -- utils: whole values; where tensors are in parts, all ranks call these, with the same values ---------------------------------


def _held(param: Tensor, state: str = "", grad: bool = False) -> Any:
    """The tensor, or its part on this rank, that is stepped for `param`, or its `state` or `grad`; None where there is none."""
    run = next((acc._prepared for acc in accelerators() if id(param) in acc._prepared.stepped_by), None)
    held = param if run is None else run.masters.get(id(param), param)
    if grad:
        return param.grad if held.grad is None else held.grad
    if run is None or not param.requires_grad:
        return None
    if not state:
        return held
    (optimizer,) = run.optimizers_of([held])
    states = optimizer.state.get(held, {})
    if state not in states:
        raise ValueError(f"{state!r} is not a state of this parameter, which has {list(states)}")
    return states[state]


def _get(param: Tensor, state: str = "", grad: bool = False, whole: bool = True) -> Any:
    there = _held(param, state, grad)
    if there is None:
        return None
    there = there.full_tensor() if whole and hasattr(there, "full_tensor") else local(there)
    return (there if grad or state else there.float()).detach()


@torch.no_grad()
def _set(param: Tensor, value: Tensor, state: str = "", grad: bool = False, whole: bool = True) -> None:
    there = _held(param, state, grad)
    if there is None:
        raise ValueError(
            "there is nothing to set: the parameter is frozen, or it is not between backward() and step()"
        )
    if whole and hasattr(there, "placements"):
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = there.device_mesh, there.placements
        value = distribute_tensor(value.to(there.device), mesh, placements, src_data_rank=None)
    local(there).copy_(local(value))


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The whole parameter in fp32, its master where it has one; None before `initialize`, and of a frozen one."""
    return _get(param)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The whole gradient between backward and step, averaged over the ranks; None where there is none."""
    return _get(param, grad=True)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """A whole state of the optimizer, by torch's names (``"exp_avg"``); a ValueError where it has none of that name."""
    return _get(param, optim_state_key)


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set the parameter, or its master, which the next step copies to it."""
    _set(param, value)


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Set the gradient, between backward and step."""
    _set(param, value, grad=True)


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set a state of the optimizer."""
    _set(param, value, optim_state_key)


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """This rank's part of the parameter in fp32, under stage 3."""
    return _get(param, whole=False)


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """This rank's part of the gradient, under stage 3."""
    return _get(param, grad=True, whole=False)


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """This rank's part of a state of the optimizer."""
    return _get(param, optim_state_key, whole=False)


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set this rank's part of the parameter, or of its master."""
    _set(param, value, whole=False)


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Set this rank's part of the gradient."""
    _set(param, value, grad=True, whole=False)


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's part of a state of the optimizer."""
    _set(param, value, optim_state_key, whole=False)


# -- utils: weights of a checkpoint ------------------------------------------------------------------------------------------


def _place(checkpoint_dir: Any, tag: Any, exclude: bool = False) -> Path:
    if exclude:
        layer.ignore({"exclude_frozen_parameters": "a checkpoint does not say which weights are frozen"})
    found = Path(checkpoint_dir, "latest").read_text(encoding="utf-8").strip() if tag is None else str(tag)
    return Path(checkpoint_dir, found)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Any, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Tensor]:  # fmt: skip
    """The whole weights of a checkpoint of `DeepSpeedEngine.save_checkpoint`, in fp32, read at once; frozen ones, too."""
    state = read_weights(_place(checkpoint_dir, tag, exclude_frozen_parameters))
    return {name: t.float() if t.is_floating_point() else t for name, t in state.items()}


def load_state_dict_from_zero_checkpoint(model: Any, checkpoint_dir: Any, tag: str | None = None) -> Any:
    """Load these weights into `model`, on the CPU; into one whose parameters are sharded where it is, on all ranks."""
    if any(hasattr(p, "placements") for p in model.parameters()):
        load_weights(model, _place(checkpoint_dir, tag), strict=False, dtype="live")
        return model
    model.cpu().load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Any, output_dir: Any, max_shard_size: str = "5GB", safe_serialization: bool = False, tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """Write these weights as ``pytorch_model.bin``, or as ``model.safetensors`` and shards."""
    if safe_serialization:
        convert(_place(checkpoint_dir, tag, exclude_frozen_parameters), output_dir, "fp32", max_shard_size)
    else:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
        save_whole(state, Path(output_dir, "pytorch_model.bin"))


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = 20) -> None:
    """Log `message` on these ranks; on all ranks for None, an empty list, or -1 among them."""
    rank = read_ranks().rank
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


class RepeatingLoader:
    """Iterates over `loader` again and again."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = chain.from_iterable(repeat(loader))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log `message` and the device memory of this rank if `force` is True."""
    if force:
        used, most = (f() / 2**30 for f in (Device().memory_allocated, Device().max_memory_allocated))
        logger.info("%s: memory allocated %.2f GiB, at most %.2f GiB", message, used, most)


# -- zero ----------------------------------------------------------------------------------------------------------------


@contextmanager
def Init(module: Any = None, *args: Any, enabled: bool = True, **kwargs: Any) -> Iterator[None]:
    """Inside, the model is built whole; `initialize` shards it. To build without memory use ``torch.device("meta")``."""
    if enabled:
        layer.ignore({"zero.Init": "the model is built whole, and sharded by initialize"})
    yield


@contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Inside, parameters are whole, as they are before `initialize` and up to stage 2; sharded ones are refused."""
    chosen = [params] if isinstance(params, torch.Tensor) else list(params)
    if enabled and any(hasattr(p, "full_tensor") for p in chosen):
        raise RefusedError("zero.GatheredParameters: use utils.safe_get_full_fp32_param(p), on all ranks")
    yield


EXPORT = (get_fp32_state_dict_from_zero_checkpoint, load_state_dict_from_zero_checkpoint)
SAFE = (
    *(safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state),
    *(safe_set_full_fp32_param, safe_set_full_grad, safe_set_full_optimizer_state),
    *(safe_get_local_fp32_param, safe_get_local_grad, safe_get_local_optimizer_state),
    *(safe_set_local_fp32_param, safe_set_local_grad, safe_set_local_optimizer_state),
)
CHECKPOINTING = (checkpoint, configure, is_configured, reset)
MODULES: dict[str, dict[str, Any]] = {
    "accelerator": named(get_accelerator),
    "checkpointing": named(
        *CHECKPOINTING,
        CheckpointFunction=SimpleNamespace(apply=checkpoint),
        model_parallel_cuda_manual_seed=torch.manual_seed,
    ),
    # Every other name of `comm` is torch.distributed's: all_reduce, broadcast, barrier, ReduceOp and so on.
    "comm": named(
        *(destroy_process_group, get_local_rank, get_rank, get_world_size, init_distributed, log_summary),
        absent=partial(getattr, dist),
    ),
    "utils": named(*SAFE, RepeatingLoader, log_dist, see_memory_usage, logger=logger),
    "utils.zero_to_fp32": named(*EXPORT, convert_zero_checkpoint_to_fp32_state_dict),
    "zero": named(GatheredParameters, Init),
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": named(*CHECKPOINTING),
    "runtime.dataloader": named(RepeatingLoader),
    "runtime.utils": named(see_memory_usage),
    "runtime.zero": named(GatheredParameters, Init),
    "runtime.zero.partition_parameters": named(GatheredParameters, Init),
}

"""DeepSpeed's small modules: ``deepspeed.comm``, ``accelerator``, ``checkpointing``, ``utils`` and ``zero``.

From stage 2 on gradients are hidden between backward and step, where DeepSpeed leaves ``.grad`` None, too. At stage 3
parameters are DTensors with DeepSpeed's ``ds_id``, ``ds_shape``, ``ds_numel`` and ``ds_status``. All ranks call the
functions of ``utils`` and ``zero`` together, with the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.weak import WeakTensorKeyDictionary

from ...base.dtensor import local
from ...base.pytree import map_leaves
from ...checkpoint import torch_files
from ...checkpoint.export import convert, read_weights
from ...checkpoint.weights import load_weights
from ...distributed import read_ranks
from ...errors import RefusedError
from ...logging import get_logger
from ...training.state import accelerators, close_runs, current_world
from ..layer import device_of
from .config import Content, check_keys, layer, read_content

logger = get_logger("easymp.compat.deepspeed.utils")

# -- comm; its other names are those of torch.distributed


def init_distributed(
    dist_backend: str | None = None, auto_mpi_discovery: bool = True, distributed_port: int = 29500,
    verbose: bool = True, timeout: Any = None, init_method: str | None = None, dist_init_required: bool | None = None,
    config: Any = None, rank: int = -1, world_size: int = -1,
) -> None:  # fmt: skip
    """Join the processes that a launcher announced, or make a group of one; by NCCL on GPUs, and gloo elsewhere."""
    if init_method or rank >= 0 or world_size > 0:
        raise RefusedError("init_distributed(init_method=…, rank=…, world_size=…): the launcher says them")
    if dist.is_initialized() or dist_init_required is False:
        return
    if read_ranks().announced:
        current_world(timeout=timeout.total_seconds() if hasattr(timeout, "total_seconds") else None)
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


def destroy_process_group(group: Any = None) -> None:
    """Leave the group."""
    if group is None:
        close_runs(lambda run: True)
    if dist.is_initialized():
        dist.destroy_process_group(group)


# -- accelerator


class DeviceInterface:
    """The device of this process. Names that are not here are those of torch.cuda or its like."""

    def __init__(self) -> None:
        self._type = device_of(read_ranks()).type
        self._module = torch.get_device_module(self._type)

    def device_name(self, device_index: int | None = None) -> str:
        """``"cuda"``, ``"cuda:1"``, ``"cpu"``."""
        return self._type if device_index is None or self._type == "cpu" else f"{self._type}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(self._module.current_device())

    def communication_backend_name(self) -> str:
        return "nccl" if self._type == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        return self._type == "cpu" or torch.cuda.is_bf16_supported()

    def __getattr__(self, name: str) -> Any:
        """`device_count`, `synchronize`, `memory_allocated` and so on; on the CPU memory is 0."""
        if hasattr(self._module, name):
            return getattr(self._module, name)
        if self._type != "cpu" or name.startswith("_") or not hasattr(torch.cuda, name):
            raise AttributeError(f"get_accelerator().{name} is not here: use torch.accelerator")
        if "memory" in name:
            return lambda *args: 0
        return getattr(torch, name.removesuffix("_all"), lambda *args: None)  # manual_seed_all, …; empty_cache, …


get_accelerator = DeviceInterface

# -- checkpointing

_saves_on_cpu: bool | None = None  # whether inputs are kept in host memory; None before `configure`


def configure(
    mpu_: Any = None, deepspeed_config: Content | None = None, partition_activations: Any = None,
    contiguous_checkpointing: Any = None, num_checkpoints: Any = None, checkpoint_in_cpu: bool | None = None,
    synchronize: Any = None, profile: Any = None,
) -> None:  # fmt: skip
    """Set whether the inputs of checkpointed functions are kept in host memory; the other options have no effect."""
    global _saves_on_cpu
    section = read_content(deepspeed_config or {}).get("activation_checkpointing") or {}
    options = {"partition_activations": partition_activations, "profile": profile}
    ignored = {f"checkpointing.configure({name}=…)": "torch keeps inputs whole" for name in options if options[name]}
    layer.ignore(check_keys({"activation_checkpointing": section}) | ignored)
    _saves_on_cpu = bool(section.get("cpu_checkpointing")) if checkpoint_in_cpu is None else checkpoint_in_cpu


def is_configured() -> bool:
    """Whether `configure` has been called."""
    return _saves_on_cpu is not None


def reset() -> None:
    """Do nothing: no buffers are kept between iterations."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args)``, computed again in backward with the same random numbers; only the arguments are kept."""
    with torch.autograd.graph.save_on_cpu() if _saves_on_cpu else nullcontext():
        return recompute(function, *args, use_reentrant=False, **kwargs)


CheckpointFunction = SimpleNamespace(apply=checkpoint)

# -- utils


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = 20) -> None:
    """Log `message` on these ranks; on all ranks for None, an empty list, or -1 among them."""
    rank = read_ranks().rank
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def RepeatingLoader(loader: Iterable[Any]) -> Iterator[Any]:
    """Iterates over `loader` again and again."""
    return chain.from_iterable(repeat(loader))


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log `message` and the device memory of this rank if `force` is True."""
    if force:
        device = DeviceInterface()
        allocated, peak = device.memory_allocated() / 2**30, device.max_memory_allocated() / 2**30
        logger.info("%s: memory allocated %.2f GiB, at most %.2f GiB", message, allocated, peak)


# -- zero: gradients from stage 2 on, parameters at stage 3

PARTITIONED_GRADS: Any = WeakTensorKeyDictionary()  # parameter → its gradient, hidden between backward and step


class ZeroParamStatus(Enum):
    """Whether a parameter is whole: ``ds_status`` of a parameter at stage 3."""

    AVAILABLE, NOT_AVAILABLE, INFLIGHT = 1, 2, 3


def mark_sharded(parameters: Iterable[Tensor]) -> None:
    """Give sharded parameters the attributes by which scripts tell them."""
    for number, parameter in enumerate(parameters):
        marks = {"ds_id": number, "ds_shape": parameter.shape, "ds_numel": parameter.numel()}
        vars(parameter).update(marks, ds_status=ZeroParamStatus.NOT_AVAILABLE)


def hide_gradients(parameters: Sequence[Tensor]) -> None:
    """Set ``.grad`` to None, since a rank's part would pass for the whole."""
    reveal_gradients(parameters)
    for parameter in parameters:
        if parameter.grad is not None:
            PARTITIONED_GRADS[parameter], parameter.grad = parameter.grad, None


def reveal_gradients(parameters: Sequence[Tensor]) -> bool:
    """Give parameters their hidden gradients, plus those that came since; returns whether any were hidden."""
    hidden = [parameter for parameter in parameters if parameter in PARTITIONED_GRADS]
    for parameter in hidden:
        gradient = PARTITIONED_GRADS.pop(parameter)
        parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
    return bool(hidden)


@contextmanager
def Init(module: Any = None, *args: Any, enabled: bool = True, **kwargs: Any) -> Iterator[None]:
    """Build the model whole; `initialize` shards it. To build without memory use ``torch.device("meta")``."""
    if enabled:
        layer.ignore({"zero.Init": "the model is built whole, and sharded by initialize"})
    yield


class Gathered(DTensor):
    """A sharded parameter inside of `GatheredParameters`: every operation takes its `whole` tensor."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = map_leaves(lambda leaf: vars(leaf)["whole"] if type(leaf) is cls else leaf, (args, kwargs or {}))
        return func(*arguments[0], **arguments[1])


@contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Inside, parameters are whole on every rank; at the end those of `modifier_rank`, if any, are written back."""
    parameters = [params] if isinstance(params, Tensor) else list(params)
    status = ZeroParamStatus
    sharded: list[Any] = [p for p in parameters if enabled and getattr(p, "ds_status", None) is status.NOT_AVAILABLE]
    classes = [type(parameter) for parameter in sharded]
    for parameter in sharded:
        whole = parameter.full_tensor().detach().requires_grad_(parameter.requires_grad)
        vars(parameter).update(whole=whole, ds_status=status.AVAILABLE)
    for parameter in sharded:
        parameter.__class__ = Gathered
    try:
        yield
    finally:
        for parameter, sharded_class in zip(sharded, classes):
            parameter.__class__ = sharded_class
            vars(parameter).update(ds_status=status.NOT_AVAILABLE)
        whole_tensors = [vars(parameter).pop("whole") for parameter in sharded]
    if modifier_rank is None:
        return
    for parameter, whole in zip(sharded, whole_tensors):
        value = current_world().broadcast(whole, modifier_rank)
        for tensor in {id(t): t for t in (parameter, _stepped(parameter)[1])}.values():
            _fill(tensor, value)


# -- utils: values of one parameter


def _stepped(param: Tensor) -> tuple[Any, Tensor]:
    """The run that steps `param`, or None, and the tensor that it steps: the parameter, or its master."""
    run = next((acc._prepared for acc in accelerators() if id(param) in acc._prepared.stepped_by), None)
    return run, param if run is None else run.masters.get(id(param), param)


def _weight(param: Tensor) -> Tensor | None:
    run, stepped = _stepped(param)
    return None if run is None or not param.requires_grad else stepped


def gradient_of(param: Tensor) -> Tensor | None:
    """The gradient on this rank, of the parameter or its master, hidden or not."""
    stepped = _stepped(param)[1]
    gradient: Tensor | None = PARTITIONED_GRADS.get(param, param.grad if stepped.grad is None else stepped.grad)
    return gradient


def _state(param: Tensor, key: str) -> Tensor | None:
    run, stepped = _stepped(param)
    if run is None or not param.requires_grad:
        return None
    states: dict[str, Tensor] = run.optimizers_of([stepped])[0].state.get(stepped, {})
    if key not in states:
        raise ValueError(f"{key!r} is not a state of this parameter, which has {list(states)}")
    return states[key]


def _whole(tensor: Any) -> Tensor | None:
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return None if tensor is None else tensor.detach()


@torch.no_grad()
def _fill(tensor: Any, value: Tensor) -> None:
    if tensor is None:
        raise ValueError("there is nothing to set: the parameter is frozen, or it is not between backward() and step()")
    if isinstance(tensor, DTensor):
        value = value.to(tensor.device)
        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    local(tensor).copy_(local(value))


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The whole parameter in fp32, its master where it has one; None before `initialize`, and of a frozen one."""
    weight = _whole(_weight(param))
    return None if weight is None else weight.float()


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The whole gradient between backward and step, averaged over the ranks; None where there is none."""
    return _whole(gradient_of(param))


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """A whole state of the optimizer, by torch's names (``"exp_avg"``); a ValueError where it has none of that name."""
    return _whole(_state(param, optim_state_key))


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set the parameter, or its master, which the next step copies to it."""
    _fill(_weight(param), value)


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Set the gradient between backward and step. `value` includes the loss scale, where there is one."""
    _fill(gradient_of(param), value)
    for acc in accelerators():
        if id(param) in acc._prepared.stepped_by:
            acc._gradients.watch()  # a change of ours


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set a state of the optimizer."""
    _fill(_state(param, optim_state_key), value)


# -- utils.zero_to_fp32: weights of a checkpoint


def _folder(checkpoint_dir: Any, tag: Any, without_frozen: bool = False) -> Path:
    if without_frozen:
        raise RefusedError("exclude_frozen_parameters=True: a checkpoint has all weights; remove them by their names")
    return Path(checkpoint_dir, Path(checkpoint_dir, "latest").read_text("utf-8").strip() if tag is None else str(tag))


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Any, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Tensor]:
    """The whole weights of a checkpoint of `DeepSpeedEngine.save_checkpoint`, in fp32; `lazy_mode` has no effect."""
    state = read_weights(_folder(checkpoint_dir, tag, exclude_frozen_parameters))
    return {name: t.float() if t.is_floating_point() else t for name, t in state.items()}


def load_state_dict_from_zero_checkpoint(model: Any, checkpoint_dir: Any, tag: str | None = None) -> Any:
    """Load these weights into `model`; on all ranks if its parameters are sharded."""
    load_weights(model, _folder(checkpoint_dir, tag), strict=False, dtype="live")
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Any, output_dir: Any, max_shard_size: str = "5GB", safe_serialization: bool = False,
    tag: str | None = None, exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """Write these weights as ``pytorch_model.bin``, or as ``model.safetensors`` and shards."""
    if safe_serialization:
        convert(_folder(checkpoint_dir, tag, exclude_frozen_parameters), output_dir, "fp32", max_shard_size)
    else:
        state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        torch_files.write(state, Path(output_dir, "pytorch_model.bin"))

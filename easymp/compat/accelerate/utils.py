"""``accelerate.utils`` and its modules: collectives, nested batches, records, environment, ``is_…_available()``.

The modules below it (``accelerate.utils.operations`` …) all have the names of this one.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from operator import eq, ge, gt, le, lt, ne
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from ... import options
from ...base import pytree, rng
from ...base.units import read_bytes
from ...checkpoint import accelerate
from ...checkpoint.export import load
from ...distributed import read_ranks
from ...errors import LeafError, RefusedError, SettingError, WorldError
from ...logging import tqdm
from ...training import collectives, oom
from ...training.wrapper import unwrap
from ..layer import REFUSED, by_name
from . import plugins
from .plugins import layer
from .processes import DistributedType, InitProcessGroupKwargs, PartialState, PrecisionType

# -- operations -------------------------------------------------------------------------------------------------------


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Copy the tensors of one rank to all ranks, in place."""

    def in_place(leaf: torch.Tensor) -> torch.Tensor:
        leaf.detach().copy_(collectives.broadcast(leaf, from_process))
        return leaf

    return pytree.recursively_apply(in_place, tensor, error_on_other_type=True)


def gather(tensor: Any) -> Any:
    """As easymp's; on one process tensors stay as they are, numbers too."""
    gathered = collectives.gather(tensor)
    return tensor if PartialState().num_processes == 1 else gathered


def concatenate(data: Any, dim: int = 0) -> Any:
    """As easymp's; several values that are not tensors cannot be joined."""
    if len(data) > 1 and not all(isinstance(leaf, torch.Tensor) for leaf in pytree.leaves(data[0])):
        raise LeafError("concatenate() joins nested tensors only: take other values out first")
    return pytree.concatenate(data, dim)


def slice_tensors(data: Any, tensor_slice: slice, process_index: Any = None, num_processes: Any = None) -> Any:
    """Slice dimension 0 of every tensor; scalars and other leaves stay."""
    return pytree.slice_tensors(data, tensor_slice)


# -- models -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Inside, parameters of new modules are on the meta device, and with `include_buffers` their buffers, too."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:
            kind: Any = type(param)
            module._parameters[name] = kind(param.to("meta"), requires_grad=param.requires_grad)
            vars(module._parameters[name]).update(vars(param))

    with torch.device("meta") if include_buffers else contextlib.nullcontext():
        nn.Module.register_parameter = on_meta  # type: ignore[assignment]  # torch has no other way
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]  # the same as above


def set_module_tensor_to_device(
    module: nn.Module, tensor_name: str, device: Any, value: Any = None, dtype: Any = None, **options: Any
) -> None:
    """Put a parameter or buffer of `module` on `device`, with another `value` if given; `options` have no effect."""
    path, _, name = tensor_name.rpartition(".")
    owner = module.get_submodule(path)
    old = getattr(owner, name)
    if value is not None and value.shape != old.shape:
        raise SettingError(f"{tensor_name} has shape {tuple(old.shape)}: pass a value of it, not {tuple(value.shape)}")
    if value is None and old.is_meta and torch.device(device).type != "meta":
        raise SettingError(f"{tensor_name} is on the meta device and has no values: pass value=…")
    new = (old.data if value is None else torch.as_tensor(value)).to(device, dtype or old.dtype)
    setattr(owner, name, new if name in owner._buffers else type(old)(new, requires_grad=old.requires_grad))


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """The user's own module; without `keep_fp32_wrapper` also with its own forward after `evaluation_mode=True`."""
    if recursive:
        raise RefusedError("recursive=True: only whole models are wrapped here. Leave it out")
    compiled: Any = model if keep_torch_compile and is_compiled_module(model) else None
    module: nn.Module = unwrap(model, keep_torch_compile and compiled is None)
    attributes = vars(module)
    if not keep_fp32_wrapper and "_original_forward" in attributes:
        attributes["forward"] = attributes.pop("_original_forward")
    if compiled is None:
        return module
    compiled._orig_mod = module
    return model


def is_compiled_module(module: nn.Module) -> bool:
    """Whether torch.compile has wrapped `module`. Models that the Accelerator compiles keep their class."""
    return "_orig_mod" in module._modules


def is_peft_model(model: nn.Module) -> bool:
    """Whether `model` is one of PEFT's."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(extract_model_from_parallel(model), peft.PeftModel)


# -- processes, memory and files --------------------------------------------------------------------------------------


def find_executable_batch_size(
    function: Any = None, starting_batch_size: int = 128, reduce_batch_size_fn: Callable[[], int] | None = None
) -> Any:
    """As `easymp.find_executable_batch_size`; a size that does not fit is followed by nine tenths of it."""
    if function is None:
        return lambda decorated: find_executable_batch_size(decorated, starting_batch_size, reduce_batch_size_fn)
    size = starting_batch_size

    def smaller() -> int:
        nonlocal size
        size = int(size * 0.9)
        return size

    return oom.find_executable_batch_size(function, starting_batch_size, reduce_batch_size_fn or smaller)


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch; `device_specific` adds the rank to the seed."""
    rng.set_seed(seed + read_ranks().rank * device_specific, deterministic=deterministic)


def wait_for_everyone() -> None:
    """Wait until all processes are here."""
    PartialState().wait_for_everyone()


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give cached device memory back and collect garbage."""
    oom.release_memory()


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes of a size such as ``"10GB"`` or ``"1MiB"``."""
    return 0 if re.fullmatch(r"0+[A-Za-z]*", str(size)) else read_bytes(size, "size=")


# -- environment and versions -----------------------------------------------------------------------------------------


_COMPARISONS = {"<": lt, "<=": le, "==": eq, "!=": ne, ">=": ge, ">": gt}


def is_torch_version(operation: str, version: str) -> bool:
    """Whether torch's version is ``"<"``, ``">="`` … `version`."""
    if operation not in _COMPARISONS:
        raise SettingError(f"operation={operation!r} must be one of {', '.join(_COMPARISONS)}")
    return bool(_COMPARISONS[operation](TorchVersion(torch.__version__.partition("+")[0]), version))


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether the GPU has native bf16; True on CPUs, which always compute it."""
    return torch.cuda.is_bf16_supported(including_emulation=False) if torch.cuda.is_available() else True


def _installed(*packages: str) -> Callable[..., bool]:
    def available(*_: object, **__: object) -> bool:
        return any(importlib.util.find_spec(package) is not None for package in packages)

    return available


_PACKAGES = (
    "aim amdsmi bitsandbytes boto3 clearml comet_ml datasets dvclive import_timer matplotlib mlflow pandas peft pynvml "
    "pytest rich sagemaker schedulefree swanlab timm torchao torchdata torchvision trackio transformers triton wandb"
)
# Engines and devices that easymp never uses: scripts then take their path without them.
_NEVER = (
    "deepspeed habana hpu lomo megatron_lm mlu msamp musa neuron npu pippy sdaa torch_xla transformer_engine "
    "transformer_engine_mxfp8 fp8 4bit_bnb 8bit_bnb bitsandbytes_multi_backend xccl"
)
_AVAILABLE: dict[str, Any] = {
    **{name: _installed(name) for name in _PACKAGES.split()},
    **{name: _installed() for name in _NEVER.split()},
    "bnb": _installed("bitsandbytes"),
    "torchdata_stateful_dataloader": _installed("torchdata"),
    "tensorboard": _installed("tensorboard", "tensorboardX"),
    "cuda": lambda: torch.cuda.is_available(),
    "xpu": lambda check_device=False: torch.xpu.is_available(),
    "mps": lambda min_version="1.12": torch.backends.mps.is_available(),
    "fp16": lambda: True,  # on every device; `easymp env` says where it is fast
    "weights_only": lambda: True,
    "rocm": lambda: torch.version.hip is not None and torch.cuda.is_available(),
}
_CHECKS = {f"is_{name}_available": check for name, check in _AVAILABLE.items()}
_CHECKS["is_habana_gaudi1"] = _installed()
for _name, _check in _CHECKS.items():
    _check.__name__ = _check.__qualname__ = _name

# -- all names --------------------------------------------------------------------------------------------------------

_RECORDS = (
    "AutocastKwargs DDPCommunicationHookType DistributedDataParallelKwargs GradScalerKwargs GradientAccumulationPlugin "
    "KwargsHandler LoggerType ProfileKwargs ProjectConfiguration"
)
_PLUGINS = (
    "FullyShardedDataParallelPlugin TorchDynamoPlugin load_fsdp_model load_fsdp_optimizer save_fsdp_model "
    "save_fsdp_optimizer"
)
NAMES: dict[str, Any] = {
    **by_name(broadcast, concatenate, pytree.find_batch_size, pytree.recursively_apply, pytree.send_to_device),
    **by_name(slice_tensors, collectives.broadcast_object_list, gather, collectives.gather_object),
    **by_name(collectives.pad_across_processes, collectives.reduce, extract_model_from_parallel, init_empty_weights),
    **by_name(is_compiled_module, is_peft_model, set_module_tensor_to_device, set_seed, tqdm, wait_for_everyone),
    **by_name(clear_device_cache, convert_file_size_to_int, find_executable_batch_size, load, oom.release_memory),
    **by_name(is_bf16_available, is_torch_version, plugins.DataLoaderConfiguration),
    **by_name(DistributedType, InitProcessGroupKwargs, PrecisionType),
    **{name: getattr(options, name) for name in _RECORDS.split()},
    **{name: getattr(plugins, name) for name in _PLUGINS.split()},
    **{name: plugins.stand_in(name, layer.instead[name]) for name in REFUSED["accelerate"]["stand_ins"].split()},
    **accelerate.FILES,
    **_CHECKS,
    "DistributedOperationException": WorldError,
    "FSDP_AUTO_WRAP_POLICY": ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"],
    "FSDP_SHARDING_STRATEGY": list(plugins.SHARDING),
    "is_torch_tensor": torch.is_tensor,
    "should_reduce_batch_size": oom.out_of_memory,
}
globals().update(NAMES)
__all__ = sorted(NAMES)
__path__: list[str] = []  # modules below this one are made here
_MODULES = (
    "constants dataclasses deepspeed environment imports fsdp_utils megatron_lm memory modeling offload operations "
    "other random tqdm versions bnb"
)
layer.submodules(__name__, dict.fromkeys(_MODULES.split(), NAMES))
__getattr__ = layer.absent(__name__)

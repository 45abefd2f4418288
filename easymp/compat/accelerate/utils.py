"""``accelerate.utils`` and its modules: collectives, nested batches, records, environment, ``is_…_available()``.

The modules below it (``accelerate.utils.operations`` …) all have the names of this one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from ... import options
from ...base import env, pytree, rng
from ...base.units import read_bytes
from ...checkpoint import accelerate, torch_files
from ...checkpoint.huggingface import load, save_tree
from ...checkpoint.weights import load_weights
from ...distributed import read_ranks
from ...errors import LeafError, RefusedError, SettingError, WorldError
from ...logging import get_logger, tqdm
from ...training import collectives, oom
from ...training.wrapper import unwrap
from ..layer import by_name, submodules
from . import loaders, plugins
from .plugins import INSTEAD, layer
from .processes import DistributedType, InitProcessGroupKwargs, PartialState, PrecisionType

logger = get_logger(__name__)

# -- operations -------------------------------------------------------------------------------------------------------


def convert_to_fp32(tensor: Any) -> Any:
    """The tree with its half-precision tensors in fp32."""
    halves = (torch.float16, torch.bfloat16)
    return pytree.recursively_apply(lambda t: t.float() if t.dtype in halves else t, tensor)


class ConvertOutputsToFp32:
    """A function with outputs in fp32; it can be pickled where the function can."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))


def concatenate(data: Any, dim: int = 0) -> Any:
    """As easymp's; several values that are not tensors cannot be joined."""
    if len(data) > 1 and not all(isinstance(leaf, torch.Tensor) for leaf in pytree.leaves(data[0])):
        raise LeafError("concatenate() joins nested tensors only: take other values out first")
    return pytree.concatenate(data, dim)


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Dimension 0 of every tensor cut to `tensor_slice`; the last two arguments make no difference, as there."""
    return pytree.slice_tensors(data, tensor_slice)


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """The items as a list, tuple or named tuple of the type of `obj`."""
    is_namedtuple = isinstance(obj, tuple) and hasattr(obj, "_fields")
    return type(obj)(*generator) if is_namedtuple else type(obj)(generator)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Copy the tensors of one rank to all ranks, in place."""

    def in_place(leaf: torch.Tensor) -> torch.Tensor:
        leaf.detach().copy_(collectives.broadcast(leaf, from_process))
        return leaf

    return pytree.recursively_apply(in_place, tensor, error_on_other_type=True)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """As easymp's; a nested tensor, and one without dimension `dim`, stays as it is."""
    if isinstance(tensor, torch.Tensor) and (tensor.is_nested or not -tensor.ndim <= dim < tensor.ndim):
        return tensor
    return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)


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
    """Put a parameter or buffer of `module` on `device`, with another `value` if one is given.

    `options` make no difference.
    """
    *path, name = tensor_name.split(".")
    owner = module.get_submodule(".".join(path))
    old = getattr(owner, name)
    if value is not None and value.shape != old.shape:
        shapes = f'set a tensor of shape {value.shape} in "{name}" (which has shape {old.shape})'
        raise SettingError(f"Trying to {shapes}, this looks incorrect: pass a value of the same shape")
    if value is None and old.is_meta and torch.device(device).type != "meta":
        raise SettingError(f"{tensor_name} is on the meta device and has no values: pass value=…")
    new = (old.data if value is None else torch.as_tensor(value)).to(device, dtype or old.dtype)
    if name in owner._buffers:
        owner._buffers[name] = new
    else:
        owner._parameters[name] = type(old)(new, requires_grad=old.requires_grad)


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """The user's own module.

    ``keep_fp32_wrapper=False`` also gives it back the forward that `ConvertOutputsToFp32` wrapped.
    """
    if recursive:
        raise RefusedError("recursive=True: only whole models are wrapped here. Leave it out")
    compiled: Any = model if keep_torch_compile and is_compiled_module(model) else None
    module: nn.Module = unwrap(model, keep_torch_compile and compiled is None)
    attributes = vars(module)
    if not keep_fp32_wrapper and "_original_forward" in attributes:
        attributes["forward"] = attributes.pop("_original_forward")
    if compiled is None:
        return module
    if module is not compiled._orig_mod:
        compiled._orig_mod = module
    return model


def is_compiled_module(module: nn.Module) -> bool:
    """Whether torch.compile has wrapped `module`. Models that the Accelerator compiles keep their class."""
    return "_orig_mod" in module._modules


def is_peft_model(model: nn.Module) -> bool:
    """Whether `model` is one of PEFT's."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(extract_model_from_parallel(model), peft.PeftModel)


def load_checkpoint_in_model(
    model: nn.Module, checkpoint: Any, device_map: Any = None, *args: Any, strict: bool = False, **options: Any
) -> None:  # fmt: skip
    """Load what `save_model` wrote into a model, or another file or folder of weights.

    One device, ``{"": device}``, is honoured.
    """
    honoured = ("dtype", "offload_state_dict")  # the second one saves memory only
    refused = {name for name, value in options.items() if value not in (None, False) and name not in honoured}
    if set(device_map or {"": 0}) != {""} or any(args) or refused:
        raise RefusedError(f"load_checkpoint_in_model(device_map=…, offload_…): {INSTEAD['dispatch_model']}")
    path, dtype = Path(checkpoint), options.get("dtype")
    files = [path] if path.suffix in torch_files.SUFFIXES else sorted(path.glob("pytorch_model*.bin"))
    for index in [path] if path.name.endswith(".index.json") else path.glob("*.index.json"):
        table = json.loads(index.read_text())
        shards = {index.parent / file for file in table.get("weight_map", table).values()}
        files = sorted(file for file in shards if file.suffix != ".safetensors")
    if not files:
        load_weights(model, checkpoint, strict=strict, dtype=dtype)
    elif dtype is not None:
        model.to(dtype)
    for file in files:
        unknown = model.load_state_dict(torch_files.read(os.fspath(file)), strict and len(files) == 1).unexpected_keys
        if unknown:
            logger.warning("%s: the weights %s were not used when the model was loaded", file, unknown)
    if device_map:
        model.to(device_map[""])


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:  # fmt: skip
    """Parameters and buffers of `module` by name, without its submodules' unless `recurse`."""
    yield from module.named_parameters(recurse=recurse)
    for name, buffer in module.named_buffers(recurse=recurse) if include_buffers else ():
        path, _, leaf = name.rpartition(".")
        if not (remove_non_persistent and leaf in module.get_submodule(path)._non_persistent_buffers_set):
            yield name, buffer


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


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write an object on the main process; see `Accelerator.save` of this layer."""
    if save_on_each_node:
        raise RefusedError("save(save_on_each_node=True): write to a place that all nodes reach")
    if PartialState().is_main_process:
        (save_tree if safe_serialization else torch_files.write)(obj, f)


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes of a size such as ``"10GB"`` or ``"1MiB"``."""
    return 0 if re.fullmatch(r"0+[A-Za-z]*", str(size)) else read_bytes(size, "size=")


# -- environment and versions -----------------------------------------------------------------------------------------


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 for "yes", "true", "1" …, 0 for "no", "false", "0" …; ValueError for other words."""
    text = str(value).lower()
    if text not in env.TRUE | env.FALSE - {""} | {"y", "t", "n", "f"}:
        raise ValueError(f"{value!r} is neither yes nor no")
    truth = text in env.TRUE or text in ("y", "t")
    return truth if to_bool else int(truth)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Whether a variable says yes."""
    return bool(str_to_bool(env.read(key, str(default)) or "no"))


def patch_environment(**kwargs: Any) -> AbstractContextManager[None]:
    """Inside, these variables are set, with their names in capitals."""
    return env.override(**{key.upper(): str(value) for key, value in kwargs.items()})


_COMPARISONS = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def compare_versions(library_or_version: str, operation: str, requirement_version: str) -> bool:
    """Whether an installed package, or a version, is ``"<"``, ``">="`` … `requirement_version`."""
    if operation not in _COMPARISONS:
        raise SettingError(f"operation={operation!r} is not one of {', '.join(_COMPARISONS)}")
    text = str(library_or_version)
    version = TorchVersion((text if text[:1].isdigit() else importlib.metadata.version(text)).partition("+")[0])
    return bool(_COMPARISONS[operation](version, str(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the version of torch as `compare_versions` does."""
    return compare_versions("torch", operation, version)


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

RNGType = StrEnum("RNGType", "TORCH CUDA MLU SDAA MUSA NPU XLA XPU HPU NEURON GENERATOR", module=__name__)
_RECORDS = (
    "AutocastKwargs DDPCommunicationHookType DistributedDataParallelKwargs GradScalerKwargs GradientAccumulationPlugin "
    "KwargsHandler LoggerType ProfileKwargs ProjectConfiguration"
)
_PLUGINS = (
    "DynamoBackend FullyShardedDataParallelPlugin TorchDynamoPlugin load_fsdp_model load_fsdp_optimizer "
    "save_fsdp_model save_fsdp_optimizer"
)
NAMES: dict[str, Any] = {
    **by_name(ConvertOutputsToFp32, broadcast, concatenate, convert_to_fp32, honor_type, pad_across_processes),
    **by_name(pytree.find_batch_size, pytree.recursively_apply, pytree.send_to_device, slice_tensors),
    **by_name(collectives.broadcast_object_list, collectives.gather, collectives.gather_object, collectives.reduce),
    **by_name(extract_model_from_parallel, init_empty_weights, is_compiled_module, is_peft_model),
    **by_name(load_checkpoint_in_model, named_module_tensors, set_module_tensor_to_device),
    **by_name(clear_device_cache, convert_file_size_to_int, find_executable_batch_size, load, oom.release_memory, save),
    **by_name(loaders.DataLoaderConfiguration, loaders.synchronize_rng_state, loaders.synchronize_rng_states),
    **by_name(compare_versions, is_bf16_available, is_torch_version, parse_flag_from_env, patch_environment),
    **by_name(DistributedType, InitProcessGroupKwargs, PrecisionType, set_seed, str_to_bool, tqdm, wait_for_everyone),
    **{name: getattr(options, name) for name in _RECORDS.split()},
    **{name: getattr(plugins, name) for name in _PLUGINS.split()},
    **{name: plugins.stand_in(name, INSTEAD[name]) for name in plugins.REFUSED_NAMES["stand_ins"].split()},
    **accelerate.FILES,
    **_CHECKS,
    "DistributedOperationException": WorldError,
    "FSDP_AUTO_WRAP_POLICY": ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"],
    "FSDP_SHARDING_STRATEGY": list(plugins.SHARDING),
    "RNGType": RNGType,
    "convert_outputs_to_fp32": ConvertOutputsToFp32,
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
submodules(__name__, {module: {**NAMES, "absent": INSTEAD} for module in _MODULES.split()}, layer, "accelerate.utils")
__getattr__ = layer.absent("accelerate.utils", INSTEAD, lambda: __all__)

"""``accelerate.utils`` and its modules: collectives, nested batches, records, environment, versions, ``is_…_available()``.

The modules below it (``accelerate.utils.operations`` …) all have the names of this one.
"""
# ruff: noqa: F401 (what is imported belongs to the names of this module)

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
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from ...base import env, pytree
from ...base.pytree import find_batch_size, recursively_apply, send_to_device
from ...base.rng import set_seed
from ...checkpoint import accelerate
from ...checkpoint.huggingface import load, save_tree
from ...checkpoint.weights import load_weights
from ...distributed.processes import DistributedType, PrecisionType
from ...errors import BatchError, LeafError, RefusedError, SettingError
from ...errors import WorldError as DistributedOperationException
from ...logging import get_logger, tqdm
from ...options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    LoggerType,
    ProfileKwargs,
    ProjectConfiguration,
)
from ...settings import read_bytes
from ...training import collectives, oom
from ...training.collectives import broadcast, broadcast_object_list, gather, gather_object, reduce
from ...training.oom import out_of_memory as should_reduce_batch_size
from ...training.oom import release_memory
from ...training.state import PartialState
from ...training.wrapper import unwrap
from ..layer import submodules
from . import plugins
from .plugins import (
    INSTEAD,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    TorchDynamoPlugin,
    layer,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)

logger = get_logger(__name__)

# -- operations ---------------------------------------------------------------------------------------------------


class CannotPadNestedTensorWarning(UserWarning):
    """`pad_across_processes` leaves nested tensors as they are."""


is_torch_tensor = torch.is_tensor


def convert_to_fp32(tensor: Any) -> Any:
    """The tree with its half-precision tensors in fp32."""
    halves = (torch.float16, torch.bfloat16)
    return recursively_apply(lambda t: t.float() if t.dtype in halves else t, tensor)


class ConvertOutputsToFp32:
    """A function with outputs in fp32; it can be pickled where the function can."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))


convert_outputs_to_fp32 = ConvertOutputsToFp32


def listify(data: Any) -> Any:
    """The tree with lists of numbers in place of tensors."""
    return recursively_apply(lambda t: t.detach().cpu().tolist(), data)


def find_device(data: Any) -> torch.device | None:
    """Device of the first tensor of the tree."""
    return next((leaf.device for leaf in pytree.leaves(data) if isinstance(leaf, torch.Tensor)), None)


def concatenate(data: Any, dim: int = 0) -> Any:
    """As easymp's; several values that are not tensors cannot be joined."""
    if len(data) > 1 and not all(isinstance(leaf, torch.Tensor) for leaf in pytree.leaves(data[0])):
        raise LeafError("concatenate() joins nested tensors only: take other values out first")
    return pytree.concatenate(data, dim)


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Dimension 0 of every tensor cut to `tensor_slice`; the last two arguments make no difference, as in Accelerate."""
    return pytree.slice_tensors(data, tensor_slice)


def ignorant_find_batch_size(data: Any) -> int | None:
    """As `find_batch_size`; None where there is no tensor."""
    with contextlib.suppress(BatchError, TypeError):
        return find_batch_size(data)
    return None


def is_namedtuple(data: Any) -> bool:
    """Whether `data` is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """The items as a list, tuple or named tuple of the type of `obj`."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """As easymp's; a nested tensor, and one without dimension `dim`, stays as it is."""
    if isinstance(tensor, torch.Tensor):
        if getattr(tensor, "is_nested", False):
            warnings.warn("a nested tensor is not padded", CannotPadNestedTensorWarning, stacklevel=2)
            return tensor
        if not -tensor.ndim <= dim < tensor.ndim:
            return tensor
    return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)


@contextlib.contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Inside, parameters of new modules are on the meta device, and with `include_buffers` their buffers, too."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:
            kind, attributes = type(param), vars(param)
            module._parameters[name] = kind(param.to("meta"), requires_grad=param.requires_grad)
            vars(module._parameters[name]).update(attributes)

    with torch.device("meta") if include_buffers else contextlib.nullcontext():
        nn.Module.register_parameter = on_meta  # type: ignore[assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def set_module_tensor_to_device(
    module: nn.Module, tensor_name: str, device: Any, value: Any = None, dtype: Any = None, **options: Any
) -> None:
    """Put a parameter or buffer of `module` on `device`, with another `value` if one is given. `options` make no difference."""
    *path, name = tensor_name.split(".")
    owner = module.get_submodule(".".join(path))
    old = getattr(owner, name)
    if value is not None and value.shape != old.shape:
        raise SettingError(
            f'Trying to set a tensor of shape {value.shape} in "{name}" (which has shape {old.shape}), this looks incorrect.'
        )
    if value is None and old.is_meta and torch.device(device).type != "meta":
        raise SettingError(f"{tensor_name} is on the meta device and has no values: pass value=…")
    new = (old.data if value is None else torch.as_tensor(value)).to(device, dtype or old.dtype)
    if name in owner._buffers:
        owner._buffers[name] = new
    else:
        owner._parameters[name] = type(old)(new, requires_grad=old.requires_grad)


# -- other and memory ---------------------------------------------------------------------------------------------


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """The user's own module; ``keep_fp32_wrapper=False`` also gives it back the forward that `convert_outputs_to_fp32` wrapped."""
    if recursive:
        raise RefusedError("recursive=True: only whole models are wrapped here. Leave it out")
    compiled = keep_torch_compile and is_compiled_module(model)
    module = unwrap(model, keep_torch_compile and not compiled)
    own = vars(module)
    if not keep_fp32_wrapper and "_original_forward" in own:
        own["forward"] = own.pop("_original_forward")
    if not compiled:
        return module
    if module is not model._orig_mod:
        model._orig_mod = module
    return model


def is_compiled_module(module: nn.Module) -> bool:
    """Whether torch.compile has wrapped `module`. Models that the Accelerator compiles keep their class."""
    return "_orig_mod" in module._modules


def is_peft_model(model: nn.Module) -> bool:
    """Whether `model` is one of PEFT's."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(extract_model_from_parallel(model), peft.PeftModel)


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether a parameter of `model` is a DTensor."""
    return any(hasattr(p, "to_local") for p in model.parameters())


def load_checkpoint_in_model(
    model: nn.Module, checkpoint: Any, device_map: Any = None, *others: Any, strict: bool = False, **options: Any
) -> None:  # fmt: skip
    """Load what `save_model` wrote into a model, or another file or folder of weights; one device, ``{"": device}``, is honoured."""
    free = ("dtype", "offload_state_dict")  # the second one saves memory only
    given = {
        name: value for name, value in options.items() if value not in (None, False) and name not in free
    }
    if set(device_map or {"": 0}) != {""} or any(others) or given:
        raise RefusedError(f"load_checkpoint_in_model(device_map=…, offload_…): {INSTEAD['dispatch_model']}")
    place, dtype = Path(checkpoint), options.get("dtype")
    found = (
        [place]
        if place.suffix in (".bin", ".pt", ".pth", ".ckpt")
        else sorted(place.glob("pytorch_model*.bin"))
    )
    for index in [place] if place.name.endswith(".index.json") else place.glob("*.index.json"):
        names = json.loads(index.read_text())
        files = {index.parent / file for file in names.get("weight_map", names).values()}
        found = sorted(file for file in files if file.suffix != ".safetensors")
    if not found:
        load_weights(model, checkpoint, strict=strict, dtype=dtype)
    elif dtype is not None:
        model.to(dtype)
    for file in found:
        unknown = model.load_state_dict(
            accelerate.read(os.fspath(file)), strict and len(found) == 1
        ).unexpected_keys
        if unknown:
            logger.warning("%s: the weights %s were not used when the model was loaded", file, unknown)
    if device_map:
        model.to(device_map[""])


def find_executable_batch_size(
    function: Any = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """As `easymp.find_executable_batch_size`; a size that does not fit is followed by nine tenths of it."""
    if function is None:
        return lambda given: find_executable_batch_size(given, starting_batch_size, reduce_batch_size_fn)
    size = starting_batch_size

    def smaller() -> int:
        nonlocal size
        size = int(size * 0.9)
        return size

    return oom.find_executable_batch_size(function, starting_batch_size, reduce_batch_size_fn or smaller)


def synchronize_rng_states(rng_types: Iterable[Any], generator: torch.Generator | None = None) -> None:
    """Give all ranks rank 0's random state: of "torch", of the device ("cuda" …), or of a `generator`."""
    for word in map(str, rng_types):
        if word == "generator":
            if generator is None:
                raise SettingError("synchronize_rng_states(['generator']): pass the generator")
            read, write = generator.get_state, generator.set_state
        else:
            there: Any = torch if word == "torch" else torch.get_device_module(PartialState().device)
            read, write = there.get_rng_state, there.set_rng_state
        held = [read()]
        broadcast_object_list(held)
        write(held[0])


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """`synchronize_rng_states` of one."""
    synchronize_rng_states([rng_type], generator)


def wait_for_everyone() -> None:
    """Wait until all processes are here."""
    PartialState().wait_for_everyone()


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give cached device memory back and collect garbage."""
    release_memory()


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write an object on the main process; see `Accelerator.save` of this layer."""
    if save_on_each_node:
        raise RefusedError("save(save_on_each_node=True): write to a place that all nodes reach")
    if PartialState().is_main_process:
        (save_tree if safe_serialization else accelerate.write)(obj, f)


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes of a size such as ``"10GB"`` or ``"1MiB"``."""
    return 0 if re.fullmatch(r"0+[A-Za-z]*", str(size)) else read_bytes(size, "size=")


def dtype_byte_size(dtype: torch.dtype) -> float:
    """Bytes of one element, by its bits: an eighth for bool."""
    return 1 / 8 if dtype == torch.bool else dtype.itemsize


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Names of the parameters of `model` that are one, in groups."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [sorted(same) for same in names.values() if len(same) > 1]


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:  # fmt: skip
    """Parameters and buffers of `module` by name, without its submodules' unless `recurse`."""
    yield from module.named_parameters(recurse=recurse)
    for name, buffer in module.named_buffers(recurse=recurse) if include_buffers else ():
        path, _, leaf = name.rpartition(".")
        if not (remove_non_persistent and leaf in module.get_submodule(path)._non_persistent_buffers_set):
            yield name, buffer


def retie_parameters(model: nn.Module, tied_params: Iterable[Iterable[str]]) -> None:
    """Make the parameters of each group of names one again: the first that is not on the meta device."""
    for names in tied_params:
        places = [(model.get_submodule(path), name) for path, _, name in (n.rpartition(".") for n in names)]
        held = [getattr(*place) for place in places]
        one = next((parameter for parameter in held if not parameter.is_meta), held[0])
        for module, name in places:
            setattr(module, name, one)


def load_state_dict(checkpoint_file: Any, device_map: Any = None) -> Any:
    """The tensors of a file of weights, on the CPU."""
    if device_map is not None:
        raise RefusedError(f"load_state_dict(device_map=…): {INSTEAD['dispatch_model']}")
    return accelerate.read_state_dict(checkpoint_file)


def convert_bytes(size: float) -> str:
    """A number of bytes in words."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024.0:
            return f"{round(size, 2)} {unit}"
        size /= 1024.0
    return f"{round(size, 2)} PB"


# -- environment and versions -------------------------------------------------------------------------------------


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 for "yes", "true", "1" …, 0 for "no", "false", "0" …; ValueError for other words."""
    word = str(value).lower()
    if word not in env.TRUE | env.FALSE - {""} | {"y", "t", "n", "f"}:
        raise ValueError(f"{value!r} is neither yes nor no")
    yes = word in env.TRUE or word in ("y", "t")
    return yes if to_bool else int(yes)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Whether a variable says yes."""
    return bool(str_to_bool(env.read(key, str(default)) or "no"))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """The value of a variable."""
    return env.read(key, str(default)) or ""


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """The first of these variables that is an integer of at least 0."""
    found = (env.integer(key, -1) for key in env_keys)
    return next((number for number in found if number is not None and number >= 0), default)


def patch_environment(**kwargs: Any) -> AbstractContextManager[None]:
    """Inside, these variables are set, with their names in capitals."""
    return env.override(**{key.upper(): str(value) for key, value in kwargs.items()})


@contextlib.contextmanager
def _as_before(prefix: str, clear: bool) -> Iterator[None]:
    before = {name: env.read(name) for name in env.names(prefix)}
    env.put(dict.fromkeys(before if clear else ()))
    try:
        yield
    finally:
        env.put({**dict.fromkeys(env.names(prefix)), **before})


def clear_environment() -> AbstractContextManager[None]:
    """Inside, no variable is set; afterwards all are as they were."""
    return _as_before("", clear=True)


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorate a function, or the tests of a class and its subclasses: variables ``ACCELERATE_…`` are afterwards as they were before."""
    if isinstance(func_or_cls, type):
        for name in (name for name in dir(func_or_cls) if name.startswith("test")):
            setattr(func_or_cls, name, purge_accelerate_environment(getattr(func_or_cls, name)))
        vars_of: Any = func_or_cls
        vars_of.__init_subclass__ = classmethod(lambda cls, **_: purge_accelerate_environment(cls))
        return func_or_cls
    return _as_before("ACCELERATE_", clear=False)(func_or_cls)


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Those of the libraries that are imported."""
    return [name for name in library_names if name in sys.modules]


_COMPARED = {"<": "lt", "<=": "le", "==": "eq", "!=": "ne", ">=": "ge", ">": "gt"}


def compare_versions(library_or_version: str, operation: str, requirement_version: str) -> bool:
    """Whether an installed package, or a version, is ``"<"``, ``">="`` … `requirement_version`."""
    if operation not in _COMPARED:
        raise SettingError(f"operation={operation!r} is not one of {', '.join(_COMPARED)}")
    given = str(library_or_version)
    version = given if given[:1].isdigit() else importlib.metadata.version(given)
    found = TorchVersion(version.partition("+")[0])
    return bool(getattr(operator, _COMPARED[operation])(found, str(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the version of torch as `compare_versions` does."""
    return compare_versions("torch", operation, version)


# -- imports ----------------------------------------------------------------------------------------------------------


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether the GPU has native bf16; True on CPUs, which always compute it."""
    return torch.cuda.is_bf16_supported(including_emulation=False) if torch.cuda.is_available() else True


def _installed(*packages: str) -> Callable[..., bool]:
    def available(*_: object, **__: object) -> bool:
        return any(importlib.util.find_spec(package) is not None for package in packages)

    return available


_PACKAGES = (
    "aim amdsmi bitsandbytes boto3 clearml comet_ml datasets dvclive import_timer matplotlib mlflow pandas peft pynvml pytest rich "
    "sagemaker schedulefree swanlab timm torchao torchdata torchvision trackio transformers triton wandb"
)
# Engines and devices that easymp never uses: scripts then take their path without them.
_NEVER = (
    "deepspeed habana hpu lomo megatron_lm mlu msamp musa neuron npu pippy sdaa torch_xla transformer_engine transformer_engine_mxfp8 "
    "fp8 4bit_bnb 8bit_bnb torchdata_stateful_dataloader bitsandbytes_multi_backend xccl"
)
_CHECKS: dict[str, Any] = {
    **{name: _installed(name) for name in _PACKAGES.split()},
    **{name: _installed() for name in _NEVER.split()},
    "bnb": _installed("bitsandbytes"),
    "tensorboard": _installed("tensorboard", "tensorboardX"),
    "cuda": lambda: torch.cuda.is_available(),
    "xpu": lambda check_device=False: torch.xpu.is_available(),
    "mps": lambda min_version="1.12": torch.backends.mps.is_available(),
    "fp16": lambda: True,  # on every device; `easymp env` says where it is fast
    "weights_only": lambda: True,
    "rocm": lambda: torch.version.hip is not None and torch.cuda.is_available(),
}
_imports = {f"is_{name}_available": check for name, check in _CHECKS.items()}
_imports["is_habana_gaudi1"] = _installed()
for _name, _check in _imports.items():
    _check.__name__ = _check.__qualname__ = _name

# -- all names ----------------------------------------------------------------------------------------------------

# Words for `rng_types`, which has no effect: the order of data is the same on all ranks by itself.
RNGType = StrEnum("RNGType", "TORCH CUDA MLU SDAA MUSA NPU XLA XPU HPU NEURON GENERATOR", module=__name__)
FSDP_AUTO_WRAP_POLICY = ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
FSDP_SHARDING_STRATEGY = list(plugins.SHARDING)
globals().update(_imports, **accelerate.FILES)
globals().update({n: plugins.stand_in(n, INSTEAD[n]) for n in plugins.REFUSED_NAMES["stand_ins"].split()})
_NOT_LISTED = (
    "AbstractContextManager Any BatchError Callable INSTEAD Iterable Iterator Path RefusedError SettingError StrEnum TorchVersion "
    "annotations layer get_logger load_weights logger nn read_bytes submodules unwrap"
)
NAMES: dict[str, Any] = {
    name: value
    for name, value in globals().items()
    if not name.startswith("_") and not isinstance(value, ModuleType) and name not in _NOT_LISTED.split()
}
__all__ = sorted(NAMES)
__path__: list[str] = []  # modules below this one are made here
_MODULES = (
    "constants dataclasses deepspeed environment imports fsdp_utils megatron_lm memory modeling offload operations other random tqdm "
    "versions bnb"
)
_WHOLE = {**NAMES, "absent": INSTEAD}
submodules(__name__, dict.fromkeys(_MODULES.split(), _WHOLE), layer, "accelerate.utils")
__getattr__ = layer.absent("accelerate.utils", INSTEAD, lambda: __all__)

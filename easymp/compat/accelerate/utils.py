"""``accelerate.utils`` and its modules: collectives, nested batches, records, environment, versions, ``is_…_available()``."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any

import torch
from torch import nn

from ... import options
from ...base import env, pytree
from ...base.rng import set_seed
from ...distributed.processes import DistributedType, PrecisionType
from ...errors import RefusedError, SettingError
from ...logging import tqdm
from ...training import collectives
from ...training.oom import find_executable_batch_size, out_of_memory, release_memory
from ...training.state import PartialState
from ...training.wrapper import unwrap
from ..layer import submodules
from . import fsdp
from .plugins import (
    DEEPSPEED,
    FP8,
    MEGATRON,
    OFFLOADING,
    QUANTIZED,
    SHARDING,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    TorchDynamoPlugin,
    layer,
    stand_in,
)

# -- operations ---------------------------------------------------------------------------------------------------


def convert_to_fp32(tensor: Any) -> Any:
    """The tree with its half-precision tensors in fp32."""
    return pytree.recursively_apply(
        lambda t: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t, tensor
    )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """`model_forward` with outputs in fp32."""

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


def listify(data: Any) -> Any:
    """The tree with lists of numbers in place of tensors."""
    return pytree.recursively_apply(lambda t: t.detach().cpu().tolist(), data)


def find_device(data: Any) -> torch.device | None:
    """Device of the first tensor of the tree."""
    return next((leaf.device for leaf in pytree.leaves(data) if isinstance(leaf, torch.Tensor)), None)


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
    new = (old.data if value is None else torch.as_tensor(value)).to(device, dtype or old.dtype)
    if name in owner._buffers:
        owner._buffers[name] = new
    else:
        owner._parameters[name] = type(old)(new, requires_grad=old.requires_grad)


# -- other and memory ---------------------------------------------------------------------------------------------


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """The user's own module. easymp wraps no forward for fp32 outputs, so `keep_fp32_wrapper` changes nothing."""
    if recursive:
        raise RefusedError("recursive=True: only whole models are wrapped here. Leave it out")
    return unwrap(model, keep_torch_compile)


def is_compiled_module(module: nn.Module) -> bool:
    """Whether torch.compile has wrapped `module`. Models that the Accelerator compiles keep their class."""
    return "_orig_mod" in module._modules


def is_peft_model(model: nn.Module) -> bool:
    """Whether `model` is one of PEFT's."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(extract_model_from_parallel(model), peft.PeftModel)


def wait_for_everyone() -> None:
    """Wait until all processes are here."""
    PartialState().wait_for_everyone()


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give cached device memory back and collect garbage."""
    release_memory()


# -- environment and versions -------------------------------------------------------------------------------------


def str_to_bool(value: str) -> int:
    """1 for "yes", "true", "1" …, 0 for "no", "false", "0" …; ValueError for other words."""
    word = str(value).lower()
    if word in env.TRUE or word in ("y", "t"):
        return 1
    if word in env.FALSE - {""} or word in ("n", "f"):
        return 0
    raise ValueError(f"{value!r} is neither yes nor no")


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Whether a variable says yes."""
    return bool(str_to_bool(env.read(key, str(default)) or "no"))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """The first of these variables that is an integer of at least 0."""
    found = (env.integer(key, -1) for key in env_keys)
    return next((number for number in found if number is not None and number >= 0), default)


def patch_environment(**kwargs: Any) -> AbstractContextManager[None]:
    """Inside, these variables are set, with their names in capitals."""
    return env.override(**{key.upper(): str(value) for key, value in kwargs.items()})


COMPARED = {"<": "lt", "<=": "le", "==": "eq", "!=": "ne", ">=": "ge", ">": "gt"}


def compare_versions(library_or_version: str, operation: str, requirement_version: str) -> bool:
    """Whether an installed package, or a version, is ``"<"``, ``">="`` … `requirement_version`, by the release numbers."""
    if operation not in COMPARED:
        raise SettingError(f"operation={operation!r} is not one of {', '.join(COMPARED)}")
    given = str(library_or_version)
    version = given if given[:1].isdigit() else importlib.metadata.version(given)
    return bool(getattr(operator, COMPARED[operation])(_numbers(version), _numbers(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the version of torch as `compare_versions` does."""
    return compare_versions("torch", operation, version)


def _numbers(version: str) -> tuple[int, ...]:
    """The release numbers, without zeros at their end."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, re.sub(r"(\.0+)+$", "", release[0]).split("."))) if release else ()


# -- imports ----------------------------------------------------------------------------------------------------------


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether the GPU has native bf16; True on CPUs, which always compute it."""
    return torch.cuda.is_bf16_supported(including_emulation=False) if torch.cuda.is_available() else True


def _installed(*packages: str) -> Callable[..., bool]:
    def available(*_: object, **__: object) -> bool:
        return any(importlib.util.find_spec(package) is not None for package in packages)

    return available


PACKAGES = (
    "aim bitsandbytes boto3 clearml comet_ml datasets dvclive matplotlib mlflow pandas peft pynvml pytest rich sagemaker "
    "schedulefree swanlab timm torchao torchdata torchvision trackio transformers triton wandb"
)
# Engines and devices that easymp never uses: scripts then take their path without them.
NEVER = (
    "deepspeed habana hpu lomo megatron_lm mlu msamp musa neuron npu pippy sdaa torch_xla transformer_engine fp8 4bit_bnb "
    "8bit_bnb"
)
_checks: dict[str, Any] = {
    "bnb": _installed("bitsandbytes"),
    "tensorboard": _installed("tensorboard", "tensorboardX"),
    **{name: _installed(name) for name in PACKAGES.split()},
    **{name: _installed() for name in NEVER.split()},
}
_imports = {f"is_{name}_available": check for name, check in _checks.items()}
_imports |= {
    "is_cuda_available": lambda: torch.cuda.is_available(),
    "is_xpu_available": lambda: torch.xpu.is_available(),
    "is_mps_available": lambda min_version="1.12": torch.backends.mps.is_available(),
    "is_fp16_available": lambda: True,  # on every device; `easymp env` says where it is fast
    "is_rocm_available": lambda: torch.version.hip is not None and torch.cuda.is_available(),
}
for _name, _check in _imports.items():
    _check.__name__ = _check.__qualname__ = _name
_imports["is_bf16_available"] = is_bf16_available

# -- dataclasses --------------------------------------------------------------------------------------------------


# Words for `rng_types`, which has no effect: the order of data is the same on all ranks by itself.
RNGType = StrEnum("RNGType", "TORCH CUDA NPU XLA XPU GENERATOR", module=__name__)

_RECORDS = (
    "AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DistributedDataParallelKwargs GradScalerKwargs "
    "GradientAccumulationPlugin InitProcessGroupKwargs LoggerType ProfileKwargs ProjectConfiguration"
)
_STAND_INS = {
    "DeepSpeedPlugin": DEEPSPEED,
    "MegatronLMPlugin": MEGATRON,
    "ParallelismConfig": "use Accelerator(strategy='hsdp') or 'tensor_parallel', and strategy_options",
    "TorchTensorParallelPlugin": "use Accelerator(strategy='tensor_parallel')",
    **dict.fromkeys(("AORecipeKwargs", "FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs"), FP8),
    "BnbQuantizationConfig": QUANTIZED,
}
_dataclasses = {
    **{name: getattr(options, name) for name in _RECORDS.split()},
    **{name: stand_in(name, instead) for name, instead in _STAND_INS.items()},
    "DistributedType": DistributedType,
    "DynamoBackend": DynamoBackend,
    "FullyShardedDataParallelPlugin": FullyShardedDataParallelPlugin,
    "KwargsHandler": Any,  # for annotations: list[KwargsHandler]
    "PrecisionType": PrecisionType,
    "RNGType": RNGType,
    "TorchDynamoPlugin": TorchDynamoPlugin,
}

# -- addresses ----------------------------------------------------------------------------------------------------

ALIKE = "set_seed(seed) seeds all ranks alike; the order of data is the same on them by itself"
TIED = "tied weights are found, kept once and tied again by themselves"
_RANDOM = dict.fromkeys(("synchronize_rng_state", "synchronize_rng_states"), ALIKE)
_OTHER = {
    "clean_state_dict_for_safetensors": "accelerator.save_model writes tied weights once by itself",
    "load": "use easymp.load(file), which runs no code",
    "save": "use accelerator.save(obj, file)",
    "write_basic_config": "run `easymp config`, or nothing: missing settings are detected",
}
_memory = {
    "clear_device_cache": clear_device_cache,
    "find_executable_batch_size": find_executable_batch_size,
    "release_memory": release_memory,
    "should_reduce_batch_size": out_of_memory,
}
_TREES = ("concatenate", "find_batch_size", "recursively_apply", "send_to_device", "slice_tensors")
_RANKS = ("broadcast", "broadcast_object_list", "gather", "gather_object", "pad_across_processes", "reduce")
_own = (convert_outputs_to_fp32, convert_to_fp32, find_device, listify)
_operations = {
    **{f.__name__: f for f in _own},
    "is_torch_tensor": lambda tensor: torch.is_tensor(tensor),  # by keyword, too
    **{name: getattr(pytree, name) for name in _TREES},
    **{name: getattr(collectives, name) for name in _RANKS},
}
_environment = {
    f.__name__: f for f in (get_int_from_env, parse_flag_from_env, patch_environment, str_to_bool)
}
_other = {
    f.__name__: f for f in (extract_model_from_parallel, is_compiled_module, is_peft_model, wait_for_everyone)
}
_fsdp = {
    f.__name__: f
    for f in (fsdp.load_fsdp_model, fsdp.load_fsdp_optimizer, fsdp.save_fsdp_model, fsdp.save_fsdp_optimizer)
}
_versions = {f.__name__: f for f in (compare_versions, is_torch_version)}

_OFFLOADING = (
    "CustomDtype get_balanced_memory get_max_memory infer_auto_device_map load_offloaded_weights named_module_tensors "
    "offload_state_dict offload_weight save_offload_index"
)
_MODELING = f"{_OFFLOADING} clean_device_map compute_module_sizes convert_file_size_to_int get_max_layer_size"
_DEEPSPEED = ("DeepSpeedSchedulerWrapper", "DummyOptim", "DummyScheduler", "HfDeepSpeedConfig")
__path__: list[str] = []  # modules below this one are in the table
submodules(
    __name__,
    {
        "constants": {
            "FSDP_AUTO_WRAP_POLICY": ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"],
            "FSDP_SHARDING_STRATEGY": list(SHARDING),
        },
        "dataclasses": {**_dataclasses, "absent": {"get_module_class_from_name": OFFLOADING}},
        "deepspeed": {name: stand_in(name, DEEPSPEED) for name in _DEEPSPEED},
        "environment": _environment,
        "imports": _imports,
        "fsdp_utils": {
            **_fsdp,
            "absent": dict.fromkeys(("get_parameters_from_modules",), "name modules: FSDPOptions(ignore=…)"),
        },
        "memory": _memory,
        "modeling": {
            "set_module_tensor_to_device": set_module_tensor_to_device,
            "absent": dict.fromkeys(_MODELING.split(), OFFLOADING),
        },
        "offload": {"absent": dict.fromkeys(_OFFLOADING.split(), OFFLOADING)},
        "operations": _operations,
        "other": {**_other, "absent": _OTHER},
        "random": {"set_seed": set_seed, "absent": _RANDOM},
        "tqdm": {"tqdm": tqdm},
        "versions": _versions,
    },
    layer,
    "accelerate.utils",
)
_names = {
    **_dataclasses,
    **_environment,
    **_fsdp,
    **_imports,
    **_memory,
    **_operations,
    **_other,
    **_versions,
    "init_empty_weights": init_empty_weights,
    "set_module_tensor_to_device": set_module_tensor_to_device,
    "set_seed": set_seed,
    "tqdm": tqdm,
    **{name: stand_in(name, DEEPSPEED) for name in _DEEPSPEED},
    **{name: stand_in(name, MEGATRON) for name in ("MegatronLMDummyDataLoader", "MegatronLMDummyScheduler")},
}
globals().update(_names)
__all__ = sorted(_names)

__getattr__ = layer.absent(
    "accelerate.utils",
    {
        **dict.fromkeys(_OFFLOADING.split(), OFFLOADING),
        **dict.fromkeys(("load_and_quantize_model", "has_4bit_bnb_layers"), QUANTIZED),
        **dict.fromkeys(
            ("load_checkpoint_in_model", "load_state_dict"), "use easymp.load_weights(model, place)"
        ),
        "merge_fsdp_weights": "run `easymp checkpoint merge FOLDER TARGET`",
        "compile_regions": "use Accelerator(compile='blocks')",
        "compute_module_sizes": "use easymp.training.memory.estimate(model)",
        "GatheredParameters": "read a sharded parameter by parameter.full_tensor(), on all ranks",
        "find_tied_parameters": TIED,
        "retie_parameters": TIED,
        **_OTHER,
        **_RANDOM,
    },
    lambda: __all__,
)

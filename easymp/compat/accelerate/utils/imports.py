"""``accelerate.utils.imports``: ``is_…_available()``, as scripts ask before they import something or choose a path."""

from __future__ import annotations

import importlib.util

import torch

from ..layer import layer

# What is asked for → the packages of which one will do.
PACKAGES = {
    **{
        name: (name,)
        for name in (
            *(
                "aim",
                "bitsandbytes",
                "boto3",
                "clearml",
                "comet_ml",
                "datasets",
                "dvclive",
                "matplotlib",
                "mlflow",
                "pandas",
                "peft",
            ),
            *(
                "pynvml",
                "pytest",
                "rich",
                "sagemaker",
                "schedulefree",
                "swanlab",
                "timm",
                "torchao",
                "torchdata",
                "torchvision",
            ),
            *("trackio", "transformers", "triton", "wandb"),
        )
    },
    "bnb": ("bitsandbytes",),
    "tensorboard": ("tensorboard", "tensorboardX"),
}
# Engines and devices that no run of easymp uses: scripts then take their path without them.
NEVER = (
    *(
        "deepspeed",
        "habana",
        "hpu",
        "lomo",
        "megatron_lm",
        "mlu",
        "msamp",
        "musa",
        "neuron",
        "npu",
        "pippy",
        "sdaa",
        "torch_xla",
    ),
    *("transformer_engine", "fp8", "4bit_bnb", "8bit_bnb"),
)


def is_cuda_available() -> bool:
    return torch.cuda.is_available()


def is_xpu_available() -> bool:
    return torch.xpu.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    return torch.backends.mps.is_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether bf16 is native on the GPU; on CPUs, where it always computes, True."""
    return torch.cuda.is_bf16_supported(including_emulation=False) if torch.cuda.is_available() else True


def is_fp16_available() -> bool:
    """True: fp16 computes on every device here; `easymp env` says what is fast."""
    return True


def is_rocm_available() -> bool:
    return torch.version.hip is not None and torch.cuda.is_available()


OWN = (
    "is_bf16_available",
    "is_cuda_available",
    "is_fp16_available",
    "is_mps_available",
    "is_rocm_available",
    "is_xpu_available",
)
__all__ = sorted([*OWN, *(f"is_{name}_available" for name in (*PACKAGES, *NEVER))])
_absent = layer.absent("accelerate.utils.imports", {}, lambda: __all__)


def __getattr__(name: str):
    asked = name.removeprefix("is_").removesuffix("_available")
    if name not in __all__:
        return _absent(name)

    def available(*_: object, **__: object) -> bool:
        return any(importlib.util.find_spec(package) is not None for package in PACKAGES.get(asked, ()))

    available.__name__ = available.__qualname__ = name
    return available

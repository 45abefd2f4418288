"""``accelerate.utils.other``: models as they were before they were wrapped, and waiting."""

from __future__ import annotations

from torch import nn

from ....errors import RefusedError
from ....training.state import PartialState
from ....training.wrapper import unwrap
from ..layer import layer

__all__ = ["extract_model_from_parallel", "is_compiled_module", "wait_for_everyone"]
INSTEAD = {
    "clean_state_dict_for_safetensors": "accelerator.save_model writes tied weights once by itself",
    "load": "use easymp.load(file), which runs no code",
    "save": "use accelerator.save(obj, file)",
    "write_basic_config": "run `easymp config`, or nothing: what is not written is detected",
}
__getattr__ = layer.absent("accelerate.utils.other", INSTEAD, lambda: __all__)


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """The user's own module; it carries no wrapper for fp32 outputs, so there is none to keep or take off."""
    if recursive:
        raise RefusedError("recursive=True: only whole models are wrapped here. Leave it out")
    return unwrap(model, keep_torch_compile)


def is_compiled_module(module: nn.Module) -> bool:
    """Whether torch.compile has wrapped it; what the Accelerator compiles keeps its class."""
    return "_orig_mod" in module._modules


def wait_for_everyone() -> None:
    PartialState().wait_for_everyone()

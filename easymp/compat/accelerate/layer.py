"""Messages of the Accelerate layer, and stand-ins for classes that scripts import and may never call."""

from __future__ import annotations

from typing import Any

from ...errors import RefusedError
from ..layer import Layer

layer = Layer("Accelerate")


def stand_in(name: str, instead: str) -> type:
    """A class for imports, annotations and isinstance; a call raises RefusedError, which says what to write `instead`."""

    def refuse(kind: type, *args: Any, **kwargs: Any) -> Any:
        raise RefusedError(f"{name} is not part of easymp: {instead}")

    return type(
        name, (), {"__new__": refuse, "__doc__": f"Not part of easymp: {instead}.", "__module__": __name__}
    )


DEEPSPEED = (
    "Accelerator(strategy='zero1') does what its stage 1 does, strategy='fsdp' stages 2 and 3; a script for DeepSpeed itself runs by "
    "easymp.compat.deepspeed"
)
MEGATRON = "use Accelerator(strategy='tensor_parallel') or strategy='pipeline'"
FP8 = "mixed_precision='fp8' is torch's own scaled products and takes no recipe"
OFFLOADING = (
    "moving parts of a model between devices for inference is not part of easymp; for training use Accelerator(strategy='fsdp'), and "
    "build the model under `with torch.device('meta'):`"
)
QUANTIZED = "models in 4 or 8 bits are not part of easymp: load them by the library that made them, and train adapters in bf16"

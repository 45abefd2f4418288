"""``deepspeed.runtime.utils``: memory in the log."""

from __future__ import annotations

from ....logging import get_logger
from ..accelerator import get_accelerator
from ..layer import layer

logger = get_logger(__name__)

__all__ = ["see_memory_usage"]
__getattr__ = layer.absent(
    "deepspeed.runtime.utils",
    {"clip_grad_norm_": "use torch.nn.utils.clip_grad_norm_, or gradient_clipping"},
    lambda: __all__,
)


def see_memory_usage(message: str, force: bool = False) -> None:
    """`message` and this rank's device memory, where `force` is True."""
    if force:
        device = get_accelerator()
        used, most = (n / 2**30 for n in (device.memory_allocated(), device.max_memory_allocated()))
        logger.info("%s: memory allocated %.2f GiB, at most %.2f GiB", message, used, most)

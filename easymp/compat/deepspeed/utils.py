"""``deepspeed.utils``: its log, a loader without an end, and memory in the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ...distributed import read_ranks
from ...logging import get_logger
from .accelerator import get_accelerator
from .layer import layer

logger = get_logger(__name__)

__all__ = ["RepeatingLoader", "log_dist", "logger"]
WHOLE = "of a sharded parameter use parameter.full_tensor() on all ranks; all weights are engine.accelerator.get_state_dict(engine)"
__getattr__ = layer.absent(
    "deepspeed.utils",
    {
        "safe_get_full_fp32_param": WHOLE,
        "safe_get_full_grad": f"{WHOLE}; gradients are parameter.grad",
        "safe_get_full_optimizer_state": "engine.optimizer.state holds this rank's part",
        "zero_to_fp32": "easymp.load_weights(model, folder_of_a_checkpoint) reads whole weights of any number of ranks",
        "set_z3_leaf_modules": "say what is sharded as one by FullyShardedDataParallelPlugin's auto_wrap_policy",
        "groups": "use torch.distributed.new_group",
        "timer": "set wall_clock_breakdown, or use time.perf_counter",
    },
    lambda: __all__,
)


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = 20) -> None:
    """Log `message` on these ranks; on all of them where none is named, or -1."""
    rank = read_ranks().rank
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


class RepeatingLoader:
    """Iterates over `loader` again and again."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches: Iterator[Any] = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log `message` and the device memory of this rank if `force` is True."""
    if force:
        device = get_accelerator()
        used, most = (n / 2**30 for n in (device.memory_allocated(), device.max_memory_allocated()))
        logger.info("%s: memory allocated %.2f GiB, at most %.2f GiB", message, used, most)

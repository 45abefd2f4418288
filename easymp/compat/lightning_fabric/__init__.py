"""Lightning Fabric's interface: ``from easymp.compat.lightning_fabric import Fabric``, or ``import easymp.compat.lightning_fabric as L``.

The precisions and strategies are easymp's under Fabric's names, and checkpoints are easymp's. Gradients are averaged at each backward
outside of `no_backward_sync`, and accumulation is the script's own, as in Fabric. Not here: TPUs, DeepSpeed as a strategy, plugins,
double precision, quantization.
"""

from __future__ import annotations

import csv
import functools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...base.pytree import send_to_device
from ...distributed import read_ranks
from ...logging import get_logger
from ...training.state import accelerators
from ..layer import named, submodules
from .fabric import DDPStrategy, Fabric, FSDPStrategy, Strategy, layer, seed_everything

__all__ = ["Fabric", "is_wrapped", "seed_everything"]


def is_wrapped(obj: object) -> bool:
    """Whether `obj` came from a setup method."""
    prepared = (view for acc in accelerators() for view in acc._views())  # a model may stay the given one
    own = type(obj).__module__.startswith("easymp.") or type(obj).__name__.startswith("Prepared")
    return own or any(obj is view for view in prepared)


class CSVLogger:
    """Metrics in ``root_dir/name/version_<n>/metrics.csv``, each row written at once; by default n is the next number."""

    def __init__(
        self, root_dir: Any, name: str | None = "lightning_logs", version: int | str | None = None, prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:  # fmt: skip
        self.name, self.root_dir, self._prefix = name or "", str(root_dir), prefix
        folder = Path(root_dir, self.name)
        if version is None:
            taken = (path.name.removeprefix("version_") for path in folder.glob("version_*"))
            version = max((int(number) + 1 for number in taken if number.isdigit()), default=0)
        self.version = version
        self.log_dir = str(folder / (version if isinstance(version, str) else f"version_{version}"))
        self._rows: list[dict[str, Any]] = []

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add a row of numbers, on rank 0."""
        if read_ranks().rank:
            return
        begin = f"{self._prefix}-" if self._prefix else ""
        row = {begin + name: v.item() if isinstance(v, Tensor) else v for name, v in metrics.items()}
        known = set().union(*self._rows)
        self._rows.append({**row, "step": len(self._rows) if step is None else step})
        path = Path(self.log_dir, "metrics.csv")
        path.parent.mkdir(parents=True, exist_ok=True)
        grown = not self._rows[-1].keys() <= known
        with path.open("w" if grown else "a", newline="") as file:
            writer = csv.DictWriter(file, sorted(known.union(self._rows[-1])))
            if grown:
                writer.writeheader()
            writer.writerows(self._rows if grown else self._rows[-1:])

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("The `CSVLogger` does not yet support logging hyperparameters.")

    def save(self, *status: str) -> None:
        """Nothing: every row is written."""

    finalize = save


def rank_zero_only(fn: Callable[..., Any], default: Any = None) -> Callable[..., Any]:
    """A decorator: `fn` runs on rank 0; other ranks get `default`."""

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return default if read_ranks().rank else fn(*args, **kwargs)

    return wrapped


UTILITIES = {
    "rank_zero_only": rank_zero_only,
    "rank_zero_info": rank_zero_only(get_logger(__name__).info),
    "rank_zero_warn": rank_zero_only(warnings.warn),
}
PLAIN = "pass strategy='auto', 'ddp', 'fsdp' or 'dp'"
SPEED = "use Accelerator.profile, or log_with='console'"
THROUGHPUT = dict.fromkeys(("Throughput", "ThroughputMonitor", "measure_flops"), SPEED)
submodules(
    __name__,
    {
        "accelerators": "pass accelerator='cpu', 'gpu' or 'auto'",
        "loggers": named(
            CSVLogger,
            absent=dict.fromkeys(
                ("TensorBoardLogger", "Logger"),
                "pass loggers='tensorboard', 'wandb', 'jsonl' …, or an object of Lightning's loggers",
            ),
        ),
        "plugins": "pass precision='bf16-mixed' and its kind; easymp joins the launcher and writes its own files",
        "strategies": named(
            *(DDPStrategy, FSDPStrategy, Strategy),
            absent={
                "DeepSpeedStrategy": "pass strategy='fsdp', or use easymp.compat.deepspeed",
                "ModelParallelStrategy": "use easymp.Accelerator(strategy='tensor_parallel')",
                **dict.fromkeys(("DataParallelStrategy", "ParallelStrategy", "SingleDeviceStrategy"), PLAIN),
            },
        ),
        "utilities": {
            **UTILITIES,
            "move_data_to_device": send_to_device,
            "absent": {**THROUGHPUT, "AttributeDict": "use types.SimpleNamespace, or a dict"},
        },
        "utilities.rank_zero": UTILITIES,
        "utilities.seed": named(seed_everything),
        "utilities.throughput": {"absent": THROUGHPUT},
        "wrappers": named(is_wrapped),
    },
    layer,
    "lightning_fabric",
)
__getattr__ = layer.absent("lightning_fabric", {}, lambda: __all__)

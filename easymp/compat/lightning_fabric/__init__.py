"""Lightning Fabric's interface: ``import easymp.compat.lightning_fabric as L``, or ``from … import Fabric``.

Not here: TPUs, DeepSpeed as a strategy, plugins, quantization.
"""

from __future__ import annotations

import csv
import os
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from ...base.pytree import send_to_device
from ...distributed import read_ranks
from ...distributed.processes import run_where
from ...logging import get_logger
from ..layer import by_name
from .fabric import Fabric, pl_worker_init_function, reset_seed, seed_everything
from .fabric import is_set_up as is_wrapped
from .strategies import DDPStrategy, FSDPStrategy, Strategy, layer

__all__ = ["Fabric", "is_wrapped", "seed_everything"]


def rank_zero_only(fn: Callable[..., Any], default: Any = None) -> Callable[..., Any]:
    """A decorator: `fn` runs on rank 0; other ranks get `default`."""
    return run_where(lambda: read_ranks().rank == 0, fn, default)


class FileLogger:
    """Base of loggers that write to ``root_dir/name/version_<n>``. By default n is the next number."""

    def __init__(self, root_dir: Any, name: str | None, version: int | str | None, prefix: str) -> None:
        self.root_dir, self.name, self._version = os.fspath(root_dir), name or "", version
        self._prefix = f"{prefix}-" if prefix else ""

    @cached_property
    def version(self) -> int | str:
        if self._version is not None:
            return self._version
        folders = Path(self.root_dir, self.name).glob("version_*")
        numbers = [path.name.removeprefix("version_") for path in folders if path.is_dir()]
        return max((int(number) + 1 for number in numbers if number.isdigit()), default=0)

    @property
    def log_dir(self) -> str:
        version = self.version if isinstance(self.version, str) else f"version_{self.version}"
        return os.path.join(self.root_dir, self.name, version)

    def _numbers(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics, with the prefix in their names."""
        return {self._prefix + name: v.item() if isinstance(v, Tensor) else v for name, v in metrics.items()}


class CSVLogger(FileLogger):
    """Metrics in ``metrics.csv``, on rank 0; rows are written every `flush_logs_every_n_steps`, and by `save`."""

    def __init__(
        self, root_dir: Any, name: str | None = "lightning_logs", version: int | str | None = None, prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:  # fmt: skip
        super().__init__(root_dir, name, version, prefix)
        self._flush_every = flush_logs_every_n_steps
        self.metrics: list[dict[str, Any]] = []  # rows that are not written yet
        self._columns: list[str] = []

    @cached_property
    def experiment(self) -> CSVLogger:
        """This logger, once its folder is there; a file of another run there is removed, with a warning."""
        os.makedirs(self.log_dir, exist_ok=True)
        if os.listdir(self.log_dir):
            consequence = "exists and is not empty: its metrics.csv is replaced"
            warnings.warn(f"Experiment logs directory {self.log_dir} {consequence}", UserWarning, stacklevel=3)
            Path(self.metrics_file_path).unlink(missing_ok=True)
        return self

    metrics_file_path = property(lambda self: os.path.join(self.log_dir, "metrics.csv"))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add a row of numbers."""
        rows = self.experiment.metrics
        step = len(rows) if step is None else step
        rows.append({**self._numbers(metrics), "step": step})
        if (step + 1) % self._flush_every == 0:
            self.save()

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("The `CSVLogger` does not yet support logging hyperparameters.")

    def save(self) -> None:
        """Append the rows. New columns rewrite the file, with empty values above."""
        if not self.metrics:
            return
        columns = sorted({*self._columns, *(name for row in self.metrics for name in row)})
        rows, appends = self.metrics, os.path.isfile(self.metrics_file_path)
        if appends and columns != self._columns:
            with open(self.metrics_file_path, newline="") as file:
                rows, appends = [*csv.DictReader(file), *rows], False
        with open(self.metrics_file_path, "a" if appends else "w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            if not appends:
                writer.writeheader()
            writer.writerows(rows)
        self.metrics, self._columns = [], columns

    def finalize(self, status: str) -> None:
        self.save()


class TensorBoardLogger(FileLogger):
    """Metrics for TensorBoard, on rank 0; further `options` are those of torch's SummaryWriter."""

    def __init__(
        self, root_dir: Any, name: str | None = "lightning_logs", version: int | str | None = None,
        default_hp_metric: bool = True, prefix: str = "", sub_dir: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(root_dir, name, version, prefix)
        self._sub_dir, self._options = sub_dir or "", options
        self._default_metrics = {"hp_metric": -1.0} if default_hp_metric else {}

    @property
    def log_dir(self) -> str:
        folder = os.path.join(super().log_dir, self._sub_dir) if self._sub_dir else super().log_dir
        return os.path.expanduser(os.path.expandvars(folder))

    @cached_property
    def experiment(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(log_dir=self.log_dir, **self._options)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add numbers, and dicts of numbers."""
        for name, value in self._numbers(metrics).items():
            add = self.experiment.add_scalars if isinstance(value, dict) else self.experiment.add_scalar
            add(name, value, step)

    @rank_zero_only
    def log_hyperparams(self, params: Any, metrics: Mapping[str, float] | None = None) -> None:
        values = params if isinstance(params, Mapping) else vars(params)
        plain = {str(k): v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in values.items()}
        self.experiment.add_hparams(plain, dict(self._default_metrics if metrics is None else metrics), run_name=".")

    @rank_zero_only
    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Add the graph of a model's call with `input_array`, by default with its ``example_input_array``."""
        inputs = getattr(model, "example_input_array", None) if input_array is None else input_array
        if isinstance(inputs, (Tensor, tuple)):
            self.experiment.add_graph(getattr(model, "module", model) if is_wrapped(model) else model, inputs)
        else:
            remedy = "pass input_array, a tensor or a tuple of arguments"
            warnings.warn(f"Could not log computational graph to TensorBoard: {remedy}", UserWarning, stacklevel=2)

    def save(self) -> None:
        """Write what was logged."""
        if "experiment" in vars(self):
            self.experiment.flush()

    def finalize(self, status: str) -> None:
        """Write what was logged, and close the files."""
        if "experiment" in vars(self):
            self.experiment.close()


RANK_ZERO = {
    "rank_zero_only": rank_zero_only,
    "rank_zero_info": rank_zero_only(get_logger(__name__).info),
    "rank_zero_warn": rank_zero_only(warnings.warn),
}
layer.submodules(
    __name__,
    {
        "loggers": by_name(CSVLogger, TensorBoardLogger),
        "loggers.csv_logs": by_name(CSVLogger),
        "loggers.tensorboard": by_name(TensorBoardLogger),
        "strategies": by_name(DDPStrategy, FSDPStrategy, Strategy),
        "utilities": {**RANK_ZERO, "move_data_to_device": send_to_device},
        "utilities.rank_zero": RANK_ZERO,
        "utilities.seed": by_name(pl_worker_init_function, reset_seed, seed_everything),
        "utilities.throughput": {},
        "wrappers": {"is_wrapped": is_wrapped},
    },
)
__getattr__ = layer.absent(__name__)

"""``lightning_fabric.loggers`` and the functions of ``lightning_fabric.utilities`` that run on rank 0."""

from __future__ import annotations

import csv
import functools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...distributed import read_ranks
from ...logging import get_logger

logger = get_logger(__name__)


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


rank_zero_info = rank_zero_only(logger.info)
rank_zero_warn = rank_zero_only(warnings.warn)

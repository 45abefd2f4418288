"""Weights & Biases: a run in the project that the script names; online, offline or off as WANDB_MODE says.

A resumed run keeps its id. The service takes no step twice: steps that it had before the crash stay as they are.
Offline each process has its own folder of that id, and `wandb sync` joins them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import failing
from ..logging import get_logger
from .rows import Row

logger = get_logger(__name__)


class WandB:
    """One run of wandb. `options` are those of `wandb.init`; `folder` gets wandb's own folder."""

    name = "wandb"

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        self._folder, self._options = folder, options
        self.run: Any = None
        self._logged_steps = 0  # that the service had before this start

    @property
    def tracker(self) -> Any:
        return self.run

    def start(self, run: str, config: Mapping[str, Any], position: Mapping[str, Any] | None) -> None:
        import wandb

        if self.run is not None:
            if position is not None and self.run.id == position["id"]:
                return  # an earlier checkpoint of this run
            self.finish()
        self._folder.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {"project": run, "dir": str(self._folder), "config": dict(config)}
        if position is not None:
            options |= {"id": position["id"], "resume": "allow"}
        self.run = wandb.init(**{**options, **self._options})
        self._logged_steps = self.run.step if position is not None and self.run.resumed else 0
        if self._logged_steps:
            self.run.config.update(dict(config), allow_val_change=True)
            text = "wandb has run %s up to step %d: rows of steps before it are not logged again"
            logger.info(text, self.run.id, self._logged_steps - 1)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log as `wandb.Run.log` does, pictures and tables too."""
        self.run.log(dict(values), step=step, **options)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log lists of pictures by name."""
        import wandb

        self.log({name: [wandb.Image(image) for image in images] for name, images in values.items()}, step, **options)

    def log_table(
        self,
        table_name: str,
        columns: Any = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
        **options: Any,
    ) -> None:
        """Log one `wandb.Table`."""
        import wandb

        self.log({table_name: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step, **options)

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.step >= self._logged_steps:
                self.log(row.values, row.step, **row.options.get(self.name, {}))

    def position(self) -> dict[str, Any]:
        return {"id": self.run.id}

    def finish(self) -> None:
        if self.run is not None:
            self.run.finish(exit_code=1 if failing() else 0)
            self.run = None

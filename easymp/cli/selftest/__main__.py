"""One rank's part: ``python -m easymp.cli.selftest FOLDER``, as the command starts it on every rank. Findings go to the folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import torch

from ...accelerator import Accelerator
from ...distributed import read_ranks
from . import kernels, precisions, ranks, training
from .findings import PLAN, Diary

TIMEOUT = 30.0  # seconds that a rank waits for another


def checks(folder: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Names, and what returns their figures."""

    def alone(check: Callable[[Accelerator], str]) -> Callable[[], str]:
        """With an Accelerator of its own: what one check breaks is whole for the next."""

        def run() -> str:
            with closing(Accelerator(timeout=TIMEOUT, seed=0, dataloader_config=training.SPLIT)) as acc:
                return check(acc)

        return run

    def device() -> torch.device:
        with closing(Accelerator(timeout=TIMEOUT)) as acc:
            if acc.is_main_process:
                (folder / PLAN).write_text(str(acc), encoding="utf-8")
            return acc.device

    yield "plan", lambda: f"trains on {device()}"
    yield "collectives", alone(ranks.collectives)
    yield "bandwidth", alone(ranks.bandwidth)
    yield "data", alone(training.data)
    yield "training", alone(training.training)
    yield "precision", precisions.precisions
    yield "checkpoint", alone(lambda acc: training.checkpoints(acc, folder))
    yield "kernels", lambda: kernels.kernels(device())


def main() -> None:
    """All checks in order, to their end or to this rank's."""
    folder = Path(sys.argv[1])
    diary = Diary(folder, read_ranks().rank)
    for name, check in checks(folder):
        with diary.page(name) as words:
            words.append(check())


if __name__ == "__main__":
    main()

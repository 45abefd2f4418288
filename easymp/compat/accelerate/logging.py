"""``accelerate.logging``: a logger for all ranks, on request one after the other."""

from __future__ import annotations

import functools
from typing import Any

from ... import logging
from ...training.state import PartialState

__all__ = ["MultiProcessAdapter", "get_logger"]


class MultiProcessAdapter(logging.RankLogger):
    """`easymp.logging`'s logger, with two habits more."""

    def log(
        self, level: int, msg: object, *args: Any, main_process_only: bool = True, in_order: bool = False, **kwargs: Any
    ) -> None:  # fmt: skip
        """`in_order`: with ``main_process_only=False``, rank 0 first, then rank 1 …; all ranks call it."""
        kwargs.setdefault("stacklevel", 2)
        if main_process_only or not in_order:
            super().log(level, msg, *args, main_process_only=main_process_only, **kwargs)
            return
        state = PartialState()
        for rank in range(state.num_processes):
            if rank == state.process_index:
                super().log(level, msg, *args, main_process_only=False, **kwargs)
            state.wait_for_everyone()

    @functools.lru_cache(None)  # noqa: B019 (loggers live as long as the process)
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """A warning that comes once, however often it is called with these words."""
        self.warning(*args, **kwargs)


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """As `easymp.get_logger`."""
    return MultiProcessAdapter(logging.get_logger(name, log_level).logger, {})

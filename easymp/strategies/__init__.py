"""Strategies: how parameters and gradients are spread over the ranks."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..errors import SettingError, nearest
from ..options import DistributedDataParallelKwargs
from ..protocols import Strategy
from ..registry import STRATEGIES

__all__ = ["STRATEGIES", "Strategy", "read_options"]


# -- The options of one strategy, out of what the caller passed.


def read_options(strategy: type[Strategy], given: Any, handlers: Mapping[type, Any]) -> Any:
    """A record of the type that `strategy` takes.

    Args:
        given: such a record, a mapping of its fields' names to values, or None.
        handlers: kwargs_handlers by type; one of the strategy's own type stands in for `given`.

    Raises:
        SettingError: options this strategy does not have, options of another one, or the same ones twice.
    """
    kind = strategy.Options
    handler = handlers.get(DistributedDataParallelKwargs)
    if handler is not None and kind is not DistributedDataParallelKwargs:
        raise SettingError(
            f"kwargs_handlers holds a DistributedDataParallelKwargs, but the strategy is {strategy.name!r}: leave it out, or pass "
            f"strategy_options={kind.__name__}(...)"
        )
    if given is None:
        return kind() if handler is None else handler
    if handler is not None:
        raise SettingError(
            "both strategy_options and kwargs_handlers hold options of the strategy: pass one of them"
        )
    if isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise SettingError(
            f"strategy_options is a {type(given).__name__}, but strategy {strategy.name!r} takes {kind.__name__}, or a dict of its fields"
        )
    known = [f.name for f in dataclasses.fields(kind)]
    for name in given:
        if name not in known:
            raise SettingError(
                f"strategy {strategy.name!r} has no option {name!r}{nearest(name, known) or '.'} Known: {', '.join(known)}"
            )
    return kind(**given)

"""What all ranks bring to a save, and who of them writes what: agreed on while all of them are at one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..distributed import World
from ..errors import CheckpointError, EasympError, WorldError
from .boxes import Box
from .meeting import STOPPED
from .planning import Brought, Division, divide
from .snapshot import Kept, Snapshot


@dataclass(frozen=True)
class Agreement:
    """
    Attributes:
        brought, given: this rank's part of the plan, and its other names of tensors.
        aliases: all ranks'.
        division: who writes what.
    """

    brought: Sequence[Brought]
    given: Mapping[str, str]
    aliases: Mapping[str, str]
    division: Division


@dataclass(frozen=True)
class Parts:
    """What this rank has to write of: live tensors, and Python state that is a copy."""

    tensors: Mapping[tuple[str, Box], Tensor]
    states: Mapping[str, Any]


def agree(world: World, kept: Sequence[Kept], last: Agreement | None) -> tuple[Parts, Agreement]:
    """Ask `kept` on each rank for its state, and divide the work, all ranks together.

    Where every rank brings the same tensors as the `last` time, what was agreed then is used again: the lists of all ranks can be long.

    Raises:
        CheckpointError: on every rank: one could not say its state, or the parts do not make a whole.
    """
    snapshot = Snapshot(world.rank)
    said = trouble(lambda: [k.bring(snapshot) for k in kept])
    same = last is not None and last.brought == snapshot.brought and last.given == snapshot.aliases
    try:
        together = world.gather_objects((said, same))
        if wrong := first([said for said, _ in together]):
            raise CheckpointError(f"the checkpoint was not begun: {wrong}")
        if last is None or not all(same for _, same in together):
            everyones = world.gather_objects((snapshot.brought, snapshot.aliases))
            aliases = {name: of for _, given in everyones for name, of in given.items()}
            last = Agreement(
                snapshot.brought, snapshot.aliases, aliases, divide([brought for brought, _ in everyones])
            )
    except WorldError as error:
        raise CheckpointError(f"the ranks could not agree on a checkpoint: {error}") from error
    return Parts(snapshot.parts, snapshot.states), last


def merged(one: Any, other: Any, name: str) -> Any:
    """Two ranks' states of one thing: mappings add up, all else must agree.

    Raises:
        CheckpointError: it does not.
    """
    if one == other:
        return one
    if isinstance(one, dict) and isinstance(other, dict):
        both = dict(one)
        for word, value in other.items():
            both[word] = merged(one[word], value, f"{name}/{word}") if word in one else value
        return both
    raise CheckpointError(
        f"{name}: the ranks have different values, {one!r} and {other!r}, of what should be one"
    )


def trouble(act: Callable[[], Any]) -> str:
    """What went wrong in `act`, in words; "" where nothing did. All errors, also those of a user's own objects: the others must hear."""
    try:
        act()
    except (OSError, EasympError) as error:
        return str(error) or type(error).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def first(said: Sequence[str]) -> str:
    """What the ranks `said` went wrong, each thing once, with the rank that said it; "" where all is well."""
    causes = [words for words in said if words and words != STOPPED] or said
    ranks = {words: rank for rank, words in reversed(list(enumerate(said))) if words and words in causes}
    named = sorted((rank, words) for words, rank in ranks.items())
    return "; ".join(f"rank {rank}: {words}" if len(said) > 1 else words for rank, words in named)

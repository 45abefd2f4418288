"""Whether what a checkpoint holds fits what is live, said in words; and putting it there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..errors import CheckpointError, nearest
from .boxes import Box

SHOWN = 5  # of a list in a message


def several(words: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return "; ".join(words[:SHOWN]) + more


def names_apart(live: Collection[str], saved: Collection[str], what: str = "") -> str:
    """Which names are on one side only, with the nearest of those that are only on the other; "" where none is."""
    lacks = [name for name in live if name not in saved]
    left = [name for name in saved if name not in live]
    said = []
    if lacks:
        said.append(
            f"{what}not in the checkpoint: {several([repr(name) + nearest(name, left) for name in lacks[:SHOWN]] + lacks[SHOWN:])}"
        )
    if left:
        said.append(
            f"{what}only in the checkpoint: {several([repr(name) for name in left[:SHOWN]] + left[SHOWN:])}"
        )
    return "; ".join(said)


def once(box: Box, live: Tensor) -> tuple[Box, Tensor]:
    """A box and where its elements lie; of a tensor that shows one element in several places (``expand``), where they are alike, one."""
    for dim, (length, stride) in enumerate(zip(live.shape, live.stride())):
        if stride == 0 and length > 1:
            live = live.narrow(dim, 0, 1)
    return Box(box.offset, tuple(live.shape)), live


def is_known(thing: Any) -> bool:
    """Whether the states of `thing` have one form, by its class: torch's and easymp's have; a user's own may have another each time."""
    return type(thing).__module__.partition(".")[0] in ("torch", "easymp")


def kind_of(value: Any) -> str:
    """The kind of a stored value, in words. Numbers of any type and one-element tensors are one kind, as are lists and tuples."""
    if isinstance(value, bool):
        return "True or False"
    if isinstance(value, (int, float)) or (isinstance(value, Tensor) and not value.ndim):
        return "a number"
    if isinstance(value, (list, tuple)):
        return "a list"
    return "a dict" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def check_like(what: str, saved: Any, live: Any) -> None:
    """Compare a state with the live one, key by key: wrong kinds are found here, before anything live takes them.

    None fits every kind. Keys that only one of the two has are not compared.

    Raises:
        CheckpointError: a value is of another kind, or an integer is too large for 64 bits.
    """
    if isinstance(saved, int) and not -(2**63) <= saved < 2**63:
        raise CheckpointError(
            f"{what} is {saved!r:.80} in the checkpoint, which 64 bits do not hold: load another checkpoint"
        )
    if saved is None or live is None:
        return
    if kind_of(saved) != kind_of(live) or (isinstance(live, tuple) and len(saved) != len(live)):
        raise CheckpointError(
            f"{what} is {saved!r:.80} in the checkpoint, and {live!r:.80} here: load another checkpoint"
        )
    if isinstance(live, Mapping):
        for key in saved.keys() & live.keys():
            check_like(f"{what}[{key!r:.80}]", saved[key], live[key])
    elif isinstance(live, (list, tuple)) and live:
        for i, item in enumerate(saved):
            check_like(f"{what}[{i}]", item, live[min(i, len(live) - 1)])

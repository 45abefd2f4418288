"""Whether what a checkpoint holds fits what is live, said in words; and putting it there."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from ..errors import nearest
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
        said.append(f"{what}only in the checkpoint: {several([repr(name) for name in left[:SHOWN]] + left[SHOWN:])}")
    return "; ".join(said)


def once(box: Box, live: Tensor) -> tuple[Box, Tensor]:
    """A box and where its elements lie; of a tensor that shows one element in several places (``expand``), where they are alike, one."""
    for dim, (length, stride) in enumerate(zip(live.shape, live.stride())):
        if stride == 0 and length > 1:
            live = live.narrow(dim, 0, 1)
    return Box(box.offset, tuple(live.shape)), live

"""What a data set or a collate function draws for a batch: f(seed, epoch, batch), wherever it cannot be part of the training's stream.

Python's, NumPy's and torch's streams begin anew with each batch in workers, in streams that are read from their beginning again when a
run resumes, and where batches are read ahead of the step that gets them. So a resumed run's samples are augmented as those of the run that
was not interrupted. Without workers a map-style data set draws from the streams of the training, which a checkpoint keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..base.rng import apart, seed_host


class Seeded:
    """What a sampler gives for one batch, on its way to a worker, where it arrives as itself with the streams seeded.

    The worker takes it from its queue, which makes it anew, and loads the batch next: in one thread.
    """

    __slots__ = ("_item", "_seed")

    def __init__(self, item: Any, seed: int) -> None:
        self._item, self._seed = item, seed

    def __reduce__(self) -> Any:
        return _arrived, (self._item, self._seed)


def _arrived(item: Any, seed: int) -> Any:
    seed_host(seed)
    return item


def every(
    count: int,
    items: Iterable[Any],
    seed: Callable[[int], int],
    at: int,
    weigh: Callable[[Any], int | None] | None = None,
) -> Iterator[Any]:
    """`items`, with the streams seeded by `seed(place)` before the first is read, and before each whose place is a multiple of `count`.

    Args:
        at: the place of the first item.
        weigh: how many places an item takes; 1 where it does not know.
    """
    seed_host(seed(at))
    for item in items:
        at += 1 if weigh is None else (weigh(item) or 1)
        yield item
        if at % count == 0:
            seed_host(seed(at))


def aside(items: Iterable[Any]) -> Iterator[Any]:
    """`items`, of whose draws the training's streams see nothing. Whoever makes them seeds for each."""
    reader = iter(items)
    while True:
        with apart():
            try:
                item = next(reader)
            except StopIteration:
                return
        yield item

"""A loader without its first batches, for one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ..errors import BatchError
from .loader import PreparedLoader
from .source import rebuild


def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """`loader` as it is, but the next pass over what is returned leaves out its first `num_batches` batches; later ones do not.

    Where the data set is map-style the skipped samples are not loaded. On a prepared loader a batch is one of this rank's, and
    the epoch counts on as if it had been read in full; the clock sees the prepared loader itself.

    Raises:
        BatchError: `loader` is no loader, or `num_batches` no count.
    """
    if isinstance(num_batches, bool) or not isinstance(num_batches, int) or num_batches < 0:
        raise BatchError(f"num_batches={num_batches!r} is no number of batches to skip: pass 0 or more")
    if isinstance(loader, SkippedLoader):
        return SkippedLoader(loader.whole, loader.skip + num_batches)
    if isinstance(loader, PreparedLoader):
        return SkippedLoader(loader, num_batches)
    if not isinstance(loader, DataLoader):
        raise BatchError(
            f"a {type(loader).__name__} was passed where a DataLoader belongs: itertools.islice skips items of others"
        )
    if isinstance(loader.dataset, IterableDataset):
        return SkippedLoader(loader, num_batches)
    without = Without(loader.batch_sampler or loader.sampler, num_batches)
    how = (
        {"batch_size": None, "sampler": without}
        if loader.batch_sampler is None
        else {"batch_sampler": without}
    )
    return rebuild(loader, loader.dataset, loader.pin_memory, generator=loader.generator, **how)


class SkippedLoader:
    """A view of `whole` whose next pass begins `skip` batches later; everything else is `whole`'s own."""

    def __init__(self, whole: Any, skip: int) -> None:
        self.whole = whole
        self.skip = skip

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        if isinstance(self.whole, PreparedLoader):
            return self.whole.read(skip)
        return islice(self.whole, skip, None)

    def __len__(self) -> int:
        return max(0, len(self.whole) - self.skip)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "whole" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.whole, name)


class Without:
    """A sampler without its first `skip` items, the first time it is iterated."""

    def __init__(self, sampler: Iterable[Any], skip: int) -> None:
        self.sampler = sampler
        self.skip = skip

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        return islice(self.sampler, skip, None)

    def __len__(self) -> int:
        return max(0, len(self.sampler) - self.skip)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "sampler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.sampler, name)

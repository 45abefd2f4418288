"""Prepared loaders: data order, sharding, position, devices.

`order` data order and sharding arithmetic · `source` the interface, map-style data sets, the way to the device ·
`stream` iterable ones · `loader` the prepared loader, and how it is made · here: a pass that begins later, and the
samples of an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeVar
from weakref import ref

from torch.utils.data import DataLoader, IterableDataset

from ..base.accumulation import UpdateWindow
from ..errors import BatchError, check_whole
from .loader import PreparedLoader, prepare_loader
from .source import rebuild

__all__ = ["PreparedLoader", "SkippedLoader", "prepare_loader", "skip_first_batches"]

Loader = TypeVar("Loader", bound=Iterable[Any])


def skip_first_batches(loader: Loader, num_batches: int = 0) -> Loader:
    """Leave the first batches of a loader out of its next pass.

    Skipped samples of a map-style data set are not loaded. On a prepared loader the batches of this rank count.

    Args:
        loader: a DataLoader, or a prepared one.
        num_batches: 0 or more.

    Returns:
        A view of the loader.

    Raises:
        BatchError: `loader` is not a DataLoader, or `num_batches` is not a count.

    Example:
        >>> loader = torch.utils.data.DataLoader(range(6), batch_size=2)
        >>> list(skip_first_batches(loader, 2))
        [tensor([4, 5])]
    """
    check_whole(f"num_batches={num_batches!r}", num_batches, 0, BatchError)
    view: Any
    if isinstance(loader, SkippedLoader):
        view = SkippedLoader(loader.loader, loader.skip + num_batches)
    elif not isinstance(loader, DataLoader):
        raise BatchError(
            f"skip_first_batches takes a DataLoader, got a {type(loader).__name__}: use itertools.islice for other "
            "iterables"
        )
    elif isinstance(loader, PreparedLoader) or isinstance(loader.dataset, IterableDataset):
        view = SkippedLoader(loader, num_batches)
    else:
        sampling: Any = {"batch_sampler": SkippedLoader(loader.batch_sampler, num_batches)}
        if loader.batch_sampler is None:
            sampling = {"batch_size": None, "sampler": SkippedLoader(loader.sampler, num_batches)}
        view = rebuild(loader, loader.dataset, loader.pin_memory, generator=loader.generator, **sampling)
    return view  # type: ignore[no-any-return]


class SkippedLoader:
    """View of `loader`, a loader or a sampler; its next pass begins `skip` batches later."""

    def __init__(self, loader: Any, skip: int) -> None:
        self.loader, self.skip = loader, skip

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        if isinstance(self.loader, PreparedLoader):
            return self.loader.read(skip)
        return islice(self.loader, skip, None)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.skip)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)


class Samples(NamedTuple):
    """The samples of an update: places `begin` to `end` in the order of an epoch, over all ranks."""

    loader: Callable[[], PreparedLoader | None]
    epoch: int
    begin: int
    end: int


class SampleTracker:
    """Follows the places of the updates of one run."""

    def __init__(self, window: UpdateWindow) -> None:
        self._window = window
        self._last = Samples(lambda: None, 0, 0, 0)  # of the last update

    def samples(self) -> Samples | None:
        """The samples of this update; None if they do not come from a prepared loader. Call it at each update."""
        window, last = self._window, self._last
        loader = window.reading
        if not isinstance(loader, PreparedLoader):
            return None
        begin, continues = last.end, last.loader() is loader and last.epoch == loader.epoch
        if continues and begin == loader.position:  # another optimizer's part of the same update
            return last
        if not continues or begin > loader.position:
            micro_steps = window.micro if window.accumulation != 1 else 1
            size = loader.total_batch_size
            begin = loader.pass_start if size is None else max(0, loader.position - micro_steps * size)
        self._last = Samples(ref(loader), loader.epoch, begin, loader.position)
        return self._last

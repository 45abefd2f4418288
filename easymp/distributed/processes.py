"""Process control: this process's place in the run, and blocks and functions that only some processes run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from ..errors import BatchError

if TYPE_CHECKING:
    from ..distributed import World

P = ParamSpec("P")
R = TypeVar("R")
Inputs = TypeVar("Inputs", bound="list[Any] | tuple[Any, ...] | str | Tensor | dict[Any, Any]")


class Processes:
    """Process control, for classes with a `_world`.

    Example:
        >>> acc = Accelerator(cpu=True)
        >>> acc.device, acc.num_processes, acc.process_index, acc.local_process_index
        (device(type='cpu'), 1, 0, 0)
        >>> acc.is_main_process, acc.is_local_main_process
        (True, True)
        >>> acc.wait_for_everyone()
        >>> acc.print("printed once")
        printed once
    """

    _world: World

    def __repr__(self) -> str:
        return f"{type(self).__name__}(process {self.process_index} of {self.num_processes}, device {self.device})"

    @property
    def device(self) -> torch.device:
        """The device of this process, for models and batches."""
        return self._world.device

    @property
    def num_processes(self) -> int:
        """Number of processes in the run (the world size)."""
        return self._world.size

    @property
    def process_index(self) -> int:
        """Rank of this process in the run, from 0."""
        return self._world.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its node, from 0."""
        return self._world.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0 of the run."""
        return self._world.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self._world.local_rank == 0

    def wait_for_everyone(self) -> None:
        """Return when every process has come here.

        Weights that ranks trained alone (strategy "local_sgd") are averaged.

        Raises:
            WorldError: another process is gone, waits elsewhere, or has not come within the run's timeout.
        """
        self._world.compare("wait_for_everyone")
        self._world.settle()
        self._world.barrier()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of each node.

        Args:
            args: the values.
            kwargs: keywords of `print`.
        """
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201

    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on process 0 only.

        Args:
            function: any function or method.

        Returns:
            A function with the same arguments; on other processes it does nothing and returns None.

        Example:
            >>> @acc.on_main_process
            ... def report(loss):
            ...     print("loss", loss)
            >>> report(0.5)
            loss 0.5
        """
        return run_where(lambda: self.is_main_process, function)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let process 0 run a block before the others, for example to fill a cache that they then read.

        Returns:
            A context manager. The others wait as long as process 0 is alive.

        Raises:
            WorldError: process 0 is gone, or has not answered for the run's timeout.

        Example:
            >>> with acc.main_process_first():
            ...     words = sorted({"b", "a"})  # for example: download and tokenize
        """
        return self._world.in_turn("main_process_first", self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let the first process of each node run a block before the node's others.

        Returns:
            A context manager. The others wait as long as that process is alive.

        Raises:
            WorldError: a process is gone, or has not answered for the run's timeout.

        Example:
            >>> with acc.local_main_process_first():
            ...     words = sorted({"b", "a"})  # for example: unpack to the node's disk
        """
        return self._world.in_turn("local_main_process_first", self.is_local_main_process)

    @overload
    def split_between_processes(
        self, inputs: Inputs, apply_padding: bool = False
    ) -> AbstractContextManager[Inputs]: ...

    @overload
    def split_between_processes(
        self, inputs: Dataset[R], apply_padding: bool = False
    ) -> AbstractContextManager[Dataset[R]]: ...

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give each process its share of some inputs, for a block.

        Shares are contiguous, in rank order; the first ones are longer by one where it does not divide.

        Args:
            inputs: a list, tuple, string, tensor (split along dimension 0), data set, or a dict of such values of one
                length.
            apply_padding: repeat the last item so that all shares are as long as the longest (to gather them later).

        Yields:
            The share of this process, of the same kind; a Subset of a data set that has no `select`.

        Raises:
            BatchError: a dict with values of different lengths, or something that has no length.

        Example:
            >>> with acc.split_between_processes(["a", "b", "c"]) as prompts:
            ...     print(prompts)  # one process has them all
            ['a', 'b', 'c']
        """
        yield share(inputs, self.process_index, self.num_processes, apply_padding)


def run_where(
    condition: Callable[[], bool], function: Callable[P, R], default: R | None = None
) -> Callable[P, R | None]:
    """The function on processes where the condition holds. On others, one that does nothing and returns `default`."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if condition() else default

    return run


def share(inputs: Any, rank: int, size: int, pad: bool) -> Any:
    """Rank `rank`'s share of `inputs` among `size`."""
    if isinstance(inputs, dict):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            problem = f"the dict's values have different lengths, {lengths}"
            raise BatchError(f"{problem}: they cannot be split alike. Make them of one length")
        return {key: share(value, rank, size, pad) for key, value in inputs.items()}
    try:
        length = len(inputs)
    except TypeError:
        problem = f"{type(inputs).__name__} has no length, so it cannot be split"
        raise BatchError(f"{problem}: pass a list, tuple, tensor, data set or dict of these") from None
    quotient, remainder = divmod(length, size)
    begin = rank * quotient + min(rank, remainder)
    end = begin + quotient + (rank < remainder)
    padding = int(pad and length > 0 and remainder > 0 and rank >= remainder)
    if isinstance(inputs, Tensor):
        return torch.cat([inputs[begin:end], inputs[-1:]]) if padding else inputs[begin:end]
    if isinstance(inputs, (list, tuple, str)):
        return inputs[begin:end] + inputs[-1:] if padding else inputs[begin:end]  # type: ignore[operator]  # alike
    indices = list(range(begin, end)) + [length - 1] * padding
    return inputs.select(indices) if hasattr(inputs, "select") else Subset(inputs, indices)

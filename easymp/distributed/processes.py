"""Process control: this process's place in the run, and blocks and functions that only some processes run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from ..errors import BatchError, WorldError

if TYPE_CHECKING:
    from ..distributed import World

P = ParamSpec("P")
R = TypeVar("R")
Share = TypeVar("Share", bound="list[Any] | tuple[Any, ...] | str | Tensor | dict[Any, Any]")


class DistributedType(StrEnum):
    """How the processes of a run are spread, in Accelerate's words. easymp gives NO, MULTI_CPU, MULTI_GPU, MULTI_XPU or FSDP.

    Example:
        >>> Accelerator(cpu=True).distributed_type == DistributedType.NO
        True
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


class PrecisionType(StrEnum):
    """Precisions in Accelerate's words.

    Example:
        >>> Accelerator(cpu=True, mixed_precision=PrecisionType.NO).mixed_precision == PrecisionType.NO
        True
    """

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class Processes:
    """Process control, for classes with a `_world`."""

    _world: World

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(process {self.process_index} of {self.num_processes}, {self.distributed_type.value}, "
            f"device {self.device})"
        )

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

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process of the run."""
        return self._world.rank == self._world.size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether the run has several processes."""
        return self._world.size > 1

    @property
    def distributed_type(self) -> DistributedType:
        """How processes are spread, in Accelerate's words: FSDP under every strategy that shards models, else by the device."""
        if self._world.size == 1:
            return DistributedType.NO
        if self._sharded:
            return DistributedType.FSDP
        return {"cuda": DistributedType.MULTI_GPU, "xpu": DistributedType.MULTI_XPU}.get(
            self.device.type, DistributedType.MULTI_CPU
        )

    def wait_for_everyone(self) -> None:
        """Return when every process has come here. Weights that ranks trained alone (strategy "local_sgd") are averaged.

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

    @property
    def _sharded(self) -> bool:
        """Whether the run's strategy shards models; False without a run."""
        return False

    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on process 0 only.

        Args:
            function: any function or method.

        Returns:
            A function with the same arguments; on other processes it does nothing and returns None.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> @acc.on_main_process
            ... def report(loss):
            ...     print("loss", loss)
            >>> report(0.5)
            loss 0.5
        """
        return self._only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on the first process of each node only.

        Args:
            function: any function or method.

        Returns:
            A function with the same arguments; on other processes it does nothing and returns None.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> acc.on_local_main_process(print)("once a node")
            once a node
        """
        return self._only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on the last process only.

        Args:
            function: any function or method.

        Returns:
            A function with the same arguments; on other processes it does nothing and returns None.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> acc.on_last_process(print)("from the last process")
            from the last process
        """
        return self._only(function, lambda: self.is_last_process)

    @overload
    def on_process(
        self, function: Callable[P, R], process_index: int | None = None
    ) -> Callable[P, R | None]: ...

    @overload
    def on_process(
        self, function: None = None, process_index: int | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Decorate a function to run on one process only.

        Args:
            function: any function or method; None returns the decorator, for ``@acc.on_process(process_index=1)``.
            process_index: the rank in the run.

        Returns:
            A function with the same arguments; on other processes it does nothing and returns None.

        Raises:
            WorldError: there is no such process.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> @acc.on_process(process_index=0)
            ... def sizes():
            ...     return [1, 2]
            >>> sizes()
            [1, 2]
        """
        _check_index("process_index", process_index, "the", self.num_processes)
        return self._only(function, lambda: self.process_index == process_index)

    @overload
    def on_local_process(
        self, function: Callable[P, R], local_process_index: int | None = None
    ) -> Callable[P, R | None]: ...

    @overload
    def on_local_process(
        self, function: None = None, local_process_index: int | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...

    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Decorate a function to run on one process of each node only.

        Args:
            function: any function or method; None returns the decorator.
            local_process_index: the rank on the node.

        Returns:
            A function with the same arguments; on other processes it does nothing and returns None.

        Raises:
            WorldError: a node has no such process.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> acc.on_local_process(print, local_process_index=0)("once a node")
            once a node
        """
        _check_index("local_process_index", local_process_index, "a node's", self._world.local_size)
        return self._only(function, lambda: self.local_process_index == local_process_index)

    @staticmethod
    def _only(function: Any, here: Callable[[], bool]) -> Any:
        """The function where `here`, and nothing elsewhere; without a function, the decorator."""

        def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
            @functools.wraps(function)
            def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
                return function(*args, **kwargs) if here() else None

            return run

        return decorate if function is None else decorate(function)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let process 0 run a block before the others, for example to fill a cache that they then read.

        Returns:
            A context manager. The others wait as long as process 0 is alive.

        Raises:
            WorldError: process 0 is gone, or has not answered for the run's timeout.

        Example:
            >>> acc = Accelerator(cpu=True)
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
            >>> acc = Accelerator(cpu=True)
            >>> with acc.local_main_process_first():
            ...     words = sorted({"b", "a"})  # for example: unpack to the node's disk
        """
        return self._world.in_turn("local_main_process_first", self.is_local_main_process)

    @overload
    def split_between_processes(
        self, inputs: Share, apply_padding: bool = False
    ) -> AbstractContextManager[Share]: ...

    @overload
    def split_between_processes(
        self, inputs: Dataset[R], apply_padding: bool = False
    ) -> AbstractContextManager[Dataset[R]]: ...

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give each process its share of some inputs, for a block.

        Shares are contiguous, in rank order; the first ones are longer by one where it does not divide.

        Args:
            inputs: a list, tuple, string, tensor (split along dimension 0), data set, or a dict of such values of one length.
            apply_padding: repeat the last item so that all shares are as long as the longest (to gather them later).

        Yields:
            The share of this process, of the same kind; a Subset of a data set that has no `select`.

        Raises:
            BatchError: a dict with values of different lengths, or something that has no length.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> with acc.split_between_processes(["a", "b", "c"]) as prompts:
            ...     print(prompts)  # one process has them all
            ['a', 'b', 'c']
        """
        yield share(inputs, self.process_index, self.num_processes, apply_padding)


def _check_index(name: str, index: int | None, whose: str, size: int) -> None:
    if index is None or not 0 <= index < size:
        raise WorldError(f"{name}={index!r} is not one of {whose} {size} processes, 0 … {size - 1}")


def share(inputs: Any, rank: int, size: int, pad: bool) -> Any:
    """Rank `rank`'s share of `inputs` among `size`."""
    if isinstance(inputs, dict):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise BatchError(
                f"the dict's values have different lengths, {lengths}: they cannot be split alike. Make them of one length"
            )
        return {key: share(value, rank, size, pad) for key, value in inputs.items()}
    try:
        length = len(inputs)
    except TypeError:
        raise BatchError(
            f"{type(inputs).__name__} has no length, so it cannot be split: pass a list, tuple, tensor, data set or dict of these"
        ) from None
    each, more = divmod(length, size)
    begin = rank * each + min(rank, more)
    end = begin + each + (rank < more)
    short = (each + (more > 0)) - (end - begin) if pad and length else 0
    if isinstance(inputs, (list, tuple, str)):
        part = inputs[begin:end]
        return part + inputs[-1:] * short
    if isinstance(inputs, Tensor):
        part = inputs[begin:end]
        return torch.cat([part, inputs[-1:].expand(short, *inputs.shape[1:])]) if short else part
    indices = list(range(begin, end)) + [length - 1] * short
    return inputs.select(indices) if hasattr(inputs, "select") else Subset(inputs, indices)

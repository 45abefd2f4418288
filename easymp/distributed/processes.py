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
    """How the processes of a run are spread, by the names that scripts compare with."""

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
    """Precisions by the names that scripts compare with."""

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
        return self._world.device

    @property
    def num_processes(self) -> int:
        return self._world.size

    @property
    def process_index(self) -> int:
        return self._world.rank

    @property
    def local_process_index(self) -> int:
        return self._world.local_rank

    @property
    def is_main_process(self) -> bool:
        return self._world.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        return self._world.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        return self._world.rank == self._world.size - 1

    @property
    def use_distributed(self) -> bool:
        return self._world.size > 1

    @property
    def distributed_type(self) -> DistributedType:
        if self._world.size == 1:
            return DistributedType.NO
        if self._sharded:
            return DistributedType.FSDP
        return {"cuda": DistributedType.MULTI_GPU, "xpu": DistributedType.MULTI_XPU}.get(
            self.device.type, DistributedType.MULTI_CPU
        )

    def wait_for_everyone(self) -> None:
        """Return when every process has come here. Weights that ranks trained alone (strategy "local_sgd") are averaged."""
        self._world.compare("wait_for_everyone")
        self._world.settle()
        self._world.barrier()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, on the first process of each node."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201

    @property
    def _sharded(self) -> bool:
        """Whether the run's strategy shards models; False without a run."""
        return False

    # -- functions that run on some processes -------------------------------------------------------------------------

    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """`function`, on process 0; elsewhere it does nothing and returns None."""
        return self._only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """`function`, on the first process of each node; elsewhere it does nothing and returns None."""
        return self._only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """`function`, on the last process; elsewhere it does nothing and returns None."""
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
        """`function`, on one process; elsewhere it does nothing and returns None. Also as ``@on_process(process_index=1)``."""
        self._check_index("process_index", process_index, "the", self.num_processes)
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
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
        """`function`, on one process of each node; elsewhere it does nothing and returns None."""
        self._check_index("local_process_index", local_process_index, "a node's", self._world.local_size)
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return self._only(function, lambda: self.local_process_index == local_process_index)

    @staticmethod
    def _check_index(name: str, index: int | None, whose: str, size: int) -> None:
        if index is None or not 0 <= index < size:
            raise WorldError(f"{name}={index!r} is not one of {whose} {size} processes, 0 … {size - 1}")

    @staticmethod
    def _only(function: Callable[P, R], here: Callable[[], bool]) -> Callable[P, R | None]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
            return function(*args, **kwargs) if here() else None

        return run

    def main_process_first(self) -> AbstractContextManager[None]:
        """Process 0 runs the block before the others (to fill a cache that they then read), which wait as long as it is alive.

        Raises:
            WorldError: process 0 is gone, or has not answered for the run's timeout.
        """
        return self._world.in_turn("main_process_first", self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """The first process of each node runs the block before the node's others, which wait as long as it is alive.

        Raises:
            WorldError: a process is gone, or has not answered for the run's timeout.
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
        """This process's share of `inputs`: a list, tuple, tensor (along dimension 0), data set, or dict of such.

        Shares are contiguous, in rank order; the first ones are longer by one where it does not divide.

        Args:
            inputs: the values to share out. All values of a dict must have one length.
            apply_padding: repeat the last item so that all shares are as long as the longest (to gather them later).

        Raises:
            BatchError: a dict with values of different lengths, or something that has no length.
        """
        yield share(inputs, self.process_index, self.num_processes, apply_padding)


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

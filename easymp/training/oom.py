"""Out of memory: all ranks release their memory together, and try again with a smaller batch.

A rank that runs out of memory leaves the others waiting in a collective. So it writes a note into the store and closes
its connections. The others get an error, find the note, and join the retry over new connections.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import torch

from ..distributed import World
from ..distributed.mailbox import Mailbox
from ..errors import ArgumentError, SettingError
from ..logging import get_logger
from .state import accelerators, current_world

logger = get_logger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

# The last is of cuBLAS and cuDNN.
SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "status_alloc_failed")


def release_memory(*objects: Any, device: torch.device | None = None) -> list[Any]:
    """Let go of objects, collect garbage, and give cached device memory back.

    Args:
        objects: references that this function drops; the caller replaces its own variables.
        device: the device whose cache is emptied; None takes CUDA where it is in use.

    Returns:
        One None for each object, to assign to the variables.

    Example:
        >>> model, batch = nn.Linear(2, 1), torch.ones(4, 2)
        >>> model, batch = release_memory(model, batch)
        >>> model, batch
        (None, None)
    """
    nothing: list[None] = [None] * len(objects)
    del objects
    gc.collect()
    empty_cache(device.type if device is not None else "cuda" if torch.cuda.is_initialized() else "cpu")
    return nothing


def empty_cache(device_type: str) -> None:
    """Give cached device memory back; a CPU has none."""
    if device_type != "cpu":
        torch.get_device_module(device_type).empty_cache()


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that the device or the host has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS)


@overload
def find_executable_batch_size(
    function: Callable[Concatenate[int, P], R],
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    keep_global_batch: Literal[False] = False,
) -> Callable[P, R]: ...


@overload
def find_executable_batch_size(
    function: None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    keep_global_batch: Literal[False] = False,
) -> Callable[[Callable[Concatenate[int, P], R]], Callable[P, R]]: ...


@overload
def find_executable_batch_size(
    function: Callable[Concatenate[int, int, P], R], starting_batch_size: int = 128, *, keep_global_batch: Literal[True]
) -> Callable[P, R]: ...


@overload
def find_executable_batch_size(
    function: None = None, starting_batch_size: int = 128, *, keep_global_batch: Literal[True]
) -> Callable[[Callable[Concatenate[int, int, P], R]], Callable[P, R]]: ...


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    keep_global_batch: bool = False,
) -> Any:
    """Run ``function(batch_size, …)``, and again with less each time that any rank runs out of memory.

    ``@find_executable_batch_size(starting_batch_size=256)`` above a training function with the batch size as its first
    parameter. Everything that holds memory must be made inside it. All ranks try the same size. A size that worked is
    where the next call begins.

    Args:
        function: the training function.
        starting_batch_size: first size to try.
        reduce_batch_size_fn: called without arguments, gives the next size; by default the half.
        keep_global_batch: split the batch instead: the second parameter is then the number of micro-batches to
            accumulate, doubled whenever the size is halved.

    Returns:
        The function without these parameters, which returns what `function` does; without `function` the decorator.

    Raises:
        SettingError: the function lacks the parameters, or the caller passes them.
        RuntimeError: no size fits.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=64)
        ... def train(batch_size, epochs):
        ...     if batch_size > 16:
        ...         raise MemoryError  # as torch.OutOfMemoryError
        ...     return batch_size
        >>> train(epochs=3)
        16
    """
    if function is None:
        options: Any = (starting_batch_size, reduce_batch_size_fn, keep_global_batch)
        return lambda function: find_executable_batch_size(function, *options)
    if keep_global_batch and reduce_batch_size_fn is not None:
        raise SettingError("keep_global_batch=True halves the batch: leave reduce_batch_size_fn out")
    passed_count, name = 2 if keep_global_batch else 1, function.__name__
    names = list(inspect.signature(function).parameters)
    if len(names) < passed_count:
        expected = "the batch size and the number of micro-batches" if keep_global_batch else "the batch size"
        raise SettingError(f"{name}() takes {len(names)} parameters: its first must be {expected}")
    size, micro = starting_batch_size, 1

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal size, micro
        if len(args) > len(names) - passed_count or any(n in kwargs for n in names[:passed_count]):
            explanation = f"gets {', '.join(names[:passed_count])} from find_executable_batch_size"
            raise ArgumentError(f"{name}() {explanation}: leave it out of the call")
        world = current_world()
        while True:
            if size < 1:
                message = "runs out of memory at every batch size, down to 1: the model itself does not fit"
                raise RuntimeError(f"{name}() {message}")
            release_memory(device=world.device)
            result, fits = _attempt(world, function, (size, micro)[:passed_count] + args, kwargs)
            if fits:
                return result
            before = size
            size = reduce_batch_size_fn() if reduce_batch_size_fn is not None else size // 2
            micro *= 2
            logger.warning("out of memory at batch size %d: trying %d", before, size)

    return run


def _attempt(world: World, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> tuple[Any, bool]:
    """The function's result, and whether it fitted into memory on every rank."""
    result = None
    box = Mailbox.open(world.store(), "easymp/attempts", world.rank, world.size) if world.size > 1 else None
    before = [model for accelerator in accelerators() for model in accelerator._prepared.models]
    try:
        result, outcome = function(*args, **kwargs), "done"
    except Exception as error:  # of any kind: the other ranks wait to hear of it
        if out_of_memory(error):
            outcome = "out of memory"
        elif box is not None and box.has("ran out"):
            outcome = "followed"  # the error is the consequence of another rank's
        else:
            if box is not None:
                box.post(f"ended/{world.rank}")
            raise
        # Objects on the frames of the error, models above all, must be free before the next attempt.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        # So must objects that outer Accelerators prepared in it: they hold memory, and connections of the process
        # group.
        for accelerator in accelerators():
            if not any(model is old for model in accelerator._prepared.models for old in before):
                accelerator.free_memory()
    if box is None:
        return result, outcome == "done"
    if outcome == "out of memory":
        box.post("ran out")
    box.post(f"ended/{world.rank}")
    box.read(f"ended/{world.rank}")  # a post returns before it has arrived; another connection may overtake it
    if outcome != "done":
        gc.collect()
        world.break_off()
    box.wait(box.of_ranks("ended"), longest=0.5)  # as long as it takes
    fits = not box.has("ran out")
    if not fits:
        result = None
        gc.collect()
        world.restart()
    return result, fits

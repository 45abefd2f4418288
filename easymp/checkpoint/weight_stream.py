"""Whole weights of a live model, gathered bucket by bucket, for `weights`, `save_model` and `get_state_dict`.

All ranks meet in the store before each bucket travels. So they wait for a rank whose disk or server is slow as long as
it lives, which a collective would not, and learn that a rank has left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import World
from ..errors import CheckpointError, SettingError
from ..strategies.meta_init import left_to_others
from ..training.wrapper import unwrap
from .codec import nbytes
from .manifest import Shape, canonical
from .ranks import Meeting, error_text, run_on_all
from .weights import tied_names

Pair = tuple[str, Tensor]
Bucket = deque[Pair]  # each tensor can go when it has been read
TensorSpecs = Mapping[str, tuple[torch.dtype, Shape]]


class WeightStream(Iterable[Pair]):
    """The whole weights of a model; see `Accelerator.weights`. Each pass over it reads the weights anew."""

    def __init__(self, world: World, model: nn.Module, dtype: torch.dtype | None, size: int) -> None:
        self._world, self._dtype, self._size = world, dtype, size
        self._module = unwrap(model, keep_torch_compile=False)
        tensors_of(self._module)  # raises what every pass would

    def __iter__(self) -> Iterator[Pair]:
        with closing(self._buckets(None, lockstep=False)) as buckets:
            for bucket in buckets:
                yield from drain(bucket)

    def each_bucket(self, function: Callable[[list[Pair]], object], rank: int | None = None) -> None:
        """Call a function with each bucket, a list of (name, tensor), on all ranks or on one. All ranks call this.

        Args:
            function: called once a bucket; the other ranks wait for it. Its error is raised here, and ends the stream
                on all ranks.
            rank: the one rank that gets the tensors and calls `function`; None: every rank does.

        Raises:
            CheckpointError: as a loop over the stream, or `function` failed on another rank.
            SettingError: no such rank.

        Example:
            >>> server = {}
            >>> acc.weights(model, dtype=torch.bfloat16).each_bucket(server.update, rank=0)
            >>> server["weight"].dtype
            torch.bfloat16
        """
        if rank is not None and rank not in range(self._world.size):
            raise SettingError(f"rank={rank!r} is not one of the {self._world.size} ranks of this run")
        with closing(self._buckets(rank, lockstep=True)) as buckets:
            for bucket in buckets:
                if rank in (None, self._world.rank):
                    try:
                        function(list(bucket))
                    except Exception as error:
                        buckets.throw(error)

    def _buckets(self, target: int | None, lockstep: bool) -> Generator[Bucket]:
        """With `lockstep`, ranks that hold the whole model meet before each bucket, too."""
        self._world.settle()
        tensors, aliases = tensors_of(self._module)
        aliases_of: dict[str, list[str]] = {}
        for name, stored_name in aliases.items():
            aliases_of.setdefault(stored_name, []).append(name)
        if is_sharded(self._module, tensors):
            buckets = gather(self._world, tensors, self._size, self._dtype, target)
        else:
            buckets = self._local_buckets(tensors, target in (None, self._world.rank), lockstep)
        for bucket in buckets:
            pairs = Bucket((alias, t) for name, t in drain(bucket) for alias in (name, *aliases_of.get(name, ())))
            try:
                yield pairs
            except Exception as error:
                buckets.throw(error)
            pairs.clear()

    def _local_buckets(self, tensors: Mapping[str, Tensor], is_target: bool, lockstep: bool) -> Generator[Bucket]:
        if meta := [name for name, tensor in tensors.items() if tensor.is_meta]:
            raise CheckpointError(f"{meta[0]} is on the meta device: prepare the model, or load_weights into it")
        specs = specs_of(tensors, self._dtype)
        groups = group_names(specs, self._size)

        def bucket_of(names: list[str]) -> Bucket:
            return Bucket((name, tensors[name].detach().to(specs[name][0])) for name in names if is_target)

        return in_lockstep(self._world, groups, bucket_of) if lockstep else (bucket_of(names) for names in groups)


def drain(bucket: Bucket) -> Iterator[Pair]:
    while bucket:
        yield bucket.popleft()


def tensors_of(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The distinct tensors of a `state_dict` by their first canonical names, and further names of these.

    Raises:
        CheckpointError: it holds something else.
    """
    state = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name!r} in the state_dict of this {type(module).__name__} is a {type(value).__name__}, and files "
                "and streams of weights hold tensors: save_state keeps it, or let get_extra_state return a tensor"
            )
    by_name = {canonical(name): tensor for name, tensor in state.items()}
    aliases = tied_names(by_name)
    return {name: tensor for name, tensor in by_name.items() if name not in aliases}, aliases


def is_sharded(module: nn.Module, state: Mapping[str, Any]) -> bool:
    """Whether ranks hold different parts of the model; all ranks get the same answer."""
    return left_to_others(module) or any(map(_is_dtensor, state.values()))


def specs_of(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> TensorSpecs:
    """The dtype in which each tensor travels, and its shape."""
    return {
        name: (dtype if dtype is not None and t.is_floating_point() else t.dtype, tuple(t.shape))
        for name, t in tensors.items()
    }


def group_names(specs: TensorSpecs, max_bytes: int) -> Iterator[list[str]]:
    """Names in order, in groups of at most `most` bytes, or of one larger tensor."""
    names: list[str] = []
    total = 0
    for name, spec in specs.items():
        size = nbytes(*spec) or 0
        if names and total + size > max_bytes:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names


def gather(
    world: World,
    tensors: Mapping[str, Tensor],
    size: int,
    dtype: torch.dtype | None = None,
    target: int | None = None,
    device: torch.device | None = None,
) -> Generator[Bucket]:
    """Gather whole tensors in buckets of `size` bytes. All ranks run it, with the same names in the same order.

    Args:
        dtype: floating-point tensors travel and arrive in it.
        target: the rank that gets the tensors; others get empty buckets. None: all ranks.
        device: where the tensors arrive; None: the run's.

    Raises:
        CheckpointError: tensors of another model, or one that no rank has; or a rank has left, and why. An error
            thrown into the generator is the reason that the others raise.
    """
    specs = specs_of(tensors, dtype)
    gathered = run_on_all(world, lambda: (specs, {name: _is_dtensor(t) for name, t in tensors.items() if _is_held(t)}))
    if mismatched := [rank for rank, (rank_specs, _) in enumerate(gathered) if rank_specs != gathered[0][0]]:
        raise CheckpointError(f"rank {mismatched[0]} has other tensors than rank 0: all ranks pass one model")
    holders = {name: [rank for rank, (_, held_names) in enumerate(gathered) if name in held_names] for name in tensors}
    if missing := [name for name, ranks in holders.items() if not ranks]:
        raise CheckpointError(f"{missing[0]}: the ranks do not have the whole of it: it is on the meta device")

    def bucket_of(names: list[str]) -> Bucket:
        bucket = Bucket()
        for name in names:
            is_dtensor = gathered[holders[name][0]][1][name]
            tensor = _gather_tensor(world, tensors[name], specs[name], holders[name], is_dtensor, target)
            if target in (None, world.rank):
                bucket.append((name, tensor.to(device or world.device)))
        return bucket

    yield from in_lockstep(world, group_names(specs, size), bucket_of)


def _is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")  # without the import of DTensor, which takes long


def _is_held(tensor: Any) -> bool:
    return not tensor.is_meta and (not _is_dtensor(tensor) or tensor.device_mesh.get_coordinate() is not None)


def _gather_tensor(
    world: World, tensor: Any, spec: tuple[torch.dtype, Shape], holders: list[int], is_dtensor: bool, target: int | None
) -> Tensor:
    """The whole tensor, of the first holder if values may differ. Where `target` is given, others may get anything."""
    if world.rank in holders:
        tensor = tensor.detach().to(spec[0])
        if is_dtensor:
            tensor = tensor.to(world.device).full_tensor()
    complete = holders if is_dtensor else holders[:1]
    if target in complete or len(complete) == world.size:
        return tensor  # type: ignore[no-any-return]
    if world.rank != holders[0]:
        tensor = torch.empty(spec[1], dtype=spec[0])
    return world.broadcast(tensor.resolve_conj().resolve_neg().to(world.device), holders[0])


def in_lockstep(
    world: World, groups: Iterable[list[str]], bucket_of: Callable[[list[str]], Bucket]
) -> Generator[Bucket]:
    """Yield a bucket of weights for each group of names. All ranks meet after each; if one leaves, all raise."""
    with Meeting(world) as meeting:
        for number, names in enumerate(groups):
            if number:
                meeting.run(lambda: None)
            try:
                bucket = bucket_of(names)
                yield bucket
                bucket.clear()
            except BaseException as error:
                reason = "left the loop over the weights early, which all ranks run to its end"
                if not isinstance(error, GeneratorExit):
                    reason = error_text(error) if isinstance(error, Exception) else type(error).__name__
                meeting.leave(reason)
                raise
        meeting.run(lambda: None)

"""Whole weights of a live model, gathered bucket by bucket: for `Accelerator.weights`, `save_model` and `get_state_dict`.

All ranks meet in the store before each bucket travels. So they wait for a rank whose disk or server is slow as long as it lives, which a
collective would not, and learn that a rank has left.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..distributed import World
from ..errors import CheckpointError, SettingError
from ..strategies.meta_init import left_to_others
from ..training.wrapper import unwrap as unwrapped
from . import manifest
from .codec import nbytes
from .manifest import Box, Shape
from .save import Barrier
from .snapshot import on_all, words_of

Pair = tuple[str, Tensor]
Bucket = deque[Pair]  # each tensor can go when it has been read
PACK = 2**26  # bytes of several tensors that travel together


class WeightStream(Iterable[Pair]):
    """The whole weights of a model; see `Accelerator.weights`. Each pass over it reads the weights anew."""

    def __init__(self, world: World, model: nn.Module, dtype: torch.dtype | None, size: int) -> None:
        self._world, self._dtype, self._size = world, dtype, size
        self._module = unwrapped(model, keep_torch_compile=False)
        tensors_of(self._module)  # raises what every pass would

    def __iter__(self) -> Iterator[Pair]:
        with closing(self._buckets(None, lockstep=False)) as buckets:
            for bucket in buckets:
                yield from drained(bucket)

    def each_bucket(self, function: Callable[[list[Pair]], object], rank: int | None = None) -> None:
        """Call a function with each bucket, a list of (name, tensor), on all ranks or on one. All ranks call this.

        Args:
            function: called once a bucket; the other ranks wait for it. Its error is raised here, and ends the stream on all ranks.
            rank: the one rank that gets the tensors and calls `function`; None: every rank does.

        Raises:
            CheckpointError: as a loop over the stream, or `function` failed on another rank.
            SettingError: no such rank.

        Example:
            >>> acc = Accelerator(cpu=True)
            >>> model = acc.prepare(nn.Linear(2, 1))
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
        others: dict[str, list[str]] = {}
        for name, of in aliases.items():
            others.setdefault(of, []).append(name)
        if is_sharded(self._module, tensors):
            buckets = gather(self._world, tensors, self._size, self._dtype, target)
        else:
            buckets = self._whole(tensors, target in (None, self._world.rank), lockstep)
        for bucket in buckets:
            named = Bucket((each, t) for name, t in drained(bucket) for each in (name, *others.get(name, ())))
            try:
                yield named
            except Exception as error:
                buckets.throw(error)
            named.clear()

    def _whole(self, tensors: Mapping[str, Tensor], wanted: bool, lockstep: bool) -> Generator[Bucket]:
        if meta := [name for name, tensor in tensors.items() if tensor.is_meta]:
            raise CheckpointError(
                f"{meta[0]} is on the meta device: prepare the model, or load_weights into it"
            )
        kinds = {name: (sent(t, self._dtype), tuple(t.shape)) for name, t in tensors.items()}
        groups = grouped(kinds, self._size)

        def bring(names: list[str]) -> Bucket:
            every = names if wanted else ()
            return Bucket((name, tensors[name].detach().to(kinds[name][0])) for name in every)

        return in_lockstep(self._world, groups, bring) if lockstep else (bring(names) for names in groups)


def drained(bucket: Bucket) -> Iterator[Pair]:
    """Take out the pairs of a bucket, one after the other."""
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
                f"{name!r} in the state_dict of this {type(module).__name__} is a {type(value).__name__}, and files and streams of weights "
                "hold tensors: save_state keeps it, or let get_extra_state return a tensor"
            )
    first, aliases = distinct(state)
    named = {manifest.canonical(name): tensor for name, tensor in first.items()}
    return named, {manifest.canonical(name): manifest.canonical(of) for name, of in aliases.items()}


def distinct(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the distinct tensors by their first names, and map further names to these."""
    seen: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and seen.setdefault(id(value), name) != name:
            aliases[name] = seen[id(value)]
    return {name: state[name] for name in seen.values()}, aliases


def is_sharded(module: nn.Module, state: Mapping[str, Any]) -> bool:
    """Whether ranks hold different parts of the model; all ranks get the same answer."""
    return left_to_others(module) or any(hasattr(t, "to_local") for t in state.values())


def sent(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor arrives."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def grouped(kinds: Mapping[str, tuple[torch.dtype, Shape]], most: int) -> Iterator[list[str]]:
    """Names in order, in groups of at most `most` bytes, or of one larger tensor."""
    names: list[str] = []
    held = 0
    for name, kind in kinds.items():
        size = nbytes(*kind) or 0
        if names and held + size > most:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    if names:
        yield names


# -- parts of tensors on several ranks ---------------------------------------------------------------------------------


class Spread(NamedTuple):
    """A tensor as it is sent, and the first rank that holds each of its boxes."""

    dtype: torch.dtype
    shape: Shape
    holders: tuple[tuple[Box, int], ...]


def gather(
    world: World,
    tensors: Mapping[str, Tensor],
    size: int,
    dtype: torch.dtype | None = None,
    target: int | Callable[[str], int] | None = None,
    device: torch.device | None = None,
) -> Generator[Bucket]:
    """Gather whole tensors in buckets of `size` bytes. All ranks run it, with the same names in the same order.

    A tensor that a rank holds whole, in that dtype and on that device, is given to it as it is.

    Args:
        dtype: floating-point tensors travel and arrive in it.
        target: the rank that gets the tensors, or a function that gives it for a name; others get empty buckets. None: all ranks.
        device: where the tensors arrive; None: the run's.

    Raises:
        CheckpointError: tensors of another model, or not the whole of them; or a rank has left, and why. An error thrown into the generator
            is the reason that the others raise.
    """
    parts: dict[str, dict[Box, Tensor]] = {}
    kinds = {name: (sent(tensor, dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}

    def boxes() -> Any:
        for name, place in zip(tensors, manifest.places_of(tensors.values())):
            parts[name] = {} if place is None else dict(place.parts)
        return kinds, {name: list(held) for name, held in parts.items()}

    everyones = on_all(world, boxes)
    if apart := [rank for rank, (theirs, _) in enumerate(everyones) if theirs != everyones[0][0]]:
        raise CheckpointError(f"rank {apart[0]} has other tensors than rank 0: all ranks pass one model")
    spreads: dict[str, Spread] = {}
    for name, (kind, shape) in kinds.items():
        holders: dict[Box, int] = {}
        for rank, (_, held) in enumerate(everyones):
            for box in held[name]:
                holders.setdefault(box, rank)
        if wrong := manifest.fault(shape, list(holders)):
            raise CheckpointError(f"{name}: the ranks do not have the whole of it: {wrong}")
        spreads[name] = Spread(kind, shape, tuple(holders.items()))
    del everyones

    def bring(names: list[str]) -> Bucket:
        here = {name: spreads[name] for name in names}
        return Bucket(_bring(world, here, parts, target, device or world.device).items())

    yield from in_lockstep(world, grouped(kinds, size), bring)


def in_lockstep(
    world: World, groups: Iterable[list[str]], bring: Callable[[list[str]], Bucket]
) -> Generator[Bucket]:
    """Yield the bucket of each group. All ranks meet before the next one, and raise a CheckpointError if one has left."""
    with Barrier(world).start() as barrier:
        turn = 0
        for turn, names in enumerate(groups, 1):
            if turn > 1:
                _meet(barrier, turn - 1)
            try:
                bucket = bring(names)
                yield bucket
                bucket.clear()
            except BaseException as error:
                words = "left the loop over the weights early, which all ranks run to its end"
                if not isinstance(error, GeneratorExit):
                    words = words_of(error) if isinstance(error, Exception) else type(error).__name__
                name = f"turn/{turn}/{world.rank}" if world.rank else f"turn/{turn}"
                barrier.put(name, f"rank {world.rank}: {words}".encode())
                raise
        _meet(barrier, turn)


def _meet(barrier: Barrier, turn: int) -> None:
    """Wait until all ranks are there. Raises CheckpointError on all of them if one has left."""
    if barrier.rank:
        barrier.put(f"turn/{turn}/{barrier.rank}", b"")
        said = barrier.take(f"turn/{turn}").decode()
    else:
        every = barrier.gather(f"turn/{turn}", b"")
        words = [
            each.decode() if isinstance(each, bytes) else f"rank {r}: {each}" for r, each in enumerate(every)
        ]
        said = next(filter(None, words), "")
        barrier.forget([f"turn/{turn - 1}"])
        barrier.put(f"turn/{turn}", said.encode())
    if said:
        raise CheckpointError(said)


def _bring(
    world: World,
    spreads: Mapping[str, Spread],
    parts: Mapping[str, Mapping[Box, Tensor]],
    target: int | Callable[[str], int] | None,
    device: torch.device,
) -> dict[str, Tensor]:
    """Gather whole tensors where they are wanted."""
    found: dict[str, Tensor] = {}
    targets = {name: target(name) if callable(target) else target for name in spreads}
    for name, spread in spreads.items():
        if targets[name] in (None, world.rank):
            mine = ((manifest.whole(spread.shape), world.rank),) == spread.holders
            found[name] = (
                parts[name][spread.holders[0][0]].to(device, spread.dtype)
                if mine
                else torch.empty(spread.shape, dtype=spread.dtype, device=device)
            )
    for (holder, to), pack in _packs(spreads, targets):
        flat: Tensor | None = None
        if holder == world.rank:
            own = [
                parts[name][box].to(spreads[name].dtype).resolve_conj().resolve_neg() for name, box in pack
            ]
            flat = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in own])
            del own
        sizes = [box.count * spreads[name].dtype.itemsize for name, box in pack]
        if to is None:
            place = torch.empty(sum(sizes), dtype=torch.uint8) if flat is None else flat
            flat = world.broadcast(place.to(world.device), holder)
        elif flat is not None and to != holder:
            world.send(flat, to)
        elif flat is None and to == world.rank:
            flat = world.receive((sum(sizes),), torch.uint8, holder)
        if flat is not None and to in (None, world.rank):
            for (name, box), part in zip(pack, flat.split(sizes)):
                if ((box, world.rank),) != spreads[name].holders:
                    at = tuple(slice(o, o + n) for o, n in zip(*box))
                    found[name][at] = part.view(spreads[name].dtype).view(box.shape)
    return found


def _packs(
    spreads: Mapping[str, Spread], targets: Mapping[str, int | None]
) -> Iterator[tuple[tuple[int, int | None], list[tuple[str, Box]]]]:
    """Boxes that travel together from one rank to another, or to all (None): about `PACK` bytes, larger elements first (alignment)."""
    held: dict[tuple[int, int | None], list[tuple[str, Box]]] = {}
    sizes = Counter[tuple[int, int | None]]()
    for name, spread in sorted(spreads.items(), key=lambda item: -item[1].dtype.itemsize):
        for box, holder in spread.holders:
            way = holder, targets[name]
            if sizes[way] >= PACK:
                yield way, held.pop(way)
                del sizes[way]
            if box.count:
                held.setdefault(way, []).append((name, box))
                sizes[way] += box.count * spread.dtype.itemsize
    yield from held.items()

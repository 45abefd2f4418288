"""Compare what must be equal on all ranks: objects at `prepare`, and later parameters and options.

`compare_prepared` compares objects and options in words. `Replicas` compares parameters while they are trained: by a checksum of the bits
of each one, and a checksum of these, so that each rank sends a few numbers. They are sent after an update and read after the next one, so
nothing waits for the device. If ranks differ, they exchange the checksums of single parameters.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base.dtensor import local
from ..distributed import World, first_difference, odd_one_out
from ..errors import WorldError
from ..optim.torch_step import IMPLEMENTATION
from ..strategies.single import copies

if TYPE_CHECKING:
    from ..optim.optimizer import PreparedOptimizer
    from .state import Run

ADDED = "add it to the model before prepare(), or call free_memory() and prepare model and optimizer anew"
# Settings by which ranks may differ: their effect is compared, or they do not change what is trained.
MAY_DIFFER = set(
    "mixed_precision strategy gradient_accumulation_steps cpu timeout hang_after memory project_dir log_with sources "
    "strategy_options dataloader_config scaler_options".split()
)
FIRST = 3  # updates that are compared one by one
CHUNK = 2**18  # elements that are summed at a time
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ODD = 0x5DEECE66D  # sums are multiplied by it before the next one is added
WHOLE = -1  # the piece of a parameter that is not cut
CAUSES = (
    "Likely causes: a parameter unfrozen after prepare(); training through another method than the model's call; weights changed on some "
    "ranks only; an optimizer that was not prepared; a step that rounds differently on the ranks (fused or foreach on some, unlike "
    "hardware or numbers of threads, non-deterministic operations). Where ranks are meant to train apart, use strategy='local_sgd', "
    "accelerator.no_sync() around the steps, or Accelerator(replica_check=0), which compares nothing"
)


class _Sent(NamedTuple):
    """A pending comparison."""

    optimizer: PreparedOptimizer
    update: int
    held: list[tuple[Tensor, int]]  # its parameters, each with the piece that this rank holds
    options: list[str]
    sums: Tensor  # their checksums
    rows: Tensor  # a row a rank, once `work` is done and `event` has come
    work: Any
    event: Any


class Replicas:
    """Compares the parameters that prepared optimizers step, and their options; with the first optimizer also the other parameters.

    After every `every`-th update of an optimizer, beside the first ones; `owner` maps ids of prepared parameters to names.
    """

    def __init__(
        self,
        world: World,
        every: int,
        models: Sequence[Any],
        optimizers: Sequence[PreparedOptimizer],
        owner: Mapping[int, str],
    ) -> None:
        self._world, self._every = world, every
        self._models, self._optimizers, self._owner = models, optimizers, owner
        self._updates: dict[int, int] = {}
        # Parameters that an optimizer's first update did not train.
        self._frozen: dict[int, list[Tensor]] = {}
        self._sent: dict[int, _Sent] = {}
        self._paused = False

    def follow(self, strategy: Any) -> None:
        """Note the strategy of the models."""
        self._replicated, self._local_updates = strategy.replicated, strategy.local_updates
        if strategy.local_updates:
            strategy.averaged = self._averaged

    def stepped(self, optimizer: PreparedOptimizer) -> None:
        """Called after an update of `optimizer` on all ranks."""
        if self._paused or self._local_updates:
            return
        key = id(optimizer)
        if any(p.requires_grad for p in self._frozen.get(key, ())):
            self.begin_again(optimizer)
        if key not in self._updates:
            self._frozen[key] = [p for _, p in optimizer.parameters() if not p.requires_grad]
        updates = self._updates[key] = self._updates.get(key, 0) + 1
        self._read(key)
        if updates <= FIRST or updates % self._every == 0:
            self._send(key, optimizer)

    def _averaged(self, inner: torch.optim.Optimizer) -> None:
        """Called after the parameters of `inner` were averaged over the ranks."""
        for optimizer in self._optimizers:
            if optimizer.optimizer is inner:
                self._read(id(optimizer))
                self._send(id(optimizer), optimizer)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A context without comparisons: inside, ranks may differ, or make different numbers of updates."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def settle(self) -> None:
        """Read the pending comparisons; a WorldError where the ranks differ."""
        for key in list(self._sent):
            self._read(key)

    def begin_again(self, optimizer: PreparedOptimizer) -> None:
        """Compare after the next updates of `optimizer`, as after the first ones."""
        self._updates.pop(id(optimizer), None)

    def forget(self) -> None:
        self._updates.clear()
        self._frozen.clear()
        self._sent.clear()

    # -- checksums

    @torch.no_grad()
    def _send(self, key: int, optimizer: PreparedOptimizer) -> None:
        world = self._world
        parameters = [p for _, p in optimizer.parameters()]
        strangers = sum(id(p) not in self._owner for p in parameters)
        if optimizer is self._optimizers[0]:
            theirs = {id(p) for other in self._optimizers for _, p in other.parameters()}
            models = (model.original for model in self._models)
            parameters += [p for model in models for p in model.parameters() if id(p) not in theirs]
        held = [(p, piece) for p in parameters if (piece := self._piece(p)) is not None]
        held.sort(key=lambda one: one[1] != WHOLE)
        wholes = sum(piece == WHOLE for _, piece in held)
        options = list(describe_options(optimizer, wait=False))
        digest = int.from_bytes(hashlib.sha256("\n".join(options).encode()).digest()[:8], "big", signed=True)
        mine = torch.tensor([digest, strangers, held[-1][1] if held else WHOLE, 0, 0])
        mine = mine.to(world.device, non_blocking=True)
        sums = torch.stack([self._sum(local(p)).to(world.device) for p, _ in held]) if held else mine[:0]
        mine[3], mine[4] = self._fold(sums[:wholes]), self._fold(sums[wholes:])
        rows = mine.new_empty(world.size, len(mine))
        event = None
        with world.explained("the comparison of replicas"):
            work = dist.all_gather(list(rows.unbind()), mine, async_op=True)
            if world.device.type != "cpu":
                work.wait()  # of the device's queue, not of the host
                rows = rows.to("cpu", non_blocking=True)
                event = torch.Event(world.device)
                event.record()
        self._sent[key] = _Sent(optimizer, optimizer.updates, held, options, sums, rows, work, event)

    def _piece(self, parameter: Any) -> int | None:
        """The number of the piece of `parameter` that this rank and others hold; None: other ranks do not hold it."""
        placements = getattr(parameter, "placements", None)
        own = placements is None and not self._replicated
        if parameter.is_meta or own or copies(parameter, self._world.size) == 1:
            return None
        if type(local(parameter)).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return None  # a subclass that keeps its values in its own way
        piece = WHOLE
        for dim, placement in enumerate(placements or ()):
            if not placement.is_replicate():
                mesh = parameter.device_mesh
                piece = max(piece, 0) * mesh.size(dim) + mesh.get_local_rank(dim)
        return piece

    def _sum(self, tensor: Tensor) -> Tensor:
        """A checksum of the bits of `tensor`, int64: of each element by its place."""
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        total = torch.ones((), dtype=torch.int64, device=tensor.device)
        for chunk in values.detach().view(BITS[values.element_size()]).reshape(-1).split(CHUNK):
            total = total * ODD + self._fold(chunk)
        return total

    def _fold(self, numbers: Tensor) -> Tensor:
        weights = torch.arange(1, 2 * len(numbers) + 1, 2, device=numbers.device)  # odd, and none is kept
        return weights.mul_(numbers.to(torch.int64)).sum()

    def _read(self, key: int) -> None:
        """Wait for the comparison of this optimizer, if one is under way, and explain a difference on all ranks together."""
        if key not in self._sent:
            return
        sent = self._sent.pop(key)
        with self._world.explained("the comparison of replicas"):
            sent.work.wait()
            if sent.event is not None:
                sent.event.synchronize()
        pieces: dict[int, int] = {}
        for options, strangers, piece, whole, part in (rows := sent.rows.tolist()):
            alike = (options, whole) == (rows[0][0], rows[0][3]) and pieces.setdefault(piece, part) == part
            if strangers or not alike:
                self._explain(sent)
                return

    # -- a difference in words

    def _explain(self, sent: _Sent) -> None:
        """Raise a WorldError with the first difference; a collective."""
        names: dict[int, str] = {}
        for i, model in enumerate(self._models):
            of = f" of {type(model.original).__name__} (model {i})" if len(self._models) > 1 else ""
            names.update((id(p), repr(name) + of) for name, p in model.original.named_parameters())
        held = enumerate(sent.held)
        said = [names.get(id(p), f"number {i} of shape {tuple(p.shape)}") for i, (p, _) in held]
        strangers = [name for name, (p, _) in zip(said, sent.held) if id(p) not in self._owner]
        steps = (p for _, p in sent.optimizer.parameters() if id(p) not in self._owner)
        strangers += [f"a parameter of shape {tuple(p.shape)}" for p in steps]
        mine = [(name, piece, total) for name, (_, piece), total in zip(said, sent.held, sent.sums.tolist())]
        seen = self._world.gather_objects((sent.options, strangers, mine))
        kind = type(sent.optimizer.given).__name__
        after = f"after update {sent.update} of {kind}"
        if there := first_difference([options for options, _, _ in seen]):
            raise WorldError(
                f"{after} the ranks' param groups differ: {odd_one_out(there)}. Set the same options on all ranks, by the same rule from "
                "the same numbers (a loss or metric averaged over the ranks: accelerator.reduce)"
            )
        unlike = self._unlike([numbers for _, _, numbers in seen])
        added = list(dict.fromkeys(name for _, names, _ in seen for name in names))
        if unlike:
            name, values = next(iter(unlike.items()))
            common = max(values.values(), key=list(values.values()).count)
            odd = [rank for rank, number in values.items() if number != common]
            others = [rank for rank, number in values.items() if number == common]
            cause = f"It was added after prepare(): {ADDED}" if name in added else CAUSES
            raise WorldError(
                f"{after} {_ranks(odd)} and {_ranks(others)} differ in parameter {_several(list(unlike))}, which must be the same. {cause}"
            )
        if added:
            raise WorldError(
                f"{kind} steps {_several(added)}, which belongs to no prepared model, so that no rank averages its gradients: {ADDED}"
            )

    def _unlike(self, seen: list[list[tuple[str, int, int]]]) -> dict[str, dict[int, int | None]]:
        """The parameters that differ: name → rank → checksum, None where a rank does not have it."""
        found: dict[tuple[str, int], dict[int, int | None]] = {}
        for rank, numbers in enumerate(seen):
            for name, piece, number in numbers:
                found.setdefault((name, piece), {})[rank] = number
        unlike = {name: ranks for (name, _), ranks in found.items() if len(set(ranks.values())) > 1}
        for (name, piece), ranks in found.items():
            if piece == WHOLE and len(ranks) < self._world.size:
                unlike.setdefault(name, dict.fromkeys(range(self._world.size)) | ranks)
        return unlike


def _ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{more}"


def _several(names: list[str]) -> str:
    return f"{names[0]} (and {len(names) - 1} more)" if len(names) > 1 else names[0]


# -- Comparison of objects when they are prepared


def compare_prepared(
    run: Run, objects: Sequence[Any], records: Sequence[Any], more: Sequence[str]
) -> list[int]:
    """Compare what the ranks prepare, dataclasses and further lines; returns the random seeds of all ranks."""
    plan, world = run.plan, run.world
    decided = {"precision": plan.precision, "strategy": plan.strategy, "accumulation": plan.accumulation}
    mine = [f"{name} {choice.value}" for name, choice in decided.items()]
    mine += _describe_record(plan.settings, MAY_DIFFER)
    mine += [line for record in records for line in _describe_record(record)]
    mine += [*(line for item in objects for line in _describe(item)), *more]
    digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
    seen = world.gather_objects((digest, torch.initial_seed()))
    if any(theirs != digest for theirs, _ in seen):
        there = first_difference(world.gather_objects(mine))
        raise WorldError(
            f"the ranks prepare different things: {odd_one_out(there)}. All ranks must build and prepare the same objects, with the "
            "same settings and hyperparameters"
        )
    return [seed for _, seed in seen]


def _describe(item: Any) -> Iterator[str]:
    """The facts of `item` that must be the same on all ranks, a line each."""
    kind = type(item).__name__
    yield kind
    if isinstance(item, nn.Module):
        for name, p in item.named_parameters():
            yield f"{kind}.{name} {tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
    elif isinstance(item, torch.optim.Optimizer):
        for g, group in enumerate(item.param_groups):
            yield f"{kind} group {g} with {len(group['params'])} parameters"
        yield from describe_options(item)
    elif hasattr(item, "dataset") and hasattr(item.dataset, "__len__"):
        sampler, drop_last = type(getattr(item, "sampler", None)).__name__, getattr(item, "drop_last", None)
        yield f"{kind} of {len(item.dataset)} samples, batch size {item.batch_size}"
        yield f"{kind} with a {sampler} and drop_last={drop_last}"
    elif type(item).__module__ == "torch.optim.lr_scheduler":
        yield from (f"{kind} {name}={_said(value)}" for name, value in vars(item).items() if name[0] != "_")


def describe_options(optimizer: torch.optim.Optimizer, wait: bool = True) -> Iterator[str]:
    """The options of each param group, a line each, save how the step runs; numbers on a device only with `wait`."""
    kind = type(getattr(optimizer, "given", optimizer)).__name__
    for g, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name not in ("params", "param_names", *IMPLEMENTATION):
                yield f"{kind} group {g} {name}={_said(value, wait)}"


def _describe_record(record: Any, without: set[str] | frozenset[str] = frozenset()) -> list[str]:
    """The fields of a dataclass, a line each."""
    names = (f.name for f in dataclasses.fields(record) if f.name not in without)
    return [f"{type(record).__name__} {name}={_said(getattr(record, name))}" for name in names]


def _said(value: Any, wait: bool = True) -> str:
    """Text by which ranks compare `value`; its type if it is not a plain value."""
    if isinstance(value, Tensor):
        known = value.numel() == 1 and (wait or value.device.type == "cpu")
        return repr(value.item()) if known else f"tensor {tuple(value.shape)}"
    if isinstance(value, (set, frozenset)):
        return f"[{', '.join(sorted(map(_said, value)))}]"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_said(v, wait) for v in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_said(k)}: {_said(v, wait)}' for k, v in value.items())}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}({', '.join(_describe_record(value))})"
    plain = value is None or isinstance(value, (bool, int, float, complex, str, Enum, torch.dtype, timedelta))
    return repr(value) if plain else getattr(value, "__qualname__", type(value).__qualname__)

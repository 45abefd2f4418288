"""Comparison of the ranks' parameters while they are trained, where they must be equal.

A checksum of the bits of each parameter, and a checksum of these, so that each rank sends a few numbers. They are sent
after an update and read after the next one, so nothing waits for the device. If ranks differ, they exchange the
checksums of single parameters.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.dtensor import local
from ..base.parts import Part
from ..distributed import first_difference, odd_one_out
from ..errors import WorldError, failing
from ..optim.torch_step import copies
from ..training.prepare import ADD_BEFORE_PREPARE
from ..training.state import describe_options

if TYPE_CHECKING:
    from ..optim.optimizer import PreparedOptimizer
    from ..settings import Settings

FIRST_UPDATES = 3  # updates that are compared one by one
CHUNK = 2**18  # elements that are summed at a time
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element
FACTOR = 0x5DEECE66D  # sums are multiplied by it before the next one is added
WHOLE = -1  # the shard number of a parameter that is not sharded
CAUSES = (
    "Likely causes: a parameter unfrozen after prepare(); training through another method than the model's call; "
    "weights changed on some ranks only; an optimizer that was not prepared; a step that rounds differently on the "
    "ranks (fused or foreach on some, unlike hardware or numbers of threads, non-deterministic operations). Where "
    "ranks are meant to train apart, use strategy='local_sgd', accelerator.no_sync() around the steps, or "
    "Settings(replica_check=0), which compares nothing"
)


class _Comparison(NamedTuple):
    """A pending comparison."""

    optimizer: PreparedOptimizer
    update: int
    parameters: list[tuple[Tensor, int]]  # those compared, each with the number of the shard that this rank holds
    options: list[str]
    checksums: Tensor  # of the parameters
    rows: Tensor  # a row a rank, once `work` is done and `event` has come
    work: Any
    event: Any


class Replicas(Part):
    """Compares parameters that prepared optimizers step, and their options; with the first also other parameters."""

    name = "replicas"

    def __init__(self, every: int) -> None:
        self._every = every  # updates from one comparison to the next, after the first ones
        self._updates: dict[int, int] = {}  # by id of an optimizer
        self._frozen: dict[int, list[Tensor]] = {}  # parameters that an optimizer's first update did not train
        self._number_of_parameters: dict[int, int] = {}
        self._pending: dict[int, _Comparison] = {}

    @classmethod
    def wanted(cls, settings: Settings) -> Replicas | None:
        return cls(settings.replica_check) if settings.replica_check else None

    def begin(self) -> None:
        if self.run.world.size == 1:
            self.run.parts.remove(self)

    def stepped(self, optimizer: PreparedOptimizer) -> None:
        strategy = self.run.prepared.strategy
        if self.run.window.ranks_differ or self.run.window.joining or not strategy.in_step(optimizer.optimizer):
            return
        key, number = id(optimizer), sum(len(group["params"]) for group in optimizer.param_groups)
        unfrozen = any(p.requires_grad for p in self._frozen.get(key, ()))
        if unfrozen or self._number_of_parameters.get(key) != number:
            self._updates.pop(key, None)  # compare the next updates, as the first ones
        if key not in self._updates:
            self._frozen[key] = [p for _, p in optimizer.parameters() if not p.requires_grad]
            self._number_of_parameters[key] = number
        updates = self._updates[key] = self._updates.get(key, 0) + 1
        self._read(key)
        if strategy.local_updates or updates <= FIRST_UPDATES or updates % self._every == 0:
            self._send(key, optimizer)

    def saving(self, call: str, path: str | None) -> None:
        self._read_all()

    def close(self) -> None:
        if not failing():
            self._read_all()

    def released(self) -> None:
        for table in (self._updates, self._frozen, self._pending):
            table.clear()

    def _read_all(self) -> None:
        """Read the pending comparisons; a WorldError where the ranks differ."""
        for key in list(self._pending):
            self._read(key)

    # -- checksums

    @torch.no_grad()
    def _send(self, key: int, optimizer: PreparedOptimizer) -> None:
        world, prepared = self.run.world, self.run.prepared
        parameters = [p for _, p in optimizer.parameters()]
        strangers = sum(id(p) not in prepared.owner for p in parameters)
        if optimizer is prepared.optimizers[0]:
            stepped = {id(p) for other in prepared.optimizers for _, p in other.parameters()}
            parameters += [p for model in prepared.models for p in model.original.parameters() if id(p) not in stepped]
        shards = [(p, number) for p in parameters if (number := self._shard_number(p)) is not None]
        shards.sort(key=lambda shard: shard[1] != WHOLE)
        whole_count = sum(number == WHOLE for _, number in shards)
        options = list(describe_options(optimizer, wait=False))
        digest = int.from_bytes(hashlib.sha256("\n".join(options).encode()).digest()[:8], "big", signed=True)
        row = torch.tensor([digest, strangers, shards[-1][1] if shards else WHOLE, 0, 0])
        row = row.to(world.device, non_blocking=True)
        checksums = row[:0]
        if shards:
            checksums = torch.stack([checksum(local(p)).to(world.device) for p, _ in shards])
        row[3], row[4] = fold(checksums[:whole_count]), fold(checksums[whole_count:])
        rows, event = row.new_empty(world.size, len(row)), None
        with world.explained("the comparison of replicas"):
            work = dist.all_gather(list(rows.unbind()), row, async_op=True)
            if world.device.type != "cpu":
                work.wait()  # of the device's queue, not of the host
                rows = rows.to("cpu", non_blocking=True)
                event = torch.Event(world.device)
                event.record()
        self._pending[key] = _Comparison(optimizer, optimizer.updates, shards, options, checksums, rows, work, event)

    def _shard_number(self, parameter: Any) -> int | None:
        """The number of this rank's shard of `parameter`; None if no other rank has the same shard."""
        placements = getattr(parameter, "placements", None)
        own = placements is None and not self.run.prepared.strategy.replicated
        if parameter.is_meta or own or copies(parameter, self.run.world.size) == 1:
            return None
        if type(local(parameter)).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return None  # a subclass that keeps its values in its own way
        number = WHOLE
        for dim, placement in enumerate(placements or ()):
            if not placement.is_replicate():
                mesh = parameter.device_mesh
                number = max(number, 0) * mesh.size(dim) + mesh.get_local_rank(dim)
        return number

    def _read(self, key: int) -> None:
        """Wait for this optimizer's comparison, if one is under way, and explain a difference on all ranks together."""
        comparison = self._pending.pop(key, None)
        if comparison is None:
            return
        with self.run.world.explained("the comparison of replicas"):
            comparison.work.wait()
            if comparison.event is not None:
                comparison.event.synchronize()
        rows: list[list[int]] = comparison.rows.tolist()
        sum_of_shard: dict[int, int] = {}
        for digest, strangers, shard, whole_sum, shard_sum in rows:
            equal = (digest, whole_sum) == (rows[0][0], rows[0][3])
            if strangers or not equal or sum_of_shard.setdefault(shard, shard_sum) != shard_sum:
                self._explain(comparison)
                return

    # -- a difference

    def _explain(self, comparison: _Comparison) -> None:
        """Raise a WorldError with the first difference; a collective."""
        prepared, names = self.run.prepared, dict[int, str]()
        for i, model in enumerate(prepared.models):
            of = f" of {type(model.original).__name__} (model {i})" if len(prepared.models) > 1 else ""
            names.update((id(p), repr(name) + of) for name, p in model.original.named_parameters())
        parameters = comparison.parameters
        labels = [names.get(id(p), f"number {i} of shape {tuple(p.shape)}") for i, (p, _) in enumerate(parameters)]
        strangers = [label for label, (p, _) in zip(labels, parameters) if id(p) not in prepared.owner]
        stepped = (p for _, p in comparison.optimizer.parameters() if id(p) not in prepared.owner)
        strangers += [f"a parameter of shape {tuple(p.shape)}" for p in stepped]
        sums = list(zip(labels, (number for _, number in parameters), comparison.checksums.tolist()))
        facts_by_rank = self.run.world.gather_objects((comparison.options, strangers, sums))
        kind = type(comparison.optimizer.given).__name__
        moment = f"after update {comparison.update} of {kind}"
        if difference := first_difference([options for options, _, _ in facts_by_rank]):
            raise WorldError(
                f"{moment} the ranks' param groups differ: {odd_one_out(difference)}. Set the same options on all "
                "ranks, by the same "
                "rule from the same numbers (a loss or metric averaged over the ranks: accelerator.reduce)"
            )
        unequal = self._unequal([sums for _, _, sums in facts_by_rank])
        added = list(dict.fromkeys(name for _, names, _ in facts_by_rank for name in names))
        if unequal:
            name, sum_by_rank = next(iter(unequal.items()))
            usual = max(sum_by_rank.values(), key=list(sum_by_rank.values()).count)
            odd = [rank for rank, total in sum_by_rank.items() if total != usual]
            equal = [rank for rank, total in sum_by_rank.items() if total == usual]
            cause = f"It was added after prepare(): {ADD_BEFORE_PREPARE}" if name in added else CAUSES
            raise WorldError(
                f"{moment} {_ranks(odd)} and {_ranks(equal)} differ in parameter {_names(list(unequal))}, which must "
                f"be the same. {cause}"
            )
        if added:
            raise WorldError(
                f"{kind} steps {_names(added)}, which belongs to no prepared model, so that no rank averages its "
                f"gradients: {ADD_BEFORE_PREPARE}"
            )

    def _unequal(self, sums_by_rank: list[list[tuple[str, int, int]]]) -> dict[str, dict[int, int | None]]:
        """The parameters that differ: name → rank → checksum, None where a rank does not have it."""
        sums: dict[tuple[str, int], dict[int, int | None]] = {}
        for rank, rows in enumerate(sums_by_rank):
            for name, shard, total in rows:
                sums.setdefault((name, shard), {})[rank] = total
        unequal = {name: by_rank for (name, _), by_rank in sums.items() if len(set(by_rank.values())) > 1}
        for (name, shard), by_rank in sums.items():
            if shard == WHOLE and len(by_rank) < self.run.world.size:
                unequal.setdefault(name, dict.fromkeys(range(self.run.world.size)) | by_rank)
        return unequal


def checksum(tensor: Tensor) -> Tensor:
    """A checksum (int64) of the bits of `tensor`. It depends on the order of the elements."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    total = torch.ones((), dtype=torch.int64, device=tensor.device)
    for chunk in values.detach().view(INTEGERS[values.element_size()]).reshape(-1).split(CHUNK):
        total = total * FACTOR + fold(chunk)
    return total


def fold(numbers: Tensor) -> Tensor:
    weights = torch.arange(1, 2 * len(numbers) + 1, 2, device=numbers.device)  # odd, and none is kept
    return weights.mul_(numbers.to(torch.int64)).sum()


def _ranks(ranks: list[int]) -> str:
    remaining = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{remaining}"


def _names(names: list[str]) -> str:
    return f"{names[0]} (and {len(names) - 1} more)" if len(names) > 1 else names[0]

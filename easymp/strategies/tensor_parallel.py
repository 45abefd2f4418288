"""tensor_parallel: layers are split over the ranks of a group, which compute each batch together; groups share the data by fsdp.

On torch's DTensor and `parallelize_module`. A Linear that is "colwise" holds some of the rows of its weight, so that each rank computes
some of the output features; one that is "rowwise" takes those as its input, and the ranks' products are summed. Such a pair needs one
all-reduce, in the place of one output gathered a layer. Which layers go together only the model's author knows: that is the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base.dtensor import local
from ..base.rebinding import names_of, rebind
from ..distributed import World
from ..errors import PrepareError, RefusedError, SettingError, StepError
from ..optim.elementwise import check_sums
from ..optim.hooks import indifferent
from ..optim.norms import values
from ..protocols import Counting, Facts, Layout, Manner, Refusal
from .fsdp import (
    FSDPOptions,
    Released,
    Sharded,
    check_shardable,
    find_groups,
    one_by_one,
    shard,
    shards_of,
    take_rank_0s,
)
from .norms import clip_to_norm, counting, settle
from .tensor_plan import apply, read_plan, split_dims


@dataclass(frozen=True)
class TensorParallelOptions:
    """Options of strategy "tensor_parallel".

    A fused projection (queries, keys and values in one Linear) must not be "colwise": each rank would get a run of its output
    features, the first one all queries and some of the keys, and what the model then takes for queries, keys and values are others.
    Nothing fails, and the numbers are wrong. Say "colwise_rep" for it, or make three Linears of it.

    Attributes:
        plan: patterns (as `fnmatch`, so that * stands for dots, too) of module names → how these modules are split; the first pattern
            that matches a module counts. None: the model's own plan (`tp_plan` or `_tp_plan`, as Hugging Face's models have),
            else every plain nn.Linear and nn.Embedding with its output gathered, which is right without knowing the model's forward.

            - "colwise": output features are split, and each rank passes its part on;
            - "colwise_rep": the same, with the output gathered;
            - "rowwise": input features are split, as "colwise" left them, and outputs are summed; of an embedding, its words;
            - "rowwise_rep": the same, for an input that is whole;
            - "sequence": a norm or dropout that sees a piece of the sequence;
            - "sequence_split": a module whose first input is whole, of which it shall see this rank's piece of the sequence;
            - "replicated_with_grad_allreduce": a norm between "colwise" and "rowwise", as on heads: its gradients are summed;
            - "replicate": nothing is done;
            - a `torch.distributed.tensor.parallel.ParallelStyle`.

            Hugging Face's further words for the same are understood: "colwise_gather_output", "rowwise_split_input",
            "embedding_rowwise", "sequence_parallel".
        size: ranks of a group, neighbours, which see the same data; divides the number of processes. None: all of them.
        sequence_parallel: between "rowwise" and "colwise" each rank holds a piece of the sequence, dimension 1 of (batch, sequence,
            features), whose length `size` must divide: outputs of "rowwise" layers and embeddings are cut, inputs of "colwise" layers
            gathered. The plan names every layer with trainable parameters.
        fsdp: how the groups shard what a rank holds, where there are several groups.
    """

    plan: Mapping[str, Any] | None = None
    size: int | None = None
    sequence_parallel: bool = False
    fsdp: FSDPOptions = field(default_factory=FSDPOptions)

    def __post_init__(self) -> None:
        if self.plan is not None and not (
            isinstance(self.plan, Mapping) and self.plan and all(isinstance(name, str) for name in self.plan)
        ):
            raise SettingError(
                f"plan={self.plan!r} is no mapping of module names to styles, such as {{'blocks.*.up': 'colwise'}}"
            )
        if self.size is not None and (
            not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 2
        ):
            raise SettingError(
                f"size={self.size!r} is not a number of ranks of at least 2: a group of one splits nothing"
            )
        if not isinstance(self.sequence_parallel, bool):
            raise SettingError(f"sequence_parallel={self.sequence_parallel!r} is neither True nor False")
        if isinstance(self.fsdp, Mapping):
            object.__setattr__(self, "fsdp", FSDPOptions(**self.fsdp))
        if not isinstance(self.fsdp, FSDPOptions):
            raise SettingError(f"fsdp={self.fsdp!r} is neither an FSDPOptions nor a dict of its fields")
        if self.fsdp.ignore:
            raise SettingError(
                f"fsdp.ignore={self.fsdp.ignore!r}: under tensor_parallel the groups shard all that a rank holds. Leave it out, or use "
                "strategy='fsdp'"
            )


class TensorParallel:
    """torch's `parallelize_module` on the modules that the plan names; `fully_shard` over the groups, where there are several.

    In place, by torch: the parameters of these modules become DTensors; hooks that hand inputs and outputs over are registered on the
    modules, and the attribute ``_distribute_module_applied`` is set on them. In place, by us: parameters and buffers take rank 0's
    values first, tied parameters are tied again, gradients get the layout of their parameters as soon as they are there,
    and the optimizers of the same `prepare` take the new parameters. With several groups, all that fsdp does, too.

    Parameters that the plan does not name are whole and plain on each rank of a group. Their gradients are alike on all of them, since
    all compute the same: batches, buffers and dropout are a group's. The first step of each optimizer checks that.
    Under sequence parallelism, and between "colwise" and "rowwise", ranks drop the same places of different pieces.

    Layers must be called with their input as a positional argument. After the run is closed the model keeps its shards and can no
    longer be called.
    """

    name: ClassVar[str] = "tensor_parallel"
    Options: ClassVar[type] = TensorParallelOptions
    whole: ClassVar[bool] = False
    apart: ClassVar[bool] = False
    alike: ClassVar[bool] = True
    masters: ClassVar[bool] = True
    sharded: ClassVar[bool] = False
    once = (
        "under tensor_parallel torch's DTensor keeps no graph of a backward. Use strategy='ddp', or a loss without the gradient of a "
        "gradient"
    )
    only_forward = ""

    def __init__(self, world: World, options: TensorParallelOptions) -> None:
        self._size = world.size if options.size is None else options.size
        if world.size % self._size:
            fit = [n for n in range(2, world.size + 1) if world.size % n == 0]
            raise SettingError(
                f"size={self._size} does not divide {world.size} processes into groups of tensor parallelism: use one of {fit}"
            )
        self.data_rank, self.data_size = world.rank // self._size, world.size // self._size
        self.sums = self.data_size == 1  # where groups share the data, fsdp keeps its own
        self._world = world
        self.options = options
        self.early = options.fsdp.reduce_every_micro_batch if self.data_size > 1 else False
        self._grid: Any = None
        self._names: dict[int, str] = {}  # of parameters, by id, for messages

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        if facts.world_size == 1:
            return Refusal(
                "strategy 'tensor_parallel' splits layers over processes, and there is one",
                "start several (`easymp launch --processes N script.py`), or use 'auto'",
            )
        return None

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        width = options.size or size
        groups = max(size // width, 1)
        dims = split_dims(read_plan(model, options.plan, width, options.sequence_parallel))

        def held(parameter: Tensor, over: int) -> int:
            shape = list(parameter.shape)
            dim = dims.get(id(parameter))
            if dim is not None:
                shape[dim] = -(-shape[dim] // width)
            if shape and over > 1:
                shape[0] = -(-shape[0] // over)
            return math.prod(shape)

        def of_a_group(name: str, parameter: Tensor) -> int:
            return held(parameter, 1)

        def of_a_rank(name: str, parameter: Tensor) -> int:
            return held(parameter, groups)

        if groups == 1:
            return Layout(of_a_group, of_a_group, of_a_group, of_a_group)
        inner = shards_of(model, options.fsdp, groups)
        everything = sum(p.numel() for p in model.parameters()) or 1
        share = sum(held(p, 1) for p in model.parameters()) / everything
        return Layout(
            of_a_rank,
            of_a_rank,
            of_a_rank,
            of_a_group,
            gathers=True,
            gathered=math.ceil(inner.gathered * share),
            unreduced=math.ceil(inner.unreduced * share),
            reducing=math.ceil(inner.reducing * share),
            note="what is gathered and reduced counts as split in the proportion of the whole model",
        )

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        group: dist.ProcessGroup = self._mesh()["data"].get_group()
        return group

    def _mesh(self) -> Any:
        """All ranks as a grid: rows see different data, ranks of a row split layers."""
        # Imported here: half a second that other strategies need not pay.
        from torch.distributed.device_mesh import init_device_mesh

        if self._grid is None:
            shape = (self.data_size, self._size)
            self._grid = init_device_mesh(self._world.device.type, shape, mesh_dim_names=("data", "tensor"))
        return self._grid

    def wrap(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], manner: Manner
    ) -> nn.Module:
        names = names_of(model, optimizers)
        _check_whole(model)
        if self.data_size > 1:
            check_shardable(model)
        policy, options = manner.policy, self.options
        policy.decide(model)
        model = policy.convert(model)
        parts = read_plan(model, options.plan, self._size, options.sequence_parallel)
        if manner.place:
            model.to(self._world.device)
            rebind(model, optimizers, names)  # where torch is told to swap parameters when they move
            names = names_of(model, optimizers)
        take_rank_0s(model, self._world)
        tied = _shared(model)
        for part in parts:
            apply(part, self._mesh()["tensor"], options.sequence_parallel)
        _tie(tied)
        pieces: list[Any] = []
        if self.data_size > 1:
            for group in find_groups(model, options.fsdp.wrap):
                pieces += shard(
                    group, self._mesh()["data"], options.fsdp, self._world.device, gather=policy.gather
                )
        else:
            for parameter in model.parameters():
                if hasattr(parameter, "to_local"):  # fsdp does this by itself
                    trained = parameter.requires_grad
                    parameter.requires_grad_(
                        True
                    )  # torch takes no hook for one that is frozen now, and may not always be
                    parameter.register_post_accumulate_grad_hook(settle)
                    parameter.requires_grad_(trained)
        rebind(model, optimizers, names)
        self._names.update((id(p), name) for name, p in model.named_parameters())
        module = policy.forward(model, self._world.device)
        manner.compile(module)
        split = Split(module)
        if not pieces:
            return split
        sharded = Sharded(split, model, pieces, self._world, options.fsdp, gather=policy.gather)
        sharded.early = bool(self.early)
        return sharded

    def spread(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        check_sums(optimizer, self.name)

        def compare(*_: Any) -> None:
            if self._agree(optimizer):
                first.remove()

        one_by_one(optimizer, "split", "unsplit")
        indifferent.add(compare)
        first = optimizer.register_step_pre_hook(compare)
        return optimizer

    def _agree(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether gradients of what each rank of a group holds whole are alike in the group; False where nothing can be said yet.

        A plan that leaves out a layer which sees a part only (a norm on this rank's heads) fails in no other way: the ranks drift apart.

        Raises:
            StepError: they differ.
        """
        held = [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and not _is_split(p)
        ]
        if not held:
            return False
        grads = [values(local(p.grad.detach())).double() for p in held]
        sizes = [torch.linalg.vector_norm(grad) for grad in grads]
        sums = [grad.sum() for grad in grads]
        mine = torch.stack([*sizes, *sums]).to(self._world.device)
        every = self._world.gather(mine[None])
        if not every.isfinite().all():
            return False  # an overflow, whose step is skipped
        group = every[self.data_rank * self._size : (self.data_rank + 1) * self._size]
        apart = (group.amax(0) - group.amin(0)).view(2, -1).amax(0)
        # Rounding, and another order of additions on a GPU, are far below; parts of a sum are not.
        scale = group[:, : len(held)].amax(0)
        several = torch.tensor([p.grad.numel() for p in held], device=scale.device).double().sqrt()
        for parameter, wrong in zip(held, (apart > 0.01 * scale * several).tolist()):
            if wrong:
                raise StepError(
                    f"the ranks of a group have different gradients for {self._names.get(id(parameter), 'a parameter')!r}, which each of "
                    "them holds whole: it acts on a part of the features or of the sequence. Say 'replicated_with_grad_allreduce' for "
                    "its layer in the plan (or 'sequence', under sequence parallelism)"
                )
        return True

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with _reducing(model, False):
            yield

    @contextmanager
    def force_sync(self, model: nn.Module) -> Iterator[None]:
        with _reducing(model, True):
            yield

    def average(self, models: Sequence[nn.Module], gradients: Sequence[Tensor]) -> None:
        pass  # all ranks of the one group have seen the same data

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        raise RefusedError(
            "strategy 'tensor_parallel' cannot join uneven inputs: every rank's forward needs the other ranks' parts. Keep "
            "even_batches=True, or use strategy='ddp'"
        )

    @property
    def counting(self) -> Counting:
        return counting(self._world)

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        return clip_to_norm(parameters, max_norm, norm_type, self._world)

    def release(self, model: nn.Module, alone: nn.Module) -> nn.Module:
        return Released()


class Split(nn.Module):
    """Calls the model, and explains what goes wrong among layouts."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.module(*args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise StepError(
                "the model computes with a parameter that is split, outside of the layer that holds it (as F.linear(x, layer.weight) "
                "does): say 'replicate' for that layer in the plan of tensor parallelism, before the pattern that splits it. torch "
                f"said: {error}"
            ) from error


@contextmanager
def _reducing(model: nn.Module, wanted: bool) -> Iterator[None]:
    """With one group there is nothing to reduce over the data: all ranks have seen it."""
    if isinstance(model, Sharded):
        with model.reducing(wanted):
            yield
    else:
        yield


def _check_whole(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local"):
            raise PrepareError(
                f"parameter {name!r} is sharded already, by an earlier run or by hand: build the model anew"
            )


def _is_split(parameter: Any) -> bool:
    """Whether the ranks of a group hold different parts of it."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or "tensor" not in (mesh.mesh_dim_names or ()):
        return False
    return not parameter.placements[mesh.mesh_dim_names.index("tensor")].is_replicate()


Place = tuple[nn.Module, str]


def _shared(model: nn.Module) -> list[list[Place]]:
    """Where each parameter lies that lies in several places."""
    places: dict[int, list[Place]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, attribute))
    return [found for found in places.values() if len(found) > 1]


def _tie(tied: Sequence[Sequence[Place]]) -> None:
    for (module, attribute), *others in tied:
        first: Any = module._parameters[attribute]
        for other, name in others:
            theirs: Any = other._parameters[name]
            if theirs is first:
                continue
            if getattr(theirs, "placements", None) != getattr(first, "placements", None):
                raise PrepareError(
                    f"the plan splits a parameter shared by a {type(module).__name__} and a {type(other).__name__} differently: give both "
                    "styles that split it alike"
                )
            other._parameters[name] = first

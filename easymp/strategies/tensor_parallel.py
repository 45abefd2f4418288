"""tensor_parallel: layers are split over the ranks of a group, which compute each batch together; groups share the data by fsdp.

On torch's DTensor and `parallelize_module`. A Linear that is "colwise" holds some of the rows of its weight, so that each rank computes
some of the output features; one that is "rowwise" takes those as its input, and the ranks' products are summed. Such a pair needs one
all-reduce, instead of a gathered output for each layer. The plan says which layers go together, which only the model's author knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.dtensor import local, names_of, rebind
from ..distributed import World
from ..errors import BatchError, PrepareError, RefusedError, SettingError, StepError, nearest
from ..optim.sharded import check_sums
from ..optim.torch_step import indifferent, values
from ..options import check_fields
from ..protocols import Layout, WrapContext
from .blocks import ATOMS, refuse_sharded
from .fsdp import (
    FSDPOptions,
    Sharded,
    check_shardable,
    find_groups,
    one_by_one,
    refuse_without_cuda,
    shard,
    shards_of,
)
from .single import Framed, Released, Spread, hook_gradient, settle, take_rank_0s


@dataclass(frozen=True)
class TensorParallelOptions:
    """Options of strategy "tensor_parallel".

    A fused projection (queries, keys and values in one Linear) must not be "colwise": the first rank would get all queries and some of
    the keys, and nothing fails, but the numbers are wrong. Say "colwise_rep" for it, or make three Linears of it.

    Attributes:
        plan: patterns of module names (`fnmatch`: * matches dots, too) → how these modules are split; the first pattern
            that matches a module counts. None: the model's own plan (`tp_plan` or `_tp_plan`, as Hugging Face's models have),
            else every plain nn.Linear and nn.Embedding with its output gathered, which is right for any forward.

            - "colwise": output features are split, and each rank passes its part on;
            - "colwise_rep": the same, with the output gathered;
            - "rowwise": input features are split, as "colwise" left them, and outputs are summed; of an embedding, its words;
            - "rowwise_rep": the same, for an input that is whole;
            - "sequence": a norm or dropout that gets a piece of the sequence;
            - "sequence_split": a module whose first input is whole, and cut to this rank's piece of the sequence;
            - "replicated_with_grad_allreduce": a norm between "colwise" and "rowwise", as on heads: its gradients are summed;
            - "replicate": the module stays as it is;
            - a `torch.distributed.tensor.parallel.ParallelStyle`.

            Hugging Face's other words for these are understood: "colwise_gather_output", "rowwise_split_input",
            "embedding_rowwise", "sequence_parallel".
        size: ranks of a group, neighbours, which see the same data; divides the number of processes. None: all of them.
        sequence_parallel: between "rowwise" and "colwise" each rank holds a piece of the sequence, dimension 1 of (batch, sequence,
            features), whose length `size` must divide: outputs of "rowwise" layers and embeddings are cut, inputs of "colwise" layers
            gathered. The plan names every layer with trainable parameters.
        async_tensor_parallel: overlap the collectives of sequence parallelism with the matrix products beside them, in torch.compile's
            kernels. On CUDA only, with ``compile="model"`` or ``"blocks"``.
        fsdp: how several groups shard the parameters that a rank holds.

    Raises:
        SettingError: a value of another type, or `async_tensor_parallel` without `sequence_parallel`.

    Example:
        >>> options = TensorParallelOptions(plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, size=8)
    """

    plan: Mapping[str, Any] | None = None
    size: int | None = field(default=None, metadata={"least": 2})
    sequence_parallel: bool = False
    async_tensor_parallel: bool = False
    fsdp: FSDPOptions = field(default_factory=FSDPOptions)

    def __post_init__(self) -> None:
        plan = self.plan
        named = isinstance(plan, Mapping) and plan and all(isinstance(name, str) for name in plan)
        if plan is not None and not named:
            raise SettingError(
                f"plan={plan!r} is not a mapping of module names to styles, as {{'blocks.*.up': 'colwise'}}"
            )
        check_fields(self)
        if self.async_tensor_parallel and not self.sequence_parallel:
            raise SettingError(
                "async_tensor_parallel=True overlaps the collectives of sequence parallelism: pass sequence_parallel=True, too"
            )
        if isinstance(self.fsdp, Mapping):
            object.__setattr__(self, "fsdp", FSDPOptions(**self.fsdp))
        if not isinstance(self.fsdp, FSDPOptions):
            raise SettingError(f"fsdp={self.fsdp!r} is neither an FSDPOptions nor a dict of its fields")
        if self.fsdp.ignore:
            raise SettingError(
                f"fsdp.ignore={self.fsdp.ignore!r}: tensor_parallel shards all that a rank holds. Leave it out, or use strategy='fsdp'"
            )


class TensorParallel(Spread):
    """torch's `parallelize_module` on the modules that the plan names; `fully_shard` over the groups, where there are several.

    In place, by torch: the parameters of these modules become DTensors; hooks that convert inputs and outputs are registered on the
    modules, and the attribute ``_distribute_module_applied`` is set on them. In place, by us: parameters and buffers take rank 0's
    values first, tied parameters are tied again, gradients get the layout of their parameters as soon as they are computed,
    and the optimizers of the same `prepare` take the new parameters. With several groups, all that fsdp does, too.

    Parameters that the plan does not name are whole and plain on each rank of a group. Their gradients are equal on all of them, since
    all compute the same: batches, buffers and dropout are a group's. The first step of each optimizer checks that.
    Under sequence parallelism, and between "colwise" and "rowwise", ranks drop the same places of different pieces.

    Layers must be called with their input as a positional argument. After the run is closed the model keeps its shards and can no
    longer be called.
    """

    name: ClassVar[str] = "tensor_parallel"
    traffic = None
    several: ClassVar[str] = "splits layers over processes"
    no_join: ClassVar[str] = "every rank's forward needs the other ranks' parts"
    Options: ClassVar[type] = TensorParallelOptions
    splits_layers: ClassVar[bool] = True
    no_offload = "keeps activations as DTensors, which hooks of autograd do not copy"
    no_step_in_backward = "compares the gradients of all whole parameters before the first step"
    no_double_backward = (
        "under tensor_parallel torch's DTensor keeps no graph of a backward. Use strategy='ddp', or a loss without the gradient of a "
        "gradient"
    )

    def __init__(self, world: World, options: TensorParallelOptions) -> None:
        super().__init__(world, options)
        self._size = options.size or world.size
        if world.size % self._size:
            fit = [n for n in range(2, world.size + 1) if world.size % n == 0]
            raise SettingError(
                f"size={self._size} does not divide {world.size} processes into groups of tensor parallelism: use one of {fit}"
            )
        if options.fsdp.context_parallel != 1:
            raise RefusedError(
                "context_parallel is not joined with strategy 'tensor_parallel': use strategy 'fsdp'"
            )
        if options.async_tensor_parallel:
            refuse_without_cuda("async_tensor_parallel", world.device)
        if options.fsdp.symmetric_memory:
            refuse_without_cuda("fsdp.symmetric_memory", world.device)
        self.data_rank, self.data_size = world.rank // self._size, world.size // self._size
        self.sums = self.data_size == 1  # where groups share the data, fsdp keeps its own
        self.reduces_each = options.fsdp.reduce_every_micro_batch if self.data_size > 1 else False
        self._grid: Any = None
        self._names: dict[int, str] = {}  # of parameters, by id, for messages
        self._overlapped: bool | None = None  # inductor's flag before `async_tensor_parallel` changed it

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        width = options.size or size
        groups = max(size // width, 1)
        dims = split_dims(read_plan(model, options.plan, width, options.sequence_parallel))

        def held(over: int, name: str, parameter: Tensor) -> int:
            shape = list(parameter.shape)
            dim = dims.get(id(parameter))
            if dim is not None:
                shape[dim] = -(-shape[dim] // width)
            if shape:
                shape[0] = -(-shape[0] // over)
            return math.prod(shape)

        group, rank = partial(held, 1), partial(held, groups)
        if groups == 1:
            return Layout(group, group, group, group)
        inner = shards_of(model, options.fsdp, groups)
        everything = sum(p.numel() for p in model.parameters()) or 1
        share = sum(group("", p) for p in model.parameters()) / everything
        return Layout(
            *(rank, rank, rank, group),
            gathers=True,
            gathered=math.ceil(inner.gathered * share),
            unreduced=math.ceil(inner.unreduced * share),
            reducing=math.ceil(inner.reducing * share),
            note="gathered and reduced parts are counted in the proportion in which the whole model is split",
        )

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        group: dist.ProcessGroup = self._mesh()["data"].get_group()
        return group

    def _mesh(self) -> Any:
        """All ranks as a grid: rows see different data, ranks of a row split layers."""
        if self._grid is None:
            from torch.distributed.device_mesh import init_device_mesh  # here: it takes half a second

            shape = (self.data_size, self._size)
            self._grid = init_device_mesh(self._world.device.type, shape, mesh_dim_names=("data", "tensor"))
        return self._grid

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer], context: WrapContext) -> nn.Module:
        names = names_of(model, optimizers)
        refuse_sharded(model)
        if self.data_size > 1:
            check_shardable(model)
        policy, options = context.policy, self.options
        if options.async_tensor_parallel:
            self._overlap(context.compiled)
        policy.decide(model)
        model = policy.convert(model)
        parts = read_plan(model, options.plan, self._size, options.sequence_parallel)
        if context.place:
            model.to(self._world.device)
            rebind(model, optimizers, names)  # where torch is told to swap parameters when they move
            names = names_of(model, optimizers)
        take_rank_0s(model, self._world)
        tied = [found for found in holders(model).values() if len(found) > 1]
        for part in parts:
            apply(part, self._mesh()["tensor"], options.sequence_parallel)
        _tie(tied)
        gathered_parts: list[Any] = []
        if self.data_size > 1:
            for group in find_groups(model, options.fsdp.wrap):
                shard(group, self._mesh()["data"], options.fsdp, self._world.device, gather=policy.gather)
                gathered_parts += group
        else:
            for parameter in model.parameters():
                if hasattr(parameter, "to_local"):  # fsdp does this by itself
                    hook_gradient(parameter, settle)
        rebind(model, optimizers, names)
        self._names.update((id(p), name) for name, p in model.named_parameters())
        module = policy.forward(model, self._world.device)
        context.compile(module)
        split = Split(module)
        if not gathered_parts:
            return split
        sharded = Sharded(split, model, gathered_parts, self._world, options.fsdp, gather=policy.gather)
        sharded.early = bool(self.reduces_each)
        return sharded

    def _overlap(self, compiled: bool) -> None:
        """Switch on torch.compile's pass that fuses collectives with matrix products, for this run's group."""
        if not compiled:
            raise RefusedError(
                "async_tensor_parallel=True is a pass of torch.compile, and this run compiles nothing: leave it out, or compile='blocks'"
            )
        # Imported here: both are slow.
        import torch._inductor.config as inductor
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        if self._overlapped is None:  # else by another model
            self._overlapped = inductor._micro_pipeline_tp
        inductor._micro_pipeline_tp = True
        enable_symm_mem_for_group(self._mesh()["tensor"].get_group().group_name)

    def spread(self, optimizer: Optimizer) -> Optimizer:
        check_sums(optimizer, self.name)

        def compare(*_: Any) -> None:
            if self._compared(optimizer):
                first.remove()

        one_by_one(optimizer, "split", "unsplit")
        indifferent.add(compare)
        first = optimizer.register_step_pre_hook(compare)
        return optimizer

    def _compared(self, optimizer: Optimizer) -> bool:
        """Compare gradients of whole parameters inside the group; False where there are none, or after an overflow.

        Without this, a plan that leaves out a layer on a part of the features (a norm on this rank's heads) lets the ranks drift apart.
        """
        every = [p for group in optimizer.param_groups for p in group["params"]]
        held = [p for p in every if p.grad is not None and not _is_split(p)]
        if not held:
            return False
        grads = [values(local(p.grad.detach())).double() for p in held]
        facts = [*map(torch.linalg.vector_norm, grads), *(grad.sum() for grad in grads)]
        seen = self._world.gather(torch.stack(facts).to(self._world.device)[None])
        if not seen.isfinite().all():
            return False
        group = seen[self.data_rank * self._size : (self.data_rank + 1) * self._size]
        spread = (group.amax(0) - group.amin(0)).view(2, -1).amax(0)
        # Far above rounding and the order of additions on a GPU, and far below the difference of partial sums.
        scale = group[:, : len(held)].amax(0)
        root = torch.tensor([p.grad.numel() for p in held], device=scale.device).double().sqrt()
        for parameter, wrong in zip(held, (spread > 0.01 * scale * root).tolist()):
            if wrong:
                raise StepError(
                    f"the ranks of a group have different gradients for {self._names.get(id(parameter), 'a parameter')!r}, which each of "
                    "them holds whole: it acts on a part of the features or of the sequence. Say 'replicated_with_grad_allreduce' for "
                    "its layer in the plan (or 'sequence', under sequence parallelism)"
                )
        return True

    def drop(self, model: nn.Module, parameters: Callable[[], set[int]]) -> None:
        if isinstance(model, Sharded):
            model.drop(parameters)

    def release(self, model: nn.Module, alone: nn.Module) -> nn.Module:
        if self._overlapped is not None:
            import torch._inductor.config as inductor

            inductor._micro_pipeline_tp, self._overlapped = self._overlapped, None
        return Released("this model's parameters are shards")


class Split(Framed):
    """Calls the model, and explains an error of mixed layouts."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.module(*args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise StepError(
                "the model computes with a split parameter outside of the layer that holds it (as F.linear(x, layer.weight) does): "
                f"say 'replicate' for it in the plan, before the pattern that splits it. torch said: {error}"
            ) from error


def _is_split(parameter: Any) -> bool:
    """Whether the ranks of a group hold different parts of it."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or "tensor" not in (mesh.mesh_dim_names or ()):
        return False
    return not parameter.placements[mesh.mesh_dim_names.index("tensor")].is_replicate()


Place = tuple[nn.Module, str]


def holders(model: nn.Module) -> dict[int, list[Place]]:
    """id of each parameter → the modules and attributes that hold it."""
    places: dict[int, list[Place]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, attribute))
    return places


def _tie(tied: Sequence[Sequence[Place]]) -> None:
    for (module, attribute), *others in tied:
        first: Any = module._parameters[attribute]
        for other, name in others:
            theirs: Any = other._parameters[name]
            if getattr(theirs, "placements", None) != getattr(first, "placements", None):
                raise PrepareError(
                    f"the plan splits a parameter shared by a {type(module).__name__} and a {type(other).__name__} unlike: split it alike"
                )
            other._parameters[name] = first


# -- the plan: which modules are split, and how, read before anything is changed ---------------------------------------


SEQUENCE_DIM = 1  # of (batch, sequence, features)
SPLIT_MODULES = (nn.Linear, nn.Embedding)
SPLITTING = ("colwise", "colwise_rep", "rowwise", "rowwise_rep")
WORDS = (*SPLITTING, "sequence", "sequence_split", "replicated_with_grad_allreduce", "replicate")
ALIASES = {
    "colwise_gather_output": "colwise_rep",
    "rowwise_split_input": "rowwise_rep",
    "embedding_rowwise": "rowwise_rep",
    "sequence_parallel": "sequence",
}


@dataclass(frozen=True, eq=False)
class Part:
    """A module, and how it is split: a word, or one of torch's ParallelStyle objects."""

    name: str
    module: nn.Module
    how: Any

    def dim(self, attribute: str) -> int | None:
        """The dimension along which a parameter of the module is split; None: it is whole."""
        if self.how not in SPLITTING or self.module._parameters.get(attribute) is None:
            return None
        columns = self.how.startswith("colwise")
        if attribute == "bias":
            return 0 if columns else None
        return int(columns == isinstance(self.module, nn.Embedding))


def split_dims(parts: Iterable[Part]) -> dict[int, int]:
    """id of each parameter that is split → along which dimension."""
    dims = ((p, part.dim(name)) for part in parts for name, p in part.module._parameters.items())
    return {id(p): dim for p, dim in dims if dim is not None}


def read_plan(
    model: nn.Module, plan: Mapping[str, Any] | None, size: int, sequence_parallel: bool
) -> list[Part]:
    """The modules that groups of `size` ranks split, and how, by `plan`, the model's own (`tp_plan`, `_tp_plan`), or `gathered`."""
    kind = type(model).__name__
    own = [getattr(model, name, None) for name in ("tp_plan", "_tp_plan")] if plan is None else []
    chosen = plan or next((found for found in own if isinstance(found, Mapping) and found), None)
    if chosen is None and sequence_parallel:
        raise PrepareError(
            f"sequence_parallel=True needs a plan, for no rule can tell which parts of this {kind} see a piece of the sequence: pass "
            "strategy_options={'plan': ..., 'sequence_parallel': True}"
        )
    chosen = chosen or gathered(model, size)
    if not chosen:
        raise PrepareError(
            f"this {kind} has no nn.Linear and no nn.Embedding of at least {size} features to split over {size} ranks: use 'fsdp' or 'ddp'"
        )
    parts, inside = _with_tied(model, _matched(model, chosen, lenient=plan is None)), _inside_atoms(model)
    for part in parts:
        _check(part, size, inside)
        if part.how in ("sequence", "sequence_split") and not sequence_parallel:
            raise PrepareError(
                f"the plan says {part.how!r} for {part.name!r}, which needs sequence_parallel=True"
            )
    if sequence_parallel:
        _check_sequence(model, parts)
    return parts


def gathered(model: nn.Module, size: int) -> dict[str, str]:
    """A plan that is right for any model that calls its layers: each layer is split, and its output gathered.

    Left whole are subclasses, layers of less than `size` features or inside of modules that read their weights without calling them
    (nn.MultiheadAttention), embeddings that torch cannot split, and layers that share a parameter with one that is left whole.
    """
    inside, places = _inside_atoms(model), holders(model)

    def sharing(module: nn.Module) -> list[nn.Module]:
        return [m for p in module._parameters.values() if p is not None for m, _ in places[id(p)]]

    plan: dict[str, str] = {}
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if id(module) in inside or set(module._parameters) - {"weight", "bias"}:
            continue
        features, how = 0, "colwise_rep"
        if type(module) is nn.Linear and "weight" in module._parameters:
            features = module.out_features
        elif type(module) is nn.Embedding and not module.sparse and module.max_norm is None:
            features = module.embedding_dim
            if any(isinstance(m, nn.Linear) for m in sharing(module)):
                features, how = module.num_embeddings, "rowwise_rep"  # as the Linear's: along the vocabulary
        if features >= size:
            plan[name], modules[name] = how, module
    left = [""]
    while left:
        chosen = {id(modules[name]) for name in plan}
        left = [n for n in plan if any(id(m) not in chosen for m in sharing(modules[n]))]
        plan = {name: how for name, how in plan.items() if name not in left}
    return plan


def _inside_atoms(model: nn.Module) -> dict[int, str]:
    """id of each module inside of one that reads its parts' weights without calling them → the class of that one."""
    atoms = [m for m in model.modules() if isinstance(m, ATOMS)]
    return {id(m): type(atom).__name__ for atom in atoms for m in atom.modules() if m is not atom}


def _matched(model: nn.Module, plan: Mapping[str, Any], lenient: bool) -> list[Part]:
    """Make one part for each matched module, by the first pattern that matches it."""
    names: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    known = (*WORDS, *ALIASES)
    taken: dict[int, Part] = {}
    for pattern, how in plan.items():
        found = [n for n in names if fnmatchcase(n, pattern)]
        if not found and lenient:
            continue  # a model's own plan may name parts that its configuration left out, in words of its own
        word = ALIASES.get(how, how) if isinstance(how, str) else how
        if isinstance(word, str) and word not in WORDS:
            raise PrepareError(
                f"the plan's {pattern!r} has the style {how!r}{nearest(how, known) or ','} known: {', '.join(known)}"
            )
        if not found:
            raise PrepareError(
                f"the plan's {pattern!r} matches no module of this {type(model).__name__}{nearest(pattern, names)} (* is any part)"
            )
        fit = [n for n in found if isinstance(names[n], SPLIT_MODULES)] if word in SPLITTING else found
        if not fit:
            raise PrepareError(
                f"the plan says {how!r} for {found[0]!r}, a {type(names[found[0]]).__name__}, and torch splits nn.Linear and nn.Embedding"
            )
        for name in fit:
            taken.setdefault(id(names[name]), Part(name, names[name], word))
    if not taken:
        raise PrepareError(
            f"the plan of this {type(model).__name__} matches none of its modules: pass one that does"
        )
    return list(taken.values())


def _with_tied(model: nn.Module, parts: list[Part]) -> list[Part]:
    """Add modules that share a parameter with one of `parts`; they are split alike, so that they still share it."""
    names, places = {id(m): n for n, m in model.named_modules()}, holders(model)
    known = {id(part.module): part for part in parts}
    for part in [part for part in parts if part.how in SPLITTING]:
        for attribute, parameter in part.module._parameters.items():
            for module, theirs in places[id(parameter)] if parameter is not None else ():
                dim = part.dim(attribute)
                if id(module) not in known:
                    along_rows = (dim == 0) == isinstance(module, nn.Linear)
                    how = "colwise_rep" if along_rows else "rowwise_rep"
                    known[id(module)] = Part(names[id(module)], module, how)
                    parts.append(known[id(module)])
                other = known[id(module)]
                alike = (
                    isinstance(module, SPLIT_MODULES) and other.how in SPLITTING and other.dim(theirs) == dim
                )
                if isinstance(other.how, str) and not alike:
                    raise PrepareError(
                        f"{part.name!r} and {other.name!r} share a parameter, which {part.how!r} and {other.how!r} split differently: an "
                        "embedding that is 'rowwise' and a Linear that is 'colwise' go together (both along the vocabulary)"
                    )
    return parts


def _check(part: Part, size: int, inside: Mapping[int, str]) -> None:
    module, how = part.module, part.how
    if id(module) in inside and how != "replicate":
        raise PrepareError(
            f"{part.name!r} lies in a {inside[id(module)]}, which reads its weights without calling it: leave it out of the plan"
        )
    single = how in ("sequence", "replicated_with_grad_allreduce")
    if single and next(module.children(), None) is not None:
        raise PrepareError(
            f"{how!r} is for single layers, and {part.name!r} is a {type(module).__name__}: name the layers in it"
        )
    if how not in SPLITTING:
        return
    unfit = set(module._parameters) - {"weight", "bias"}
    weight: Any = module._parameters.get("weight")
    if unfit or weight is None:
        raise PrepareError(
            f"{part.name!r} has no plain weight (parametrised, or with {', '.join(sorted(unfit)) or 'none'}): say 'replicate'"
        )
    embedding = isinstance(module, nn.Embedding)
    if embedding and (module.sparse or module.max_norm is not None):
        raise PrepareError(
            f"{part.name!r} is an embedding with sparse gradients or max_norm, which torch cannot split: leave it out"
        )
    dim = part.dim("weight")
    many, why = weight.shape[dim], ""
    equal = how == "colwise" or (how == "rowwise" and not embedding)  # parts are passed on
    if many < size:
        why = f"is less than {size} ranks: leave it out, or choose another size"
    elif equal and many % size:
        why = f"does not divide by {size} ranks: say 'colwise_rep' or 'rowwise_rep', which needs no equal parts, or choose another size"
    if why:
        raise PrepareError(f"{part.name!r} is {how!r}, and dimension {dim} of its weight, {many}, {why}")


def _check_sequence(model: nn.Module, parts: Iterable[Part]) -> None:
    embedding = any(isinstance(p.module, nn.Embedding) for p in parts)
    if not embedding and all(isinstance(p.how, str) and p.how != "sequence_split" for p in parts):
        raise PrepareError(
            "sequence_parallel=True, but nothing in the plan splits the sequence, so every rank would take the whole for its piece: say "
            "'rowwise' for the embedding, or 'sequence_split' for the first module that takes (batch, sequence, features)"
        )
    covered = {id(q) for p in parts if p.how != "sequence_split" for q in p.module.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in covered:
            raise PrepareError(
                f"sequence_parallel=True, and the plan does not name {name!r}: a gradient from a piece of the sequence has to be summed. "
                "Say 'sequence' for a layer that sees a piece, 'replicate' for a module that sees the whole"
            )


def apply(part: Part, mesh: Any, sequence_parallel: bool) -> None:
    """Split one module in place, over a mesh of one dimension; parameters that cannot train still cannot."""
    from torch.distributed.tensor.parallel import parallelize_module  # here: it takes half a second

    name, module, how = part.name, part.module, part.how
    if how == "replicate":
        return
    if how == "sequence_split":
        module.register_forward_pre_hook(_splitter(name, mesh))
        return
    trained = {name: p.requires_grad for name, p in module.named_parameters()}
    summed = how in SPLITTING and (isinstance(module, nn.Embedding) or how.startswith("rowwise"))
    if sequence_parallel and summed:  # before torch's hook, which cuts
        module.register_forward_hook(lambda _, __, output: _check_length(name, output, mesh.size()))
    parallelize_module(module, mesh, _style(part, sequence_parallel))
    for name_, parameter in module.named_parameters():
        parameter.requires_grad_(trained[name_])


def _style(part: Part, sequence_parallel: bool) -> Any:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    how = part.how
    if not isinstance(how, str):
        return how
    if how == "sequence":
        return SequenceParallel(sequence_dim=SEQUENCE_DIM, use_local_output=True)
    if how == "replicated_with_grad_allreduce":
        # Each rank has different inputs (its heads). DTensor treats them as one long batch, so the gradients are summed.
        return SequenceParallel(sequence_dim=0, use_local_output=True)
    piece = Shard(SEQUENCE_DIM) if sequence_parallel else Replicate()
    embedding = isinstance(part.module, nn.Embedding)
    if how.startswith("colwise"):
        whole = piece if embedding else Replicate()
        return ColwiseParallel(
            input_layouts=Replicate() if embedding else piece,
            output_layouts=whole if how == "colwise_rep" else Shard(-1),
        )
    given = Replicate() if embedding or how == "rowwise_rep" else Shard(-1)
    return RowwiseParallel(input_layouts=given, output_layouts=piece)


def _splitter(name: str, mesh: Any) -> Callable[..., Any]:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def split(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        _check_length(name, inputs[0], mesh.size())
        whole = DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)
        return (whole.redistribute(placements=[Shard(SEQUENCE_DIM)]).to_local(), *inputs[1:])

    return split


def _check_length(name: str, tensor: Tensor, size: int) -> None:
    """Raises BatchError where a sequence cannot be cut into pieces of one length."""
    if tensor.ndim < 3 or tensor.shape[SEQUENCE_DIM] % size:
        raise BatchError(
            f"sequence parallelism cuts dimension 1 of (batch, sequence, features) into {size} pieces of one length, and {name!r} has "
            f"{tuple(tensor.shape)}: pad the sequences, or set sequence_parallel=False"
        )

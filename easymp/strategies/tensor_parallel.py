"""tensor_parallel: layers are split over the ranks of a group, which compute each batch together, by torch's DTensor.

A "colwise" Linear computes some of the output features on each rank; a "rowwise" one takes those as its input, and the
ranks' products are summed. The plan says which layers go together. Several groups share the data by fsdp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.dtensor import ShardMemory, local, names_of, rebind, settle
from ..distributed import World
from ..errors import PrepareError, RefusedError, SettingError, StepError, nearest
from ..optim.sharded import check_sums
from ..optim.torch_step import copies, values
from ..options import Record, option
from ..protocols import Conflict, Layout, WrapContext
from .blocks import ATOMS, refuse_hooked, refuse_sharded
from .context_parallel import check_group_size
from .fsdp import FSDPOptions, Sharded, check_shardable, find_groups, one_by_one, shard, shards_of
from .single import Framed, Released, Remedy, Single, broadcast_model, device_mesh, hook_gradient


@dataclass(frozen=True)
class TensorParallelOptions(Record):
    """Options of strategy "tensor_parallel".

    A fused projection (queries, keys and values in one Linear) must not be "colwise": the first rank would get all
    queries and some of the keys, and nothing fails, but the numbers are wrong. Say "colwise_rep" for it, or make three
    Linears of it.

    The words of a plan, of which the first pattern that matches a module counts:

    - "colwise": output features are split, and each rank passes its part on;
    - "colwise_rep": the same, with the output gathered;
    - "rowwise": input features are split, as "colwise" left them, and outputs are summed; of an embedding, its words;
    - "rowwise_rep": the same, for an input that is whole;
    - "replicated_with_grad_allreduce": a norm between "colwise" and "rowwise", as on heads: its gradients are summed;
    - "replicate": the module stays as it is;
    - a `torch.distributed.tensor.parallel.ParallelStyle`.

    Hugging Face's other words for these are understood: "colwise_gather_output", "rowwise_split_input",
    "embedding_rowwise".

    Raises:
        SettingError: a value of another type, or a former option.

    Example:
        >>> options = TensorParallelOptions(plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, size=8)
    """

    retired: ClassVar = {
        "async_tensor_parallel": "torch.compile orders collectives. Use compile='blocks'",
        "sequence_parallel": "torch's styles cut sequences. Put SequenceParallel(), PrepareModuleInput(...) and "
        "RowwiseParallel(output_layouts=Shard(1)) into the plan, or use context_parallel of strategy 'fsdp'",
    }

    plan: Mapping[str, Any] | None = option(
        None,
        "patterns of module names (`fnmatch`: * matches dots, too) → words, or torch's `ParallelStyle` objects. None: "
        "the model's own plan (`tp_plan` or `_tp_plan`, as Hugging Face's models have), else every plain nn.Linear and "
        "nn.Embedding with its output gathered, which is right for any forward",
    )
    size: int | None = option(
        None,
        "ranks of a group, neighbours, which see the same data; divides the number of processes. None: all of them",
        least=2,
    )
    fsdp: FSDPOptions = option(make=FSDPOptions, help="how several groups shard the parameters that a rank holds")

    def __post_init__(self) -> None:
        plan = self.plan
        valid = isinstance(plan, Mapping) and plan and all(isinstance(name, str) for name in plan)
        if plan is not None and not valid:
            raise SettingError(
                f"plan={plan!r} is not a mapping of module names to styles, as {{'blocks.*.up': 'colwise'}}"
            )
        super().__post_init__()
        if isinstance(self.fsdp, Mapping):
            object.__setattr__(self, "fsdp", FSDPOptions(**self.fsdp))
        if not isinstance(self.fsdp, FSDPOptions):
            raise SettingError(f"fsdp={self.fsdp!r} is neither an FSDPOptions nor a dict of its fields")
        if self.fsdp.ignore:
            subject = f"fsdp.ignore={self.fsdp.ignore!r}"
            raise SettingError(f"{subject}: tensor_parallel shards all that a rank holds. Leave it out, or use fsdp")


class TensorParallel(Single):
    """torch's `parallelize_module` on the modules that the plan names; with several groups, `fully_shard` over these.

    In place, by torch: the parameters of these modules become DTensors; hooks that convert inputs and outputs, and the
    attribute ``_distribute_module_applied``, are set on the modules. In place, by us: parameters and buffers take rank
    0's values first, tied parameters are tied again, gradients get the layout of their parameters, and the optimizers
    of the same `prepare` take the new parameters. With several groups, all that fsdp does, too.

    Other parameters are whole on each rank of a group, with equal gradients, for batches, buffers and dropout are a
    group's: the first step of each optimizer checks that. Layers take their input as a positional argument.
    """

    name: ClassVar[str] = "tensor_parallel"
    several: ClassVar[str] = "splits layers over processes"
    Options: ClassVar[type] = TensorParallelOptions
    splits_layers: ClassVar[bool] = True
    conflicts: ClassVar[Sequence[Conflict]] = (
        Conflict(
            "tensor_parallel", "join_uneven_inputs()", "every rank's forward needs the other ranks' parts", Remedy.JOIN
        ),
        Conflict(
            "tensor_parallel",
            "optimizer_in_backward",
            "the gradients of all whole parameters are compared before the first step",
            Remedy.IN_BACKWARD,
        ),
        Conflict("tensor_parallel", "create_graph=True", "torch's DTensor keeps no graph of a backward", Remedy.GRAPH),
        Conflict("tensor_parallel", "fp8", "layers of fp8 take whole tensors", "Use bf16, or strategy='fsdp'"),
    )

    def __init__(self, world: World, options: TensorParallelOptions) -> None:
        super().__init__(world, options)
        self._size = check_group_size("size", options.size or world.size, world.size)
        if options.fsdp.context_parallel != 1:
            raise RefusedError("context_parallel is not joined with strategy 'tensor_parallel': use strategy 'fsdp'")
        self.data_rank, self.data_size = world.rank // self._size, world.size // self._size
        self.sums = self.data_size == 1  # where groups share the data, fsdp keeps its own
        self.reduces_each = options.fsdp.reduce_every_micro_batch if self.data_size > 1 else False
        self._copies = partial(copies, ranks=world.size)
        self._names: dict[int, str] = {}  # of parameters, by id, for messages

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        width = options.size or size
        groups = max(size // width, 1)
        parts = read_plan(model, options.plan, width)
        dims = {id(p): part.dim(name) for part in parts for name, p in part.module._parameters.items()}

        def elements(shards: int, name: str, parameter: Tensor) -> int:
            shape, dim = list(parameter.shape), dims.get(id(parameter))
            if dim is not None:
                shape[dim] = -(-shape[dim] // width)
            if shape:
                shape[0] = -(-shape[0] // shards)
            return math.prod(shape)

        group, rank = partial(elements, 1), partial(elements, groups)
        if groups == 1:
            return Layout(group, group, group, group)
        inner = shards_of(model, options.fsdp, groups)
        share = sum(group("", p) for p in model.parameters()) / (sum(p.numel() for p in model.parameters()) or 1)
        return Layout(
            weights=rank,
            gradients=rank,
            states=rank,
            copies=group,
            gathers=True,
            gathered=math.ceil(inner.gathered * share),
            unreduced=math.ceil(inner.unreduced * share),
            reducing=math.ceil(inner.reducing * share),
            note="gathered and reduced parts are counted in the proportion in which the whole model is split",
        )

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        group: dist.ProcessGroup = self._mesh["data"].get_group()
        return group

    @cached_property
    def _mesh(self) -> Any:
        """Rows see different data, ranks of a row split layers."""
        return device_mesh(self._world, (self.data_size, self._size), ("data", "tensor"))

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer], context: WrapContext) -> nn.Module:
        names = names_of(model, optimizers)
        refuse_sharded(model)
        if self.data_size > 1:
            check_shardable(model)
        policy, options, world = context.policy, self.options, self._world
        model = policy.convert(model)
        parts = read_plan(model, options.plan, self._size)
        for part in parts:
            if part.style != "replicate":
                refuse_hooked(part.module.named_parameters(part.name))
        if context.place:
            model.to(world.device)
        broadcast_model(model, world)
        tied = [owners for owners in holders(model).values() if len(owners) > 1]
        for part in parts:
            apply(part, self._mesh["tensor"])
        for owners in tied:
            _tie(owners)
        groups = find_groups(model, options.fsdp.wrap) if self.data_size > 1 else []
        for group in groups:
            shard(group, self._mesh["data"], options.fsdp, world.device, gather=policy.gather)
        for parameter in model.parameters() if not groups else ():
            if hasattr(parameter, "to_local"):  # fsdp does this by itself
                hook_gradient(parameter, settle)
        rebind(model, optimizers, names)
        self._names.update((id(p), name) for name, p in model.named_parameters())
        module = policy.forward(model, world.device)
        context.compile(module)
        split = Split(module, model)
        if not groups:
            return split
        return Sharded(split, model, groups, world, options.fsdp, bool(self.reduces_each), gather=policy.gather)

    def spread(self, optimizer: Optimizer) -> Optimizer:
        check_sums(optimizer, self.name)

        def compare(*_: Any) -> None:
            if self._compare_gradients(optimizer):
                hook.remove()

        one_by_one(optimizer, "split", "unsplit")
        hook = optimizer.register_step_pre_hook(compare)
        return optimizer

    def _compare_gradients(self, optimizer: Optimizer) -> bool:
        """Compare gradients of whole parameters inside the group; False where there are none, or after an overflow."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        unsplit = [p for p in parameters if p.grad is not None and not _is_split(p)]
        if not unsplit:
            return False
        grads = [values(local(p.grad.detach())).double() for p in unsplit]
        row = torch.stack([*map(torch.linalg.vector_norm, grads), *(grad.sum() for grad in grads)])
        rows = self._world.gather(row.to(self._world.device)[None])
        if not rows.isfinite().all():
            return False
        group = rows[self.data_rank * self._size : (self.data_rank + 1) * self._size]
        spread = (group.amax(0) - group.amin(0)).view(2, -1).amax(0)
        # Far above rounding and the order of additions on a GPU, and far below the difference of partial sums.
        scale = group[:, : len(unsplit)].amax(0)
        root = torch.tensor([p.grad.numel() for p in unsplit], device=scale.device).double().sqrt()
        for parameter, differs in zip(unsplit, (spread > 0.01 * scale * root).tolist()):
            if differs:
                raise StepError(
                    "the ranks of a group have different gradients for "
                    f"{self._names.get(id(parameter), 'a parameter')!r}, which each of them holds whole: it acts on a "
                    "part of the features or of the sequence. Say 'replicated_with_grad_allreduce' for its layer in "
                    "the plan"
                )
        return True

    def release(self, model: nn.Module, module: nn.Module) -> nn.Module:
        super().release(model, module)
        return Released("this model's parameters are shards")


class Split(Framed):
    """Calls the model, and explains an error of mixed layouts."""

    def __init__(self, module: nn.Module, root: nn.Module) -> None:
        super().__init__(module)
        self._shard_memory = ShardMemory(root)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._shard_memory.check()
        try:
            return self.module(*args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise StepError(
                "the model computes with a split parameter outside of the layer that holds it (as F.linear(x, "
                "layer.weight) does): say 'replicate' for it in the plan, before the pattern that splits it. torch "
                f"said: {error}"
            ) from error


def _is_split(parameter: Any) -> bool:
    """Whether the ranks of a group hold different parts of it."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or "tensor" not in (mesh.mesh_dim_names or ()):
        return False
    return not parameter.placements[mesh.mesh_dim_names.index("tensor")].is_replicate()


Owner = tuple[nn.Module, str]


def holders(model: nn.Module) -> dict[int, list[Owner]]:
    """id of each parameter → the modules and attributes that hold it."""
    owners: dict[int, list[Owner]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, attribute))
    return owners


def _tie(owners: Sequence[Owner]) -> None:
    """Let these places hold the parameter of the first one, again."""
    (module, attribute), *followers = owners
    tied: Any = module._parameters[attribute]
    for follower, name in followers:
        parameter: Any = follower._parameters[name]
        if getattr(parameter, "placements", None) != getattr(tied, "placements", None):
            classes = f"a {type(module).__name__} and a {type(follower).__name__}"
            raise PrepareError(f"the plan splits a parameter shared by {classes} in two ways: split it alike")
        follower._parameters[name] = tied


# -- the plan: which modules are split, and how, read before anything is changed ---------------------------------------


SPLIT_MODULES = (nn.Linear, nn.Embedding)
SPLITTING = ("colwise", "colwise_rep", "rowwise", "rowwise_rep")
STYLES = (*SPLITTING, "replicated_with_grad_allreduce", "replicate")
REMOVED = ("sequence", "sequence_split", "sequence_parallel")
ALIASES = {
    "colwise_gather_output": "colwise_rep",
    "rowwise_split_input": "rowwise_rep",
    "embedding_rowwise": "rowwise_rep",
}


@dataclass(frozen=True, eq=False)
class Part:
    """A module, and how it is split: one of `STYLES`, or one of torch's ParallelStyle objects."""

    name: str
    module: nn.Module
    style: Any

    def dim(self, attribute: str) -> int | None:
        """The dimension along which a parameter of the module is split; None: it is whole."""
        if self.style not in SPLITTING or self.module._parameters.get(attribute) is None:
            return None
        columns = self.style.startswith("colwise")
        if attribute == "bias":
            return 0 if columns else None
        return int(columns == isinstance(self.module, nn.Embedding))


def read_plan(model: nn.Module, plan: Mapping[str, Any] | None, size: int) -> list[Part]:
    """Which modules groups of `size` ranks split, and how: by `plan`, the model's own plan, or `gathered`."""
    kind = type(model).__name__
    styles = plan
    if plan is None:
        plans = [getattr(model, name, None) for name in ("tp_plan", "_tp_plan")]
        styles = next((plan for plan in plans if isinstance(plan, Mapping) and plan), None)
    styles = styles or gathered(model, size)
    if not styles:
        layers = f"nn.Linear and no nn.Embedding of at least {size} features"
        raise PrepareError(f"this {kind} has no {layers} to split over {size} ranks: use 'fsdp' or 'ddp'")
    parts = _with_tied(model, _match(model, styles, lenient=plan is None))
    atom_of = _inside_atoms(model)
    for part in parts:
        if reason := _refusal(part, size, atom_of):
            raise PrepareError(f"{part.name!r} {reason}")
    return parts


def gathered(model: nn.Module, size: int) -> dict[str, str]:
    """A plan that is right for any model that calls its layers: each that can be is split, and its output gathered."""
    atom_of, owners = _inside_atoms(model), holders(model)

    def sharing(module: nn.Module) -> list[nn.Module]:
        return [m for p in module._parameters.values() if p is not None for m, _ in owners[id(p)]]

    parts: dict[str, Part] = {}
    for name, module in model.named_modules():
        if type(module) in SPLIT_MODULES:
            # As the Linear's that it is tied to: along the vocabulary.
            tied = type(module) is nn.Embedding and any(isinstance(m, nn.Linear) for m in sharing(module))
            part = Part(name, module, "rowwise_rep" if tied else "colwise_rep")
            if not _refusal(part, size, atom_of):
                parts[name] = part
    while True:
        split = {id(part.module) for part in parts.values()}
        unsplit = [name for name, part in parts.items() if any(id(m) not in split for m in sharing(part.module))]
        if not unsplit:
            return {name: part.style for name, part in parts.items()}
        for name in unsplit:
            del parts[name]


def _inside_atoms(model: nn.Module) -> dict[int, str]:
    """id of a submodule of one of ATOMS (which read weights of submodules without calling them) → the atom's class."""
    atoms = [m for m in model.modules() if isinstance(m, ATOMS)]
    return {id(m): type(atom).__name__ for atom in atoms for m in atom.modules() if m is not atom}


def _match(model: nn.Module, styles: Mapping[str, Any], lenient: bool) -> list[Part]:
    """Make one part for each matched module, by the first pattern that matches it."""
    kind, modules = type(model).__name__, dict(model.named_modules(remove_duplicate=False))
    parts: dict[int, Part] = {}
    for pattern, label in styles.items():
        matched = [name for name in modules if fnmatchcase(name, pattern)]
        if not matched and lenient:
            continue  # a model's own plan may name parts that its configuration left out, in styles of its own
        style = ALIASES.get(label, label) if isinstance(label, str) else label
        if style in REMOVED:
            raise PrepareError(
                f"the plan's {pattern!r} has the style {label!r}, which was removed: put torch's SequenceParallel() or "
                "PrepareModuleInput(...) there"
            )
        if isinstance(style, str) and style not in STYLES:
            hint, labels = nearest(label, (*STYLES, *ALIASES)) or ",", ", ".join((*STYLES, *ALIASES))
            raise PrepareError(f"the plan's {pattern!r} has the style {label!r}{hint} known: {labels}")
        if not matched:
            raise PrepareError(
                f"the plan's {pattern!r} matches no module of this {kind}{nearest(pattern, modules)} (* is any part)"
            )
        fit = [n for n in matched if isinstance(modules[n], SPLIT_MODULES)] if style in SPLITTING else matched
        if not fit:
            subject = f"{matched[0]!r}, a {type(modules[matched[0]]).__name__}"
            raise PrepareError(f"the plan says {label!r} for {subject}, and torch splits nn.Linear and nn.Embedding")
        for name in fit:
            parts.setdefault(id(modules[name]), Part(name, modules[name], style))
    if not parts:
        raise PrepareError(f"the plan of this {kind} matches none of its modules: pass one that does")
    return list(parts.values())


def _with_tied(model: nn.Module, parts: list[Part]) -> list[Part]:
    """Add modules that share a parameter with one of `parts`; they are split alike, so that they still share it."""
    names, owners = {id(m): n for n, m in model.named_modules()}, holders(model)
    part_of = {id(part.module): part for part in parts}
    for part in [part for part in parts if part.style in SPLITTING]:
        parameters = [(name, p) for name, p in part.module._parameters.items() if p is not None]
        for attribute, (module, other_attribute) in [(name, o) for name, p in parameters for o in owners[id(p)]]:
            dim = part.dim(attribute)
            if id(module) not in part_of:
                style = "colwise_rep" if (dim == 0) == isinstance(module, nn.Linear) else "rowwise_rep"
                part_of[id(module)] = Part(names[id(module)], module, style)
            tied_part = part_of[id(module)]
            splits = isinstance(module, SPLIT_MODULES) and tied_part.style in SPLITTING
            if isinstance(tied_part.style, str) and not (splits and tied_part.dim(other_attribute) == dim):
                raise PrepareError(
                    f"{part.name!r} and {tied_part.name!r} share a parameter, which {part.style!r} and "
                    f"{tied_part.style!r} split differently: an embedding that is 'rowwise' and a Linear that is "
                    "'colwise' go together (both along the vocabulary)"
                )
    return list(part_of.values())


def _refusal(part: Part, size: int, atom_of: Mapping[int, str]) -> str:
    """Why a module cannot be split as its part says; "" where it can."""
    module, style = part.module, part.style
    if id(module) in atom_of and style != "replicate":
        return f"lies in a {atom_of[id(module)]}, which reads its weights without calling it: leave it out of the plan"
    if style == "replicated_with_grad_allreduce" and any(True for _ in module.children()):
        return f"is a {type(module).__name__}, and {style!r} is for single layers: name the layers in it"
    if style not in SPLITTING:
        return ""
    unknown = sorted(set(module._parameters) - {"weight", "bias"})
    weight = module._parameters.get("weight")
    if unknown or weight is None:
        return f"has no plain weight (parametrised, or with {', '.join(unknown) or 'none'}): say 'replicate'"
    embedding = isinstance(module, nn.Embedding)
    if embedding and (module.sparse or module.max_norm is not None):
        return "is an embedding with sparse gradients or max_norm, which torch cannot split: leave it out"
    dim = part.dim("weight")
    assert dim is not None
    length, subject = weight.shape[dim], f"is {style!r}, and dimension {dim} of its weight, {weight.shape[dim]},"
    if length < size:
        return f"{subject} is less than {size} ranks: leave it out, or choose another size"
    passed_on = style == "colwise" or (style == "rowwise" and not embedding)
    if passed_on and length % size:
        return f"{subject} does not divide by {size} ranks: say '{style}_rep', or choose another size"
    return ""


def apply(part: Part, mesh: Any) -> None:
    """Split one module in place, over a mesh of one dimension; parameters that cannot train still cannot."""
    # Here: they take half a second.
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    module, style = part.module, part.style
    if style == "replicate":
        return
    if style == "replicated_with_grad_allreduce":
        # Each rank has different inputs (its heads). DTensor treats them as one long batch, so gradients are summed.
        style = SequenceParallel(sequence_dim=0, use_local_output=True)
    elif style in ("colwise", "colwise_rep"):
        style = ColwiseParallel(output_layouts=Shard(-1) if style == "colwise" else Replicate())
    elif style in ("rowwise", "rowwise_rep"):
        whole_input = isinstance(module, nn.Embedding) or style == "rowwise_rep"
        style = RowwiseParallel(input_layouts=Replicate() if whole_input else Shard(-1), output_layouts=Replicate())
    trained = {name: p.requires_grad for name, p in module.named_parameters()}
    parallelize_module(module, mesh, style)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trained[name])

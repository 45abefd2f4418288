"""The plan of tensor parallelism: which modules are split, and how, read from patterns before anything is changed.

The words are Hugging Face's (`_tp_plan`), so that a plan written for its models is understood; each stands for one of torch's styles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from ..errors import BatchError, PrepareError, nearest
from .blocks import ATOMS

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


def read_plan(
    model: nn.Module, plan: Mapping[str, Any] | None, size: int, sequence_parallel: bool
) -> list[Part]:
    """What to do to the modules of `model`, for groups of `size` ranks.

    Args:
        plan: patterns → words or styles; None: the model's own (`tp_plan`, `_tp_plan`), else `gathered`.

    Raises:
        PrepareError: what cannot be done, by name.
    """
    own = None if plan is not None else _own(model)
    if plan is None and own is None:
        if sequence_parallel:
            raise PrepareError(
                "sequence_parallel=True needs a plan, for no rule can tell which parts of this "
                f"{type(model).__name__} see a piece of the sequence: pass strategy_options={{'plan': ..., 'sequence_parallel': True}}"
            )
        plan = gathered(model, size)
        if not plan:
            raise PrepareError(
                f"this {type(model).__name__} has no nn.Linear and no nn.Embedding of at least {size} features to split over {size} "
                "ranks: use strategy='fsdp' or 'ddp', or groups of fewer ranks"
            )
    chosen = plan if plan is not None else own
    assert chosen is not None
    parts = _with_tied(model, _matched(model, chosen, lenient=own is not None))
    _check(model, parts, size)
    if sequence_parallel:
        _check_sequence(model, parts)
    else:
        for part in parts:
            if part.how in ("sequence", "sequence_split"):
                raise PrepareError(
                    f"the plan says {part.how!r} for {part.name!r}, which needs sequence_parallel=True"
                )
    return parts


def _own(model: nn.Module) -> Mapping[str, Any] | None:
    for attribute in ("tp_plan", "_tp_plan"):
        found = getattr(model, attribute, None)
        if isinstance(found, Mapping) and found:
            return found
    return None


def gathered(model: nn.Module, size: int) -> dict[str, str]:
    """A plan that is right for any model whose layers are called: each layer is split, and its output gathered.

    Every nn.Linear and nn.Embedding, no subclass, with at least `size` features. Left whole are those inside of modules that read
    their weights without calling them (nn.MultiheadAttention), embeddings that torch cannot split, and those that share a
    parameter with what is left whole.
    """
    inside = _inside_atoms(model)
    plan: dict[str, str] = {}
    modules = {
        n: m
        for n, m in model.named_modules()
        if id(m) not in inside and not set(m._parameters) - {"weight", "bias"}
    }
    for name, module in modules.items():
        if type(module) is nn.Linear and module.out_features >= size and "weight" in module._parameters:
            plan[name] = "colwise_rep"
        elif type(module) is nn.Embedding and not module.sparse and module.max_norm is None:
            if _tied_to_a_linear(module, model):
                if module.num_embeddings >= size:
                    plan[name] = "rowwise_rep"  # as the Linear's: along the vocabulary
            elif module.embedding_dim >= size:
                plan[name] = "colwise_rep"
    while True:
        chosen = {id(modules[name]) for name in plan}
        left = [n for n in plan if any(id(m) not in chosen for m in _sharing(modules[n], model))]
        if not left:
            return plan
        for name in left:
            del plan[name]


def _sharing(module: nn.Module, model: nn.Module) -> Iterator[nn.Module]:
    mine = {id(p) for p in module._parameters.values() if p is not None}
    return (m for m in model.modules() if any(id(p) in mine for p in m._parameters.values()))


def _tied_to_a_linear(module: nn.Module, model: nn.Module) -> bool:
    return any(isinstance(m, nn.Linear) for m in _sharing(module, model))


def _inside_atoms(model: nn.Module) -> dict[int, str]:
    """id of each module inside of one that reads its parts' weights without calling them → the class of that one."""
    return {
        id(m): type(atom).__name__
        for atom in model.modules()
        if isinstance(atom, ATOMS)
        for m in atom.modules()
        if m is not atom
    }


def _matched(model: nn.Module, plan: Mapping[str, Any], lenient: bool) -> list[Part]:
    """One part a matched module; the first pattern that matches it counts."""
    names: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    taken: dict[int, Part] = {}
    for pattern, how in plan.items():
        found = [n for n in names if fnmatchcase(n, pattern)]
        if not found and lenient:
            continue  # a model's own plan may speak of parts that its configuration left out, in words of its own
        word = _word(pattern, how)
        if not found:
            raise PrepareError(
                f"the plan's {pattern!r} matches no module of this {type(model).__name__}{nearest(pattern, names)}: write names as in "
                "model.named_modules(), with * for any part"
            )
        if word in SPLITTING:
            fit = [n for n in found if isinstance(names[n], SPLIT_MODULES)]
            if found and not fit:
                raise PrepareError(
                    f"the plan says {how!r} for {found[0]!r}, a {type(names[found[0]]).__name__}, and torch splits nn.Linear and "
                    "nn.Embedding: name those inside of it"
                )
            found = fit
        for name in found:
            taken.setdefault(id(names[name]), Part(name, names[name], word))
    if not taken:
        raise PrepareError(
            f"the plan of this {type(model).__name__} matches none of its modules: pass one that does"
        )
    return list(taken.values())


def _word(pattern: str, how: Any) -> Any:
    if not isinstance(how, str):
        return how
    word = ALIASES.get(how, how)
    if word not in WORDS:
        known = (*WORDS, *ALIASES)
        raise PrepareError(
            f"the plan's {pattern!r} has the style {how!r}{nearest(how, known) or ','} known: {', '.join(known)}"
        )
    return word


def _with_tied(model: nn.Module, parts: list[Part]) -> list[Part]:
    """`parts`, and those that share a parameter with one of them: split alike, so that there is still one."""
    names = {id(m): n for n, m in model.named_modules()}
    known = {id(p.module): p for p in parts}
    for part in list(parts):
        if part.how not in SPLITTING:
            continue
        for attribute, parameter in part.module._parameters.items():
            if parameter is None:
                continue
            for module in _sharing_one(parameter, model):
                other = known.get(id(module))
                if other is None:
                    dim = layout(part, attribute)
                    if isinstance(module, nn.Linear):
                        how = "colwise_rep" if dim == 0 else "rowwise_rep"
                    else:
                        how = "rowwise_rep" if dim == 0 else "colwise_rep"
                    known[id(module)] = other = Part(names[id(module)], module, how)
                    parts.append(other)
                theirs = next(a for a, p in module._parameters.items() if p is parameter)
                alike = (
                    isinstance(module, SPLIT_MODULES)
                    and other.how in SPLITTING
                    and layout(other, theirs) == layout(part, attribute)
                )
                if not alike and isinstance(other.how, str):
                    raise PrepareError(
                        f"{part.name!r} and {other.name!r} share a parameter, which {part.how!r} and {other.how!r} split differently: an "
                        "embedding that is 'rowwise' and a Linear that is 'colwise' go together (both along the vocabulary)"
                    )
    return parts


def _sharing_one(parameter: Tensor, model: nn.Module) -> Iterator[nn.Module]:
    return (m for m in model.modules() if any(p is parameter for p in m._parameters.values()))


def layout(part: Part, attribute: str) -> int | None:
    """The dimension along which a word splits a parameter; None: whole."""
    columns = part.how.startswith("colwise")
    if isinstance(part.module, nn.Embedding):
        return 1 if columns else 0
    if attribute == "bias":
        return 0 if columns else None
    return 0 if columns else 1


def split_dims(parts: Iterable[Part]) -> dict[int, int]:
    """id of each parameter that a word splits → along which dimension."""
    found = {}
    for part in parts:
        if part.how in SPLITTING:
            for attribute, parameter in part.module._parameters.items():
                dim = layout(part, attribute)
                if parameter is not None and dim is not None:
                    found[id(parameter)] = dim
    return found


def _check(model: nn.Module, parts: Iterable[Part], size: int) -> None:
    inside = _inside_atoms(model)
    for part in parts:
        module, how = part.module, part.how
        if id(module) in inside and how != "replicate":
            raise PrepareError(
                f"{part.name!r} lies in a {inside[id(module)]}, which reads its weights without calling it: leave it out of the plan"
            )
        if how in SPLITTING:
            unfit = set(module._parameters) - {"weight", "bias"}
            if unfit or module._parameters.get("weight") is None:
                raise PrepareError(
                    f"{part.name!r} has no plain weight (parametrised, or with {', '.join(sorted(unfit)) or 'none'}): say 'replicate'"
                )
            embedding = isinstance(module, nn.Embedding)
            if embedding and (module.sparse or module.max_norm is not None):
                raise PrepareError(
                    f"{part.name!r} is an embedding with sparse gradients or max_norm, which torch cannot split: leave it out"
                )
            dim = layout(part, "weight")
            assert dim is not None
            many = module.weight.shape[dim]  # type: ignore[union-attr, index]
            passed_on = how == "colwise" or (how == "rowwise" and not embedding)
            if many < size or (passed_on and many % size):
                why = f"does not divide by {size} ranks" if many >= size else f"is less than {size} ranks"
                remedy = (
                    "say 'colwise_rep' or 'rowwise_rep', which" if many >= size else "leave it out, which"
                )
                raise PrepareError(
                    f"{part.name!r} is {how!r}, and dimension {dim} of its weight, {many}, {why}: {remedy} needs no equal parts, or choose "
                    "another size"
                )
        if (
            how in ("sequence", "replicated_with_grad_allreduce")
            and next(module.children(), None) is not None
        ):
            raise PrepareError(
                f"{how!r} is for single layers, and {part.name!r} is a {type(module).__name__}: name the layers in it"
            )


def _check_sequence(model: nn.Module, parts: Iterable[Part]) -> None:
    parts = list(parts)
    enters = any(
        p.how == "sequence_split" or not isinstance(p.how, str) or isinstance(p.module, nn.Embedding)
        for p in parts
    )
    if not enters:
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


# -- what a word does --------------------------------------------------------------------------------------------------


def apply(part: Part, mesh: Any, sequence_parallel: bool) -> None:
    """Split one module in place, over a mesh of one dimension; parameters that cannot train still cannot."""
    # Imported here: half a second that other strategies need not pay.
    from torch.distributed.tensor.parallel import parallelize_module

    if part.how == "replicate":
        return
    if part.how == "sequence_split":
        part.module.register_forward_pre_hook(_splitter(part.name, mesh))
        return
    trained = {name: p.requires_grad for name, p in part.module.named_parameters()}
    if (
        sequence_parallel
        and part.how in SPLITTING
        and (isinstance(part.module, nn.Embedding) or part.how.startswith("rowwise"))
    ):
        part.module.register_forward_hook(_length_check(part.name, mesh.size()))  # before torch's, which cuts
    parallelize_module(part.module, mesh, _style(part, sequence_parallel))
    for name, parameter in part.module.named_parameters():
        parameter.requires_grad_(trained[name])


def _style(part: Part, sequence_parallel: bool) -> Any:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    how = part.how
    if not isinstance(how, str):
        return how
    if how == "sequence":
        return SequenceParallel(sequence_dim=SEQUENCE_DIM, use_local_output=True)
    if how == "replicated_with_grad_allreduce":
        # Each rank sees inputs of its own (its heads): to DTensor they are one long batch, and the gradients are summed.
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


def _length_check(name: str, size: int) -> Callable[..., None]:
    def check(module: nn.Module, inputs: Any, output: Tensor) -> None:
        _check_length(name, output, size)

    return check


def _check_length(name: str, tensor: Tensor, size: int) -> None:
    """Raises BatchError where a sequence cannot be cut into pieces of one length."""
    if tensor.ndim < 3 or tensor.shape[SEQUENCE_DIM] % size:
        raise BatchError(
            f"sequence parallelism cuts dimension 1 of (batch, sequence, features) into {size} pieces of one length, and {name!r} has "
            f"{tuple(tensor.shape)}: pad the sequences, or set sequence_parallel=False"
        )

"""The parts of a model that are wrapped on their own: repeated blocks, classes by name, or parts by size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import nn

from ..base.rng import TORCH
from ..errors import PrepareError, nearest

LARGE = 4  # a layer with 1/LARGE of the largest block's parameters is gathered on its own
# Older versions of torch fail if a forward calls one of several modules that are gathered together.
TIED_GROUPS = TORCH >= (2, 13)
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# Its forward reads the weights of its parts without calling the parts, so hooks on them would not run.
ATOMS = (nn.MultiheadAttention,)


def find_blocks(model: nn.Module, wrap: str | tuple[str, ...] | int) -> list[nn.Module]:
    """Find the modules inside `model` to wrap on their own, inner ones before those that hold them.

    Left out are modules that share a parameter with the rest of the model (tied weights), containers, and modules without parameters.
    Modules with parameters of another dtype than most are always included: parameters that are gathered together have one dtype.

    Args:
        wrap: "blocks": see `find_repeated`; a tuple: modules of these class names; a number: modules with at least that many
            parameters that are not in a block already.
    """
    inside = [m for m in bottom_up(model) if m is not model]
    if isinstance(wrap, int):
        chosen = _by_size(inside, model, wrap)
    elif isinstance(wrap, str):
        chosen = {id(m) for m in find_repeated(model)}
    else:
        found = {type(m).__name__ for m in inside}
        for name in wrap:
            if name not in found:
                raise PrepareError(
                    f"no module in this {type(model).__name__} is a {name!r}{nearest(name, found)}: correct `wrap`"
                )
        chosen = {id(m) for m in inside if type(m).__name__ in wrap}
    chosen |= _of_another_dtype(model)
    return [m for m in inside if id(m) in chosen and _wrappable(m, model)]


def find_layers(
    model: nn.Module, blocks: Sequence[nn.Module], without: Collection[int] = ()
) -> list[tuple[nn.Module, ...]]:
    """The large layers of `model` outside of `blocks`, such as embeddings and heads; layers that share a parameter are one tuple.

    A layer is large if its own parameters, but for those in `without`, are at least 1/`LARGE` of the largest block's, or layer's where
    there are no blocks. A layer whose weights are read, instead of the layer being called, stays with the module that reads them.
    """
    inside = {id(m) for block in blocks for m in block.modules()}
    groups: list[tuple[list[nn.Module], dict[int, int]]] = []  # modules, and their parameters' elements by id
    for module in bottom_up(model):
        held = module.parameters(recurse=isinstance(module, ATOMS))
        own = {id(p): p.numel() for p in held if id(p) not in without}
        if id(module) in inside or not own:
            continue
        modules = [module]
        for group in [g for g in groups if not own.keys().isdisjoint(g[1])]:
            groups.remove(group)
            modules, own = [*group[0], *modules], {**group[1], **own}
        groups.append((modules, own))
    least = max((sum(p.numel() for p in b.parameters() if id(p) not in without) for b in blocks), default=0)
    least = least or max((sum(own.values()) for _, own in groups), default=0)
    return [
        tuple(modules)
        for modules, own in groups
        if sum(own.values()) * LARGE >= least
        and (len(modules) == 1 or TIED_GROUPS)
        and not any(m is model or _is_read(m, model) for m in modules)
        and all(_callable(m) for m in modules)
        and not _shares(modules, model)
    ]


def find_repeated(model: nn.Module) -> Iterator[nn.Module]:
    """Find children of one class, with children of their own, if a container holds two or more of them."""
    for container in model.modules():
        if isinstance(container, CONTAINERS):
            children = list(container.children())
            # By name: some may have a subclass of ours (recomputed) that has its base's name.
            count = Counter((type(c).__module__, type(c).__qualname__) for c in children)
            for child in children:
                several = count[type(child).__module__, type(child).__qualname__] > 1
                if several and next(child.children(), None) is not None:
                    yield child


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Repeated blocks that can be called, whether parameters are tied or not; of blocks inside one another, the outermost."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for block in sorted(find_repeated(model), key=lambda b: -sum(1 for _ in b.modules())):
        if id(block) not in inside and type(block).forward is not nn.Module.forward:
            found.append(block)
            inside.update(id(m) for m in block.modules())
    order = {id(m): i for i, m in enumerate(model.modules())}
    return sorted(found, key=lambda b: order[id(b)])


def bottom_up(module: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    """Yield every module once, children before their parents, without the parts of `ATOMS`."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    if not isinstance(module, ATOMS):
        for child in module.children():
            yield from bottom_up(child, seen)
    yield module


def _is_read(layer: nn.Module, model: nn.Module) -> bool:
    """Whether a parent's forward reads a parameter of `layer` without calling the layer, as ``F.linear(x, self.embed.weight)`` does."""
    for module in model.modules():
        code = getattr(type(module).forward, "__code__", None)
        reads = code is not None and not layer._parameters.keys().isdisjoint(code.co_names)
        if reads and module is not layer and any(m is layer for m in module.modules()):
            return True
    return False


def _of_another_dtype(model: nn.Module) -> set[int]:
    count: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        count[parameter.dtype] += parameter.numel()
    usual = count.most_common(1)[0][0] if count else None
    return {id(m) for m in model.modules() if any(p.dtype != usual for p in m.parameters(recurse=False))}


def _by_size(inside: list[nn.Module], model: nn.Module, least: int) -> set[int]:
    chosen: set[int] = set()
    taken: set[int] = set()  # parameters in a block already
    for module in inside:
        own = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        if sum(own.values()) >= least and _wrappable(module, model):
            chosen.add(id(module))
            taken.update(own)
    return chosen


def _wrappable(module: nn.Module, model: nn.Module) -> bool:
    return any(True for _ in module.parameters()) and _callable(module) and not _shares([module], model)


def _callable(module: nn.Module) -> bool:
    containers = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return type(module).forward is not nn.Module.forward and not containers


def _shares(modules: Sequence[nn.Module], model: nn.Module) -> bool:
    """Whether `modules` share a parameter with the rest of `model`."""
    mine = {id(p) for module in modules for p in module.parameters()}
    parts = {id(m) for module in modules for m in module.modules()}
    others = (m for m in model.modules() if id(m) not in parts)
    return any(id(p) in mine for m in others for p in m._parameters.values())


def refuse_sharded(model: nn.Module) -> None:
    """Raises PrepareError for a parameter that is a DTensor already."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "to_local"):
            raise PrepareError(
                f"parameter {name!r} is sharded already, by an earlier run or by hand: build the model anew"
            )


def refuse_sparse(model: nn.Module, why: str, cure: str = "use strategy='ddp'", narrow: bool = False) -> None:
    """Refuse trainable embeddings with sparse gradients; with `narrow`, only those with low-precision weights."""
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        trained = module.sparse and module.weight.requires_grad
        if trained and (not narrow or module.weight.dtype.itemsize < 4):
            raise PrepareError(
                f"{name or type(module).__name__!r} has sparse gradients, and {why}: make it with sparse=False, or {cure}"
            )

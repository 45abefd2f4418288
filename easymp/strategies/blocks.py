"""Which parts of a model are wrapped on their own: repeated blocks, classes by name, or parts by size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from ..errors import PrepareError, nearest

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# Its forward reads the weights of its parts without calling them, so that no hook would gather them.
ATOMS = (nn.MultiheadAttention,)


def find_blocks(model: nn.Module, wrap: str | tuple[str, ...] | int) -> list[nn.Module]:
    """The modules inside `model` to wrap on their own, inner ones before those that hold them.

    Modules that share a parameter with something outside of them (tied weights) are left to what holds both, and so are those
    that cannot be called (containers) or hold no parameters. Those with parameters of another dtype than most (batch-norm in a
    half-precision model) are always among them: what is gathered together has one dtype.

    Args:
        wrap: "blocks": children of one class, with children of their own, of which a ModuleList, Sequential or ModuleDict holds
            two or more; a tuple: modules of these class names; a number: modules with at least so many parameters that are not
            in a block already.

    Raises:
        PrepareError: a class name that no module has.
    """
    inside = [m for m in _bottom_up(model) if m is not model]
    if isinstance(wrap, int):
        chosen = {id(m) for m in _by_size(inside, model, wrap)}
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


def _of_another_dtype(model: nn.Module) -> set[int]:
    count: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        count[parameter.dtype] += parameter.numel()
    if len(count) < 2:
        return set()
    usual = count.most_common(1)[0][0]
    return {id(m) for m in model.modules() if any(p.dtype != usual for p in m.parameters(recurse=False))}


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Those of "blocks" above, whether parameters are tied or not; of blocks inside one another, the outermost."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for block in sorted(find_repeated(model), key=lambda b: -sum(1 for _ in b.modules())):
        if id(block) not in inside and type(block).forward is not nn.Module.forward:
            found.append(block)
            inside.update(id(m) for m in block.modules())
    order = {id(m): i for i, m in enumerate(model.modules())}
    return sorted(found, key=lambda b: order[id(b)])


def _bottom_up(module: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    if not isinstance(module, ATOMS):
        for child in module.children():
            yield from _bottom_up(child, seen)
    yield module


def find_repeated(model: nn.Module) -> Iterator[nn.Module]:
    for container in model.modules():
        if isinstance(container, CONTAINERS):
            children = list(container.children())
            # By name: some may have a subclass of ours (recomputing) that goes by its base's name.
            count = Counter(_name(c) for c in children)
            yield from (c for c in children if count[_name(c)] > 1 and next(c.children(), None) is not None)


def _name(module: nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__qualname__


def _by_size(inside: list[nn.Module], model: nn.Module, least: int) -> list[nn.Module]:
    chosen: list[nn.Module] = []
    taken: set[int] = set()  # parameters in a block already
    for module in inside:
        own = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        if sum(own.values()) >= least and _wrappable(module, model):
            chosen.append(module)
            taken.update(own)
    return chosen


def _wrappable(module: nn.Module, model: nn.Module) -> bool:
    mine = {id(p) for p in module.parameters()}
    parts = {id(m) for m in module.modules()}
    outside = (p for m in model.modules() if id(m) not in parts for p in m._parameters.values() if p is not None)
    callable_ = type(module).forward is not nn.Module.forward and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return bool(mine) and callable_ and mine.isdisjoint(id(p) for p in outside)


def refuse_sparse(model: nn.Module, why: str, cure: str = "use strategy='ddp'", narrow: bool = False) -> None:
    """Refuse trainable embeddings with sparse gradients; with `narrow`, only those with low-precision weights.

    Raises:
        PrepareError: there is one; names it.
    """
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or not (module.sparse and module.weight.requires_grad):
            continue
        if not narrow or module.weight.dtype.itemsize < 4:
            raise PrepareError(
                f"{name or type(module).__name__!r} has sparse gradients, and {why}: make it with sparse=False, or {cure}"
            )

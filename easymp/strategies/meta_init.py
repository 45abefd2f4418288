"""Values for a model that was built on the meta device, part by part, so that no process needs to hold it whole.

Each module gets storage for its own parameters and buffers and draws their values by its `reset_parameters`, as its constructor would have:
children before the modules that hold them, in the order they were registered. So the same seed gives the values of a model that was built
normally, if all its modules are made in that order and draw numbers in `reset_parameters` only, as torch's do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from ..errors import PrepareError

Initialize = Callable[[nn.Module], None] | None

OTHERS = ("_init_weights", "init_weights")  # methods of models that we cannot call: some take a module
LEFT: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that a run divided among ranks: their meta tensors have values elsewhere, and must not get new ones."""


def left_to_others(model: nn.Module) -> bool:
    """Whether `model` is one of `LEFT`, or a part or a view of it, which has its attributes."""
    mine = id(vars(model))
    return any(id(vars(module)) == mine for left in LEFT for module in left.modules())


def on_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer of `model` is on the meta device."""
    return any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def materialise(
    model: nn.Module,
    device: torch.device,
    initialize: Initialize = None,
    finished: Callable[[nn.Module], None] = lambda module: None,
) -> None:
    """Give each meta parameter and buffer of `model` storage on `device`, and values. Tensors stay the same objects.

    A tied parameter takes the values of the module that comes first. A module without tensors of its own but with a
    `reset_parameters` has it called after its children, unless a tensor inside it had values before.

    Args:
        initialize: called with each module that had meta tensors, after its `reset_parameters` if it has one.
        finished: called with each module, children first, as soon as its values are final.
    """
    if model in LEFT:
        raise PrepareError(
            f"an earlier run left parts of this {type(model).__name__} to other ranks, and they have no values here: build the model anew"
        )
    holders = {id(m) for m in model.modules() if _resetter(m) and _only_holds(m)}
    for name, module in model.named_modules():
        _check(name, module, initialize, id(module) in holders)
    origin: dict[int, Tensor] = {}  # those with values; kept alive, so that an id means one tensor
    seen: set[int] = set()

    def visit(module: nn.Module, held: bool) -> Iterator[nn.Module]:
        """Modules in order of completion. A module inside a holder, which may change it, is complete with the holder."""
        if id(module) in seen:
            return
        seen.add(id(module))
        inside: list[nn.Module] = []
        holds = held or id(module) in holders
        for child in module.children():
            for done in visit(child, holds):
                if holds and not held:
                    inside.append(done)
                else:
                    yield done
        _fill(module, device, initialize, origin)
        if id(module) in holders:
            with torch.no_grad(), device:
                _resetter(module)()  # type: ignore[misc]
        yield from inside
        yield module

    for module in visit(model, False):
        finished(module)


def _resetter(module: nn.Module) -> Callable[[], None] | None:
    """`reset_parameters`, or torch's name for it in MultiheadAttention and Transformer."""
    found = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return next(filter(callable, found), None)


def _own(module: nn.Module) -> dict[str, Tensor]:
    return {name: t for name, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}


def _only_holds(module: nn.Module) -> bool:
    below = [*module.parameters(), *module.buffers()]
    return not _own(module) and bool(below) and all(t.is_meta for t in below)


def _check(name: str, module: nn.Module, initialize: Initialize, holds: bool) -> None:
    ways = "pass Accelerator(initialize=function), which is called with each such module and fills its tensors, or build it off meta"
    where = f"{type(module).__name__} {name!r}" if name else f"this {type(module).__name__}"
    there = [n for n, t in _own(module).items() if t.is_meta]
    real = [n for n, t in _own(module).items() if not t.is_meta]
    if there and _resetter(module) is None and initialize is None:
        raise PrepareError(
            f"{where} has {there[0]!r} on the meta device, without values, and no reset_parameters(): {ways}"
        )
    if there and real:
        raise PrepareError(
            f"{where} has {there[0]!r} on the meta device and values in {real[0]!r}: build it on meta as a whole, or not at all"
        )
    other = next((n for n in OTHERS if callable(getattr(module, n, None))), None)
    if other and initialize is None and not holds and any(t.is_meta for t in module.parameters()):
        raise PrepareError(
            f"{where} has {other}(), which did nothing on the meta device and is not called by us: {ways}. If it takes a module, "
            f"initialize=model.{other} will do"
        )
    loose = next((n for n, v in vars(module).items() if isinstance(v, Tensor) and v.is_meta), None)
    if loose:
        raise PrepareError(
            f"{where} has a tensor {loose!r} on the meta device that is neither parameter nor buffer: register it, or build off meta"
        )


def _fill(module: nn.Module, device: torch.device, initialize: Initialize, origin: dict[int, Tensor]) -> None:
    own = _own(module)
    new = {name: t for name, t in own.items() if t.is_meta}
    tied = {name: t for name, t in own.items() if id(t) in origin}
    if not new and not tied:
        return
    swap_in(module, lambda t: _like(t, device) if t.is_meta else t)
    # Tied values are drawn and thrown away, so that the random stream continues as if the model had been built normally.
    for name, tensor in tied.items():
        _table(module, name)[name] = _like(tensor, device)
    versions = {name: tensor._version for name, tensor in new.items()}
    with torch.no_grad(), device:
        reset = _resetter(module)
        if reset is not None:
            reset()
        if initialize is not None:
            initialize(module)
    for name, tensor in tied.items():
        _table(module, name)[name] = tensor
    for name, tensor in new.items():
        now = _table(module, name)[name]
        if now.is_meta or (now is tensor and _unwritten(tensor, versions[name])):
            raise PrepareError(
                f"nothing gave {name!r} of {type(module).__name__} values after it was built on the meta device: let its "
                "reset_parameters() do it, pass Accelerator(initialize=function), or build the model off meta"
            )
        origin[id(now)] = now


def _table(module: nn.Module, name: str) -> dict[str, Tensor]:
    return module._parameters if name in module._parameters else module._buffers  # type: ignore[return-value]


def swap_in(module: nn.Module, fresh: Callable[[Tensor], Tensor]) -> None:
    """Give `module`'s own parameters and buffers, which stay the same objects, storage and values of ``fresh(tensor)``, or of itself."""
    for buffer in module._buffers.values():
        if buffer is not None and (new := fresh(buffer)) is not buffer:
            torch.utils.swap_tensors(buffer, new)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        # Lets modules with weak references to parameters (LSTM) release them.
        module._apply(fresh, recurse=False)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    """Storage for `tensor`; floats begin as NaN, by which `_unwritten` knows them."""
    fresh = torch.empty_like(tensor, device=device, requires_grad=False)
    if fresh.is_floating_point() or fresh.is_complex():
        fresh.fill_(torch.nan)
    return nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh


def _unwritten(tensor: Tensor, version: int) -> bool:
    if not tensor.numel():
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.detach().reshape(-1)[0].isnan())
    return tensor._version == version

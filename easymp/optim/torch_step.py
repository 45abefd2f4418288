"""What steps an optimizer, torch's fused step or kernels; a clip that is left to the step; and norms of lists of tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import cuda
from ..base.dtensor import add_up, dense, local
from ..errors import StepError
from ..precision.scaler import widest

if TYPE_CHECKING:
    from ..cuda.cupy_launcher import CupyLauncher
    from ..cuda.rule import Rule

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
DEVICES = {torch.optim.Adagrad: {"cpu", "cuda"}}
EVERYWHERE = {"cpu", "cuda", "mps", "xpu"}
SHARDED = (torch.optim.Adam, torch.optim.AdamW)  # DTensor has rules for these fused steps
DENSE_ONLY = (torch.optim.SGD, torch.optim.Adagrad)  # only their plain step takes sparse gradients
HOOKS = tuple(
    f"_optimizer_{call}_{when}_hooks"
    for call in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
)  # attributes of a torch optimizer
KERNEL_DEVICES = ("cuda",)  # a test adds the CPU
IMPLEMENTATION = ("fused", "foreach", "capturable")  # how the step runs, not what it computes


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters of the param groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def step_without_hooks(kind: type[torch.optim.Optimizer]) -> Any:
    """`kind.step` without torch's global hooks, for a step inside of one that has called them."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """The loss of a closure that was given to `step`."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


# -- torch's fused step -------------------------------------------------------------------------------------------------


def fuse(
    optimizer: torch.optim.Optimizer,
    models: Iterable[nn.Module] = (),
    kind: type[torch.optim.Optimizer] | None = None,
) -> str | None:
    """Let `optimizer` run fused, if the user left that open and torch can; returns why not, or None when it now does.

    Only the ``fused`` entry of its param groups changes: the state, the numbers (within rounding, 3e-8) and checkpoints stay.
    Subclasses of torch's classes are left alone.

    Args:
        models: hold the optimizer's parameters; their embeddings say whether gradients are sparse.
        kind: torch's class of the step; the optimizer's own by default.
    """
    kind = kind or type(optimizer)
    if kind not in FUSED:
        return f"torch has no fused step for {kind.__name__}"
    kinds = (nn.Embedding, nn.EmbeddingBag)
    modules = (item for model in models for item in model.named_modules()) if kind in DENSE_ONLY else ()
    sparse = {id(m.weight): name for name, m in modules if isinstance(m, kinds) and m.sparse}
    for group in optimizer.param_groups:
        held = (p for p in group["params"] if not p.is_meta)  # meta parameters are of other stages
        refusals = (_parameter_refusal(kind, p, sparse.get(id(p))) for p in held)
        why_not = _group_refusal(kind, group) or next(filter(None, refusals), None)
        if why_not is not None:
            return why_not
    if optimizer.state and any(p.device.type not in ("cpu", "meta") for p in parameters_of(optimizer)):
        return "it has stepped already, with its counters where the plain step keeps them"
    for group in optimizer.param_groups:
        group["fused"] = True
    optimizer.defaults["fused"] = True
    fill_momentum(optimizer, kind)
    return None


def _group_refusal(kind: type, group: dict[str, Any]) -> str | None:
    if len({getattr(parameter, "device_mesh", None) for parameter in group["params"]}) > 1:
        return f"torch's fused {kind.__name__} does not take parameters that are split and others that are not, in one group"
    if group.get("fused") is not None or group.get("foreach") is not None:
        return "fused or foreach was chosen by the caller"
    if group.get("differentiable") or group.get("capturable"):
        return "a differentiable or capturable step was asked for"
    if group.get("momentum") and group.get("dampening"):
        return "with dampening, the first step differs from the others, and torch's fused SGD takes it for all parameters at once"
    return None


def _parameter_refusal(kind: type, parameter: Any, sparse: str | None) -> str | None:
    device, fused = parameter.device.type, f"torch's fused {kind.__name__}"
    if sparse is not None:
        return f"{fused} does not take the sparse gradients of {sparse!r}"
    if not torch.is_floating_point(parameter) or device not in DEVICES.get(kind, EVERYWHERE):
        return f"{fused} does not take {parameter.dtype} on {device}"
    if kind is torch.optim.SGD and device == "cpu" and parameter.dtype in (torch.bfloat16, torch.float16):
        # In torch 2.13 its kernel computes something else from 32 elements on; the plain step is right.
        return f"{fused} is wrong for {parameter.dtype} on a CPU"
    if kind not in SHARDED and hasattr(parameter, "to_local"):
        return f"{fused} does not take sharded parameters"
    if (type(parameter) is nn.Parameter and parameter.is_contiguous()) or dense(local(parameter)):
        return None
    return f"{fused} is wrong for a parameter that has gaps in memory, or overlaps"


def fill_momentum(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer] | None = None) -> None:
    """Start the momentum of fused SGD at zero for all parameters; the first step stays the same (without dampening)."""
    # torch's fused SGD makes the buffers at the first step, without a value: an overflow skipped on the device leaves them so, and a
    # parameter whose first gradient comes later than another's is an error.
    if (kind or type(optimizer)) is not torch.optim.SGD:
        return
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:
                here = parameter.requires_grad and not parameter.is_meta
                if here and optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def keep_implementation(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """`state`, with `optimizer`'s own choice of implementation: the machine that wrote it may have had another."""
    if len(state["param_groups"]) != len(optimizer.param_groups):
        return state  # torch raises the error
    groups = [
        {**saved, **{word: own[word] for word in IMPLEMENTATION if word in own}}
        for saved, own in zip(state["param_groups"], optimizer.param_groups)
    ]
    return {**state, "param_groups": groups}


# -- the step by kernels --------------------------------------------------------------------------------------------------


def launcher_of(optimizer: torch.optim.Optimizer, find: Callable[[], Rule | str]) -> CupyLauncher | str:
    """What launches the steps of `optimizer` as kernels, by the rule that `find` gives; or why torch steps, in words."""
    # Meta parameters are of other stages.
    held = [p for p in parameters_of(optimizer) if not p.is_meta]
    devices = {p.device for p in held}
    if len(devices) != 1:
        return "its parameters lie on several devices" if devices else "there are no parameters"
    device = devices.pop()
    if device.type not in KERNEL_DEVICES:
        return f"our kernels run on NVIDIA GPUs, not on {device.type}"
    rule = find()
    if isinstance(rule, str):
        return rule
    for group in optimizer.param_groups:
        refusal = rule.refuse(group)
        if refusal is not None:
            return refusal
    launcher = cuda.launcher_for(device)
    if isinstance(launcher, cuda.Unavailable):
        return launcher.reason
    if not all(cuda.takes(p, device) for p in held):
        return "our kernels take dense float32, bfloat16 and float16 parameters, and some are not"
    return launcher


# -- before a step ------------------------------------------------------------------------------------------------------

# Our own hooks, to which clipped and unclipped gradients are the same.
indifferent: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook of the user looks at gradients just before `optimizer` steps."""
    hooks: dict[int, Any] = optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]
    return bool(hooks) and any(hook not in indifferent for hook in hooks.values())


class Clip:
    """A factor (float32, 0-dim) that a clip has left to the next step, and the gradients that it, or the kernels, `measured`."""

    def __init__(
        self, factor: Tensor, gradients: Iterable[tuple[Tensor, Tensor]], measured: Tensor | None = None
    ) -> None:
        self.factor, self.measured = factor, measured
        self._seen = [(p, g, (part := local(g)), part._version) for p, g in gradients]

    def gradients(self) -> list[Tensor]:
        """The gradients that are still there; StepError where some are not those that were measured."""
        there = []
        for parameter, gradient, part, version in self._seen:
            now = parameter.grad
            if now is gradient and part._version == version:
                there.append(gradient)
            elif now is not None and bool(local(now.detach()).any()):
                what = f"the gradient of a parameter of shape {tuple(parameter.shape)} was changed between clip_grad_norm_ and step()"
                why = "There it is neither clipped nor divided by the loss scale yet, for the step does both as it reads"
                raise StepError(
                    f"{what}. {why}: change gradients before you clip, or use Accelerator(fused=False)"
                )
        return there

    def apply(self) -> None:
        """Multiply the gradients in memory, as if nothing had been left to the step."""
        multiply(self.gradients(), self.factor)


# -- norms --------------------------------------------------------------------------------------------------------------


def wide_norms(tensors: list[Tensor]) -> list[Tensor]:
    """The 2-norm of each, in float32, or in its own dtype where that is wider."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(i)
    if len(by_kind) == 1 and tensors[0].dtype == torch.float32:
        return list(torch._foreach_norm(tensors))
    norms = list(tensors)
    for (_, dtype), places in by_kind.items():
        to = {"dtype": torch.float32} if dtype.itemsize < 4 else {}
        for i, norm in zip(places, torch._foreach_norm([tensors[i] for i in places], 2, **to)):
            norms[i] = norm
    return norms


def whole_squares(parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """Σ x² of each whole tensor, [tensors], which are spread as `parameters`; a collective where any is sharded."""
    norms = stacked(wide_norms([values(local(t)) for t in tensors]))
    squares = norms.to(widest(norms.device)).square()
    add_up(parameters, squares)
    return squares


def stacked(numbers: Sequence[Tensor]) -> Tensor:
    """One number of each tensor, on the first one's device; in its widest float where they differ."""
    first = numbers[0]
    if all(n.device == first.device and n.dtype == first.dtype for n in numbers):
        return torch.stack(list(numbers))
    return torch.stack([n.to(first.device, widest(first.device)) for n in numbers])


def totals_of(gradients: Sequence[Tensor], copies: Sequence[int], home: torch.device) -> Tensor:
    """Σ g², each element divided by the number of its `copies`, and the number of gradients that are not finite; wide."""
    norms = wide_norms([gradient for gradient, held in zip(gradients, copies) if held and gradient.numel()])
    each = stacked(norms) if norms else torch.zeros(1, device=home)
    squares = each.to(widest(each.device)).square()
    shared = [held for gradient, held in zip(gradients, copies) if held and gradient.numel()]
    if any(held != 1 for held in shared):
        squares = squares / torch.tensor(shared, dtype=squares.dtype).to(each.device, non_blocking=True)
    return torch.stack([squares.sum(), (~each.isfinite()).sum().to(squares.dtype)])


@torch.no_grad()
def multiply(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply in place."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        part = local(gradient._values() if gradient.is_sparse else gradient)
        if part.numel():
            by_device.setdefault(part.device, []).append(part)
    for device, parts in by_device.items():
        torch._foreach_mul_(parts, factor.to(device))


def values(tensor: Tensor) -> Tensor:
    """The numbers of a sparse tensor, each place once; any other tensor itself."""
    return tensor.coalesce()._values() if tensor.is_sparse else tensor


def wide(tensor: Tensor) -> Tensor:
    """`tensor` outside of autograd, and in fp32 if it has half precision."""
    return tensor.detach().float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.detach()

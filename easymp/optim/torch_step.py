"""Steps of torch's optimizers: the choice of fused ones and of kernels, clips left to the step, norms of gradients."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from .. import cuda
from ..base.dtensor import add_up, dense, local, meshes, parts, settle
from ..errors import StepError
from ..precision.scaler import inverse, widest
from ..protocols import Counting

if TYPE_CHECKING:
    from ..cuda.cupy_launcher import CupyLauncher
    from ..cuda.rule import Rule

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
DEVICES: dict[type, set[str]] = {torch.optim.Adagrad: {"cpu", "cuda"}}
EVERYWHERE = {"cpu", "cuda", "mps", "xpu"}
SHARDED = (torch.optim.Adam, torch.optim.AdamW)  # whose step `step_on_shards` gives plain tensors
DENSE_ONLY = (torch.optim.SGD, torch.optim.Adagrad)  # only their plain step takes sparse gradients
HOOKS = tuple(  # attributes of a torch optimizer
    f"_optimizer_{call}_{time}_hooks" for call in ("step", "state_dict", "load_state_dict") for time in ("pre", "post")
)
KERNEL_DEVICES = ("cuda",)  # a test adds the CPU
IMPLEMENTATION = ("fused", "foreach", "capturable")  # options that choose how the step runs, not what it computes


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters of the param groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def step_without_hooks(kind: type[torch.optim.Optimizer]) -> Any:
    """`kind.step` without torch's global hooks, for a step inside of one that has called them."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """The loss of a closure that was given to `step`."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Let torch's schedulers know that `optimizer` has stepped, by which they check the order of calls."""
    if hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched"):
        optimizer._opt_called = True  # type: ignore[attr-defined]  # not in torch's types


@contextmanager
def without_decay(groups: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Inside, the weight decay of these param groups is 0."""
    before = [(group, group["weight_decay"]) for group in groups if "weight_decay" in group]
    try:
        for group, _ in before:
            group["weight_decay"] = 0.0
        yield
    finally:
        for group, decay in before:
            group["weight_decay"] = decay


# -- torch's fused step ------------------------------------------------------------------------------------------------


def fuse(
    optimizer: torch.optim.Optimizer, models: Iterable[nn.Module] = (), kind: type[torch.optim.Optimizer] | None = None
) -> str | None:
    """Let `optimizer` run fused, if the user left that open and torch can; returns the reason why not, or None.

    Only ``fused`` in its param groups changes. Subclasses of torch's classes are left alone, unless `kind` is torch's
    class of their step. The embeddings of `models` say whether gradients are sparse.
    """
    kind = kind or type(optimizer)
    if kind not in FUSED:
        return f"torch has no fused step for {kind.__name__}"
    sparse = _sparse_embeddings(kind, models)
    for group in optimizer.param_groups:
        if (refusal := _refusal(kind, group, sparse)) is not None:
            return refusal
    if optimizer.state and any(p.device.type not in ("cpu", "meta") for p in parameters_of(optimizer)):
        return "it has stepped already, with its counters where the plain step keeps them"
    for group in (*optimizer.param_groups, optimizer.defaults):
        group["fused"] = True
    fill_momentum(optimizer, kind)
    return None


def fuses(optimizer: torch.optim.Optimizer, group: dict[str, Any], models: Iterable[nn.Module]) -> bool:
    """Whether a param group that is about to join an optimizer can step fused, as `fuse` has decided for the others."""
    kind, options = type(optimizer), {**optimizer.defaults, "fused": None, **group}
    return _refusal(kind, options, _sparse_embeddings(kind, models)) is None


def _sparse_embeddings(kind: type, models: Iterable[nn.Module]) -> dict[int, str]:
    """Ids of weights of `models` with sparse gradients → names, if the fused step of `kind` does not take them."""
    modules = (item for model in models for item in model.named_modules()) if kind in DENSE_ONLY else ()
    embeddings = ((name, m) for name, m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
    return {id(m.weight): name for name, m in embeddings if m.sparse}


def _refusal(kind: type, group: dict[str, Any], sparse: Mapping[int, str]) -> str | None:
    """Why a param group cannot step fused. `sparse`: id of an embedding's weight with sparse gradients → its name."""
    fused = f"torch's fused {kind.__name__}"
    if group.get("fused") is not None or group.get("foreach") is not None:
        return "fused or foreach was chosen by the caller"
    if group.get("differentiable") or group.get("capturable"):
        return "a differentiable or capturable step was asked for"
    if group.get("momentum") and group.get("dampening"):
        return "with dampening the first step differs, and torch's fused SGD takes it for all parameters at once"
    for parameter in group["params"]:
        device = parameter.device.type
        if device == "meta":  # of another stage
            continue
        if id(parameter) in sparse:
            return f"{fused} does not take the sparse gradients of {sparse[id(parameter)]!r}"
        if not torch.is_floating_point(parameter) or device not in DEVICES.get(kind, EVERYWHERE):
            return f"{fused} does not take {parameter.dtype} on {device}"
        if kind is torch.optim.SGD and device == "cpu" and parameter.dtype in (torch.bfloat16, torch.float16):
            # In torch 2.13 its kernel computes something else from 32 elements on; the plain step is right.
            return f"{fused} is wrong for {parameter.dtype} on a CPU"
        if kind not in SHARDED and hasattr(parameter, "to_local"):
            return f"{fused} does not take sharded parameters"
        whole = type(parameter) is nn.Parameter and parameter.is_contiguous()
        if not whole and not dense(local(parameter)):
            return f"{fused} is wrong for a parameter that has gaps in memory, or overlaps"
    return None


def step_on_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Give the step of `optimizer` the local shards of its DTensors; returns whether it is one of `SHARDED`.

    torch's fused and foreach steps plan a list of DTensors in time that grows faster than its length, and take no list
    of DTensors and plain tensors. The states stay DTensors.
    """
    if type(optimizer) not in SHARDED:
        return False
    collect = partial(type(optimizer)._init_group, optimizer)  # type: ignore[attr-defined]  # not in torch's types

    def collect_shards(group: dict[str, Any], parameters: list[Tensor], *states: list[Tensor]) -> Any:
        for parameter in group["params"]:
            settle(parameter)  # a script may have set a gradient of another layout
        result = collect(group, parameters, *states)
        torch.autograd.graph.increment_version(parameters)  # as a step on themselves does
        for tensors in (parameters, *states):
            tensors[:] = parts(tensors)
        return result

    vars(optimizer)["_init_group"] = collect_shards
    return True


def fill_momentum(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer] | None = None) -> None:
    """Start the momentum of fused SGD at zero for all parameters; the first step stays the same (without dampening)."""
    # torch's fused SGD makes the buffers at the first step, without a value: an overflow skipped on the device leaves
    # them so, and a parameter whose first gradient comes later than another's is an error.
    if (kind or type(optimizer)) is not torch.optim.SGD:
        return
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"] and not group["dampening"]:
            for p in group["params"]:
                if p.requires_grad and not p.is_meta and optimizer.state[p].get("momentum_buffer") is None:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def keep_implementation(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """`state`, with `optimizer`'s own choice of implementation: the machine that wrote it may have had another."""
    if len(state["param_groups"]) != len(optimizer.param_groups):
        return state  # torch raises the error
    groups = [
        {**saved, **{option: group[option] for option in IMPLEMENTATION if option in group}}
        for saved, group in zip(state["param_groups"], optimizer.param_groups)
    ]
    return {**state, "param_groups": groups}


def launcher_of(
    optimizer: torch.optim.Optimizer, rule_of: Callable[[], Rule | None]
) -> tuple[CupyLauncher, Rule] | str:
    """The launcher and the rule of the kernels that step `optimizer`; or the reason why torch steps it."""
    parameters = [p for p in parameters_of(optimizer) if not p.is_meta]  # meta parameters are of other stages
    devices = {p.device for p in parameters}
    if len(devices) != 1:
        return "its parameters lie on several devices" if devices else "there are no parameters"
    device = devices.pop()
    if device.type not in KERNEL_DEVICES:
        return f"our kernels run on NVIDIA GPUs, not on {device.type}"
    rule = rule_of()
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "a differentiable step was asked for"
        if group.get("foreach") is not None or group.get("fused") is False:
            return "fused or foreach was chosen by the caller"
        if rule is not None and (refusal := rule.refuse(group)) is not None:
            return refusal
    if rule is None:
        return f"there is no kernel for {type(optimizer).__name__}"
    if rule.survey is not None:
        return f"a step by {rule.name} needs norms of whole tensors, which torch's operations compute"
    launcher: CupyLauncher | str = cuda.launcher_for(device)
    if isinstance(launcher, str):
        return launcher
    if not all(cuda.steps(p, device) for p in parameters):
        return "our kernels take dense float32, bfloat16 and float16 parameters, and some are not"
    return launcher, rule


# -- gradients that a script may change --------------------------------------------------------------------------------


def has_user_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook of the user may read gradients just before `optimizer` steps. Our own do not mind a clip."""
    hooks: dict[int, Any] = optimizer._optimizer_step_pre_hooks
    return any(not str(getattr(hook, "__module__", "")).startswith("easymp.") for hook in hooks.values())


class Snapshot:
    """The gradient that `parameter` has now, to see later what a script does to it. Held weakly, since it is large."""

    def __init__(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        self.parameter = parameter
        self._gradient, self._version = weakref.ref(gradient), local(gradient)._version

    @property
    def present(self) -> bool:
        """Whether the gradient is still the parameter's; values may have changed."""
        return self.parameter.grad is not None and self.parameter.grad is self._gradient()

    @property
    def unchanged(self) -> bool:
        """Whether the gradient is present and its values are unchanged."""
        gradient = self.parameter.grad
        return self.present and gradient is not None and local(gradient)._version == self._version

    @property
    def cleared(self) -> bool:
        """Whether the parameter now has no gradient, or one of zeros. Waits for the device."""
        gradient = self.parameter.grad
        return gradient is None or is_zero(gradient)


class Clip:
    """A factor (float32, 0-dim) that a clip has left to the next step, and the gradients that it has measured."""

    def __init__(self, factor: Tensor, gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
        self.factor = factor
        self._snapshots = [Snapshot(parameter) for parameter, _ in gradients]

    def gradients(self) -> list[Tensor]:
        """The gradients, without those that were cleared since; StepError if one was changed."""
        present: list[Any] = []
        for snapshot in self._snapshots:
            if snapshot.unchanged:
                present.append(snapshot.parameter.grad)
            elif not snapshot.cleared:
                raise StepError(
                    f"the gradient of a parameter of shape {tuple(snapshot.parameter.shape)} was changed between "
                    "clip_grad_norm_ and step(). There it is neither clipped nor divided by the loss scale yet, for "
                    "the step does both as it reads: change gradients before you clip, or use Settings(fused=False)"
                )
        return present

    def apply(self) -> None:
        """Multiply the gradients in memory."""
        multiply(self.gradients(), self.factor)


class FirstGradient:
    """The first gradient as a backward left it, to see whether the script clears it before its window ends."""

    __slots__ = ("_parameter", "_version")

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameter: Tensor | None = None
        for parameter in parameters:
            if parameter.grad is not None:
                self._parameter, self._version = parameter, local(parameter.grad)._version
                break

    def check_kept(self) -> None:
        """StepError if it was cleared."""
        if self._parameter is None:
            return
        gradient = self._parameter.grad
        if gradient is None or (local(gradient)._version != self._version and is_zero(gradient)):
            raise StepError(
                "model.zero_grad(), or p.grad = None, inside accumulate() has cleared the gradients of the window's "
                "earlier micro-batches: call optimizer.zero_grad() of the prepared optimizer, which keeps them until "
                "the window ends"
            )

    def check_unchanged(self) -> None:
        """Any change is allowed here."""


class GradientsLeft(FirstGradient):
    """Gradients as a backward left them. With a `refusal`, a change before the step is an error.

    `compares_values`: compare norms, too (waits for the device): changes through ``.data`` and of DTensors raise no
    version. `shared`: gradients are views of a bucket, or shards, which ``p.grad.data = value`` does not reach: refuse
    that; only the first is checked, or with `compares_values` all.
    """

    __slots__ = ("_norms", "_refusal", "_snapshots", "_storages")

    def __init__(
        self, parameters: Iterable[Tensor], refusal: Callable[[], str] | None, compares_values: bool, shared: bool
    ) -> None:
        with_gradient = (p for p in parameters if p.grad is not None)
        watched = list(with_gradient if refusal is not None or compares_values else islice(with_gradient, 1))
        super().__init__(watched)
        self._refusal = refusal
        self._snapshots = [Snapshot(p) for p in watched] if refusal is not None else []
        shared_parameters = watched if compares_values else watched[:1]
        self._storages = [
            (p, weakref.ref(p.grad), storage_id(p.grad)) for p in shared_parameters if p.grad is not None and shared
        ]
        self._norms = self._measure() if compares_values else {}

    def _measure(self) -> dict[Snapshot, Tensor]:
        """The norms of the gradients that have not been exchanged since."""
        gradients = {
            snapshot: values(local(snapshot.parameter.grad.detach()))
            for snapshot in self._snapshots
            if snapshot.unchanged and snapshot.parameter.grad is not None
        }
        present = [snapshot for snapshot, gradient in gradients.items() if gradient.numel()]
        return dict(zip(present, fp32_norms([gradients[snapshot] for snapshot in present])))

    def check_unchanged(self) -> None:
        """Raise StepError if a gradient was changed. A cleared one is ignored: no step uses it."""
        for parameter, gradient, storage in self._storages:
            if parameter.grad is not None and parameter.grad is gradient() and storage_id(parameter.grad) != storage:
                raise StepError(
                    "a gradient was given values by p.grad.data = ..., which do not reach the memory that ranks "
                    "average: write p.grad.copy_(value), or p.grad = value"
                )
        if self._refusal is None:
            return
        if any(not s.unchanged and not s.cleared for s in self._snapshots) or self._values_changed():
            raise StepError(self._refusal())

    def _values_changed(self) -> bool:
        norms = self._measure() if self._norms else {}
        if not norms:
            return False
        before, after = stacked([self._norms[snapshot] for snapshot in norms]), stacked(list(norms.values()))
        return bool(((before != after) & (after != 0) & ~(before.isnan() & after.isnan())).any())


def is_zero(gradient: Tensor) -> bool:
    """Whether all elements are zero. Waits for the device."""
    return not bool(values(local(gradient.detach())).any())


def storage_id(tensor: Tensor) -> int:
    """The identity of a tensor's memory; of a DTensor, of its own and not of its shard's. Sparse ones have none: 0."""
    storage: int = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
    return storage


# -- norms -------------------------------------------------------------------------------------------------------------


def fp32_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each, in float32, or in its own dtype where that is wider."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(i)
    norms = list(tensors)
    for (_, dtype), numbers in by_kind.items():
        wider = torch.float32 if dtype.itemsize < 4 else None
        for i, norm in zip(numbers, torch._foreach_norm([tensors[i] for i in numbers], 2, dtype=wider)):
            norms[i] = norm
    return norms


def counting_by_meshes(parameters: Iterable[Tensor]) -> Counting:
    """How the ranks count the gradients of `parameters`, by the meshes of those that are DTensors."""
    device_meshes = meshes(parameters)
    ranks = math.prod(mesh.size() for mesh in device_meshes)

    def add(totals: Tensor) -> None:
        for mesh in device_meshes:
            for dim in range(mesh.ndim):
                torch.distributed.all_reduce(totals, group=mesh.get_group(dim))

    return Counting(partial(copies, ranks=ranks), add) if device_meshes else Counting()


def copies(tensor: Any, ranks: int) -> int:
    """The number of `ranks` ranks that hold an element of `tensor`: all for a plain tensor, fewer for a sharded one."""
    # torch's _StridedShard is a Shard in some versions only.
    dims = [dim for dim, placement in enumerate(getattr(tensor, "placements", ())) if not placement.is_replicate()]
    return ranks // math.prod([int(tensor.device_mesh.size(dim)) for dim in dims])


def sums_of_squares(parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """Σ x² of each whole tensor, [tensors], which are spread as `parameters`; a collective where any is sharded."""
    norms = stacked(fp32_norms([values(local(t)) for t in tensors]))
    squares = norms.to(widest(norms.device)).square()
    add_up(parameters, squares)
    return squares


def stacked(numbers: Sequence[Tensor]) -> Tensor:
    """One number of each tensor, on the first one's device; in its widest float where they differ."""
    first = numbers[0]
    if all(n.device == first.device and n.dtype == first.dtype for n in numbers):
        return torch.stack(list(numbers))
    return torch.stack([n.to(first.device, widest(first.device)) for n in numbers])


def totals_of(gradients: Sequence[Tensor], copies: Sequence[int], device: torch.device) -> Tensor:
    """Σ g², each element divided by the number of its `copies`, and how many gradients are not finite. Wide."""
    counted = [(gradient, count) for gradient, count in zip(gradients, copies) if count and gradient.numel()]
    norms = stacked(fp32_norms([g for g, _ in counted])) if counted else torch.zeros(1, device=device)
    squares = norms.to(widest(norms.device)).square()
    if any(count != 1 for _, count in counted):
        counts = torch.tensor([count for _, count in counted], dtype=squares.dtype)
        squares = squares / counts.to(norms.device, non_blocking=True)
    return torch.stack([squares.sum(), (~norms.isfinite()).sum().to(squares.dtype)])


@torch.no_grad()
def multiply(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply in place."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        part = local(gradient._values() if gradient.is_sparse else gradient)
        if part.numel():
            by_device.setdefault(part.device, []).append(part)
    for device, on_device in by_device.items():
        torch._foreach_mul_(on_device, factor.to(device))


def values(tensor: Tensor) -> Tensor:
    """The numbers of a sparse tensor, each index once; any other tensor itself."""
    return tensor.coalesce()._values() if tensor.is_sparse else tensor


def wide(tensor: Tensor) -> Tensor:
    """`tensor` outside of autograd, and in fp32 if it has half precision."""
    return tensor.detach().float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.detach()


class WrappingOptimizer(torch.optim.Optimizer):
    """Base of optimizers that show another one's groups, defaults and state, without torch's own constructor."""

    optimizer: torch.optim.Optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # an attribute in torch
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # an attribute in torch
        return self.optimizer.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]  # an attribute in torch
        return self.optimizer.state

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)


# -- easymp's own optimizers -------------------------------------------------------------------------------------------


class OwnOptimizer(torch.optim.Optimizer):
    """Base of easymp's optimizers, which step by torch's operations; `Engine` steps those with a rule by our kernels.

    A step reads its factor and the flag of an overflow by torch's protocol for fused optimizers (attributes
    ``grad_scale`` and ``found_inf`` during a step), so torch's GradScaler drives them without a wait for the device.
    """

    rule: ClassVar[Rule | None] = None  # the source of its kernels; None where the step is more than a rule
    counting: Counting | None = None  # of gradients over the ranks; None: by the parameters' meshes
    _step_supports_amp_scaling: ClassVar[bool] = True  # torch's flag: reads `grad_scale` and `found_inf`

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients.

        Args:
            closure: evaluates the model again and returns the loss, as in torch.

        Returns:
            The result of `closure`, or None.
        """
        loss = loss_of(closure)
        scale: Tensor | None = getattr(self, "grad_scale", None)
        self.advance(None if scale is None else inverse(scale), getattr(self, "found_inf", None))
        return loss

    def advance(self, factor: Tensor | None, found_inf: Tensor | None) -> None:
        """Step on gradients times `factor` (float32, 0-dim); do nothing if `found_inf` is above 0."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from here or from torch's optimizer of the same rule; how the step runs stays as it is."""
        super().load_state_dict(keep_implementation(self, state_dict))
        numbers = (i for group in state_dict["param_groups"] for i in group["params"])
        for i, parameter in zip(numbers, parameters_of(self)):
            for key, saved in state_dict["state"].get(i, {}).items():
                loaded = self.state[parameter].get(key)
                # torch gives states their parameter's dtype, which would round numbers that were kept in another one.
                if isinstance(saved, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != saved.dtype:
                    self.state[parameter][key] = saved.to(loaded.device)
